"""The compile cache may never hurt: what it cannot trust it compiles again."""

import _thread
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nxrt import CompileError, InvalidInputError
from nxrt.runtime.compilation.cache_key import cache_key
from nxrt.runtime.compilation.compile_cache import (
    CompileCache,
    default_cache_dir,
    default_cache_nbytes,
)
from nxrt.runtime.compilation.compiler import CompiledKernel, CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from tests.helpers.cache_processes import STRESS

SOURCE = KernelSource("k.cu", "text", (("h.cuh", "header"),))
OPTIONS = CompileOptions("sm_90a", (("A", "1"), ("B", "2")), ("--x", "--y"))


class CountingCompiler(Compiler):
    """Deliver the text as the cubin, and count."""

    def __init__(self, version: str = "13.0") -> None:
        super().__init__()
        self.num_compilations = 0
        self._version = version
        self.failure: CompileError | None = None

    @property
    def version(self) -> str:
        return self._version

    @property
    def identity(self) -> str:
        return self._version

    def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
        self.num_compilations += 1
        if self.failure is not None:
            raise self.failure
        return CompiledKernel(f"cubin of {source.text} for {options.arch}".encode(), "")


def fresh(tmp_path: Path) -> tuple[CompileCache, CountingCompiler]:
    compiler = CountingCompiler()
    return CompileCache(compiler, tmp_path / "cache"), compiler


def entry(tmp_path: Path) -> Path:
    return next((tmp_path / "cache").glob("*.cubin"))


def test_a_second_request_comes_from_memory(tmp_path: Path) -> None:
    cache, compiler = fresh(tmp_path)
    assert cache.get(SOURCE, OPTIONS) == cache.get(SOURCE, OPTIONS)
    assert compiler.num_compilations == 1
    assert cache.stats.memory_hits == 1


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = fresh(tmp_path)[0].get(SOURCE, OPTIONS)
    cache, compiler = fresh(tmp_path)
    assert cache.get(SOURCE, OPTIONS) == first
    assert (compiler.num_compilations, cache.stats.disk_hits) == (0, 1)


