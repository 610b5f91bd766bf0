"""Compiling ahead of time: everything once, several at a time, and no failure hides another."""

import threading
from pathlib import Path

import pytest

from nxrt import CompileError
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import CompiledKernel, CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.compilation.warm_up import WarmUpJob, WarmUpResult, warm_up
from tests.helpers.cache_processes import StubCompiler


def jobs(tmp_path: Path, *texts: str) -> list[WarmUpJob]:
    made = []
    for number, text in enumerate(texts):
        path = tmp_path / f"k{number}.cu"
        path.write_text(text)
        made.append(WarmUpJob(path, CompileOptions("sm_90a")))
    return made


class MeetingCompiler(Compiler):
    """Finish none before two are at it."""

    def __init__(self) -> None:
        super().__init__()
        self._meeting = threading.Barrier(2, timeout=20)

    def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
        if source.text == "bad":
            raise CompileError(source.name, arch=options.arch, log="bad")
        self._meeting.wait()
        return CompiledKernel(source.text.encode(), "")


def test_several_are_compiled_at_a_time(tmp_path: Path) -> None:
    cache = CompileCache(MeetingCompiler(), None)
    results = warm_up(cache, jobs(tmp_path, "a", "b"), num_workers=2)
    assert [result.origin for result in results] == ["compiler"] * 2


def test_results_come_in_order_and_say_what_failed(tmp_path: Path) -> None:
    cache = CompileCache(MeetingCompiler(), None)
    done: list[WarmUpResult] = []
    todo = [*jobs(tmp_path, "a", "bad", "b"), WarmUpJob(tmp_path / "gone.cu", CompileOptions("x"))]
    results = warm_up(cache, todo, num_workers=4, on_done=done.append)
    assert [result.origin for result in results] == ["compiler", "", "compiler", ""]
    assert [result.job for result in results] == todo
    assert "k1.cu does not compile" in results[1].error
    assert "gone.cu: No such file" in results[3].error
    assert sorted(map(id, done)) == sorted(map(id, results))


def test_what_is_there_is_not_compiled(tmp_path: Path) -> None:
    todo = jobs(tmp_path, "int a;", "int b;")
    for origin in ("compiler", "disk"):
        cache = CompileCache(StubCompiler(tmp_path / "journal", 0), tmp_path / "cache")
        assert {result.origin for result in _warmed(cache, todo)} == {origin}


def _warmed(cache: CompileCache, todo: list[WarmUpJob]) -> list[WarmUpResult]:
    return warm_up(cache, todo, num_workers=2)


def test_an_interruption_leaves_what_is_not_begun(tmp_path: Path) -> None:
    begun = []

    class Counting(Compiler):
        def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
            begun.append((source.name, options.arch))
            return CompiledKernel(b"code", "")

    def interrupt(_: WarmUpResult) -> None:
        raise KeyboardInterrupt

    todo = jobs(tmp_path, *(f"int a{n};" for n in range(200)))
    with pytest.raises(KeyboardInterrupt):
        warm_up(CompileCache(Counting(), None), todo, num_workers=1, on_done=interrupt)
    assert len(begun) < 200