@pytest.mark.parametrize("position", ["first", "magic", "digest", "payload", "last"])
def test_a_flipped_bit_is_a_miss(
    tmp_path: Path, position: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = fresh(tmp_path)[0].get(SOURCE, OPTIONS)
    path = entry(tmp_path)
    data = bytearray(path.read_bytes())
    places = {"first": 0, "magic": 5, "digest": 20, "payload": 45, "last": len(data) - 1}
    data[places[position]] ^= 1
    path.write_bytes(data)
    cache, compiler = fresh(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert cache.get(SOURCE, OPTIONS) == content
    assert (compiler.num_compilations, cache.stats.rejected_entries) == (1, 1)
    assert len(caplog.records) == 1
    assert "is not used: it" in caplog.text
    assert fresh(tmp_path)[0].get(SOURCE, OPTIONS) == content
    assert entry(tmp_path).read_bytes() != bytes(data)


def test_every_truncation_is_a_miss(tmp_path: Path) -> None:
    content = fresh(tmp_path)[0].get(SOURCE, OPTIONS)
    whole = entry(tmp_path).read_bytes()
    for length in range(len(whole)):
        entry(tmp_path).write_bytes(whole[:length])
        cache, compiler = fresh(tmp_path)
        assert cache.get(SOURCE, OPTIONS) == content
        assert compiler.num_compilations == 1


def test_an_entry_under_another_key_is_a_miss(tmp_path: Path) -> None:
    cache, _ = fresh(tmp_path)
    other = replace(SOURCE, text="other")
    cache.get(SOURCE, OPTIONS)
    written = entry(tmp_path)
    compiler = CountingCompiler()
    written.rename(written.with_name(f"3-{cache_key(other, OPTIONS, compiler)}.cubin"))
    cache, compiler = fresh(tmp_path)
    assert b"other" in cache.get(other, OPTIONS)
    assert compiler.num_compilations == 1


def test_an_entry_that_is_a_folder_is_a_miss(tmp_path: Path) -> None:
    content = fresh(tmp_path)[0].get(SOURCE, OPTIONS)
    path = entry(tmp_path)
    path.unlink()
    path.mkdir()
    assert fresh(tmp_path)[0].get(SOURCE, OPTIONS) == content


def test_a_folder_that_cannot_be_made_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    cache, compiler = fresh(tmp_path)
    with caplog.at_level(logging.WARNING):
        cache.get(SOURCE, OPTIONS)
        cache.get(replace(SOURCE, text="other"), OPTIONS)
    assert compiler.num_compilations == 2
    assert len(caplog.records) == 1
    assert "going on in memory" in caplog.text


def test_without_a_folder_memory_serves() -> None:
    compiler = CountingCompiler()
    cache = CompileCache(compiler, None)
    assert cache.get(SOURCE, OPTIONS) == cache.get(SOURCE, OPTIONS)
    assert compiler.num_compilations == 1


def test_a_failed_compilation_is_not_remembered(tmp_path: Path) -> None:
    cache, compiler = fresh(tmp_path)
    compiler.failure = CompileError("k.cu", arch="sm_90a", log="no")
    with pytest.raises(CompileError):
        cache.get(SOURCE, OPTIONS)
    compiler.failure = None
    assert not list((tmp_path / "cache").iterdir())
    assert cache.get(SOURCE, OPTIONS)
    assert cache.stats.lock_timeouts == 0


def interrupted(action: Callable[[], object], after_s: float) -> bool:
    """Press Ctrl-C while something runs on the main thread; say whether it took notice."""

    def press() -> None:
        time.sleep(after_s)
        _thread.interrupt_main()

    thread = threading.Thread(target=press)
    try:
        thread.start()
        action()
        thread.join()
    except KeyboardInterrupt:
        return True
    finally:
        thread.join()
    return False


# An interruption between opening a file and the block that closes it leaves that to Python.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_at_any_moment_leaves_no_lock_and_the_next_request_succeeds(
    tmp_path: Path,
) -> None:
    """Of a cold request and of one for a damaged entry, at moments spread over both."""
    for number in range(100 * STRESS):
        compiler = CountingCompiler()
        cache = CompileCache(compiler, tmp_path / "cache", lock_timeout_s=0)
        interrupted(lambda: cache.get(SOURCE, OPTIONS), 0.004 * number / (100 * STRESS))  # noqa: B023
        assert cache.get(SOURCE, OPTIONS).startswith(b"cubin of text")
        again = CompileCache(compiler, tmp_path / "cache", lock_timeout_s=0)
        assert again.get(SOURCE, OPTIONS) == cache.get(SOURCE, OPTIONS)
        assert cache.stats.lock_timeouts == again.stats.lock_timeouts == 0
        if number % 2:
            entry(tmp_path).write_bytes(b"damaged")
        else:
            entry(tmp_path).unlink()
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert [name for name in names if name.endswith(".lock")] == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, MemoryError, RuntimeError])
def test_whatever_ends_a_compilation_leaves_no_lock(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    class Failing(CountingCompiler):
        def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
            if self.num_compilations == 0:
                self.num_compilations = 1
                raise failure
            return super().compile(source, options)

    cache = CompileCache(Failing(), tmp_path / "cache", lock_timeout_s=0)
    with pytest.raises(failure):
        cache.get(SOURCE, OPTIONS)
    assert not list((tmp_path / "cache").iterdir())
    assert cache.get(SOURCE, OPTIONS)
    assert cache.stats.lock_timeouts == 0


def test_a_key_in_progress_holds_up_no_other(tmp_path: Path) -> None:
    release, is_compiling = threading.Event(), threading.Event()

    class Slow(CountingCompiler):
        def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
            if source == SOURCE:
                is_compiling.set()
                release.wait(30)
            return super().compile(source, options)

    cache = CompileCache(Slow(), tmp_path / "cache")
    slow = threading.Thread(target=cache.get, args=(SOURCE, OPTIONS))
    slow.start()
    assert is_compiling.wait(30)
    assert cache.get(replace(SOURCE, text="other"), OPTIONS)
    assert slow.is_alive()
    release.set()
    slow.join()


def test_locks_of_keys_that_are_done_take_no_memory(tmp_path: Path) -> None:
    cache, _ = fresh(tmp_path)
    for number in range(50):
        cache.get(replace(SOURCE, text=f"text {number}"), OPTIONS)
    assert len(cache._turns) == 0


def test_code_that_does_not_load_is_forgotten_in_memory_and_on_disk(tmp_path: Path) -> None:
    cache, compiler = fresh(tmp_path)
    code = cache.get(SOURCE, OPTIONS)
    cache.discard(SOURCE, OPTIONS, code)
    assert not list((tmp_path / "cache").glob("*.cubin"))
    assert cache.fetch(SOURCE, OPTIONS).origin == "compiler"
    assert (compiler.num_compilations, cache.stats.rejected_entries) == (2, 1)


def test_code_that_was_replaced_meanwhile_is_not_forgotten(tmp_path: Path) -> None:
    cache, _ = fresh(tmp_path)
    cache.get(SOURCE, OPTIONS)
    cache.discard(SOURCE, OPTIONS, b"what was there before")
    assert cache.fetch(SOURCE, OPTIONS).origin == "memory"
    assert fresh(tmp_path)[0].fetch(SOURCE, OPTIONS).origin == "disk"


def test_code_of_headers_that_changed_while_it_was_made_is_not_kept(tmp_path: Path) -> None:
    header = tmp_path / "a.h"
    header.write_text("one")

    class Editing(CountingCompiler):
        def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
            header.write_text(f"{self.num_compilations + 2}")
            return super().compile(source, options)

    compiler = Editing()
    compiler._include_dir = tmp_path
    cache = CompileCache(compiler, tmp_path / "cache")
    cache.get(replace(SOURCE, system_headers=("a.h",)), OPTIONS)
    assert not list((tmp_path / "cache").glob("*.cubin"))


class MeetingCompiler(CountingCompiler):
    """Give every other thread time to come as far as compiling, should nothing hold it back."""

    def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
        compiled = super().compile(source, options)
        threading.Event().wait(0.2)
        return compiled


def test_threads_compile_a_key_once() -> None:
    """Without a folder there is no lock file: only the lock within the process is left."""
    compiler = MeetingCompiler()
    cache = CompileCache(compiler, None)
    threads = [threading.Thread(target=cache.get, args=(SOURCE, OPTIONS)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.num_compilations == 1


def test_caches_on_one_folder_compile_a_key_once(tmp_path: Path) -> None:
    """Two caches share no lock but the file's, as two processes do."""
    compilers = [MeetingCompiler(), MeetingCompiler()]
    caches = [CompileCache(compiler, tmp_path / "cache") for compiler in compilers]
    threads = [threading.Thread(target=cache.get, args=(SOURCE, OPTIONS)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(compiler.num_compilations for compiler in compilers) == 1


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"NXRT_CACHE_DIR": "/a"}, Path("/a")),
        ({"NXRT_CACHE_DIR": ""}, None),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/x/nxrt")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, Path("/h/.cache/nxrt")),
        ({}, None),
    ],
    ids=["own", "off", "xdg", "relative xdg", "no home"],
)
def test_the_folder_follows_the_environment(environ: dict[str, str], expected: Path | None) -> None:
    assert default_cache_dir(environ) == expected


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [("", 256 * 2**20), ("0", 0), ("1000", 1000), ("2 MiB", 2 * 2**20), ("1gib", 2**30)],
)
def test_the_limit_follows_the_environment(value: str, nbytes: int) -> None:
    assert default_cache_nbytes({"NXRT_CACHE_MAX_BYTES": value}) == nbytes


@pytest.mark.parametrize("value", ["-1", "much", "1.5 MiB", "1 MB", "٣ KB"])
def test_a_limit_that_is_no_size_is_refused(value: str) -> None:
    with pytest.raises(InvalidInputError, match="NXRT_CACHE_MAX_BYTES"):
        default_cache_nbytes({"NXRT_CACHE_MAX_BYTES": value})
