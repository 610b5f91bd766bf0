"""The compile cache may never hurt: what it cannot trust it compiles again."""

import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from nxrt import CompileError
from nxrt.runtime.compile_cache import CompileCache, cache_key, default_cache_dir
from nxrt.runtime.compiler import CompiledKernel, CompileOptions, Compiler
from nxrt.runtime.source import KernelSource

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
    assert "digest" in caplog.text
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
    written.rename(written.with_name(f"{cache_key(other, OPTIONS, compiler)}.cubin"))
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
    assert len(caplog.records) <= 3
    assert sum("going on in memory" in record.message for record in caplog.records) == 1


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
    assert cache.get(SOURCE, OPTIONS)
    assert not list((tmp_path / "cache").glob("*.tmp"))


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


CHANGES = {
    "name": (replace(SOURCE, name="other.cu"), OPTIONS),
    "text": (replace(SOURCE, text="text "), OPTIONS),
    "header text": (replace(SOURCE, headers=(("h.cuh", "header "),)), OPTIONS),
    "header name": (replace(SOURCE, headers=(("g.cuh", "header"),)), OPTIONS),
    "field boundary": (replace(SOURCE, name="k.cut", text="ext"), OPTIONS),
    "arch": (SOURCE, replace(OPTIONS, arch="sm_90")),
    "define value": (SOURCE, replace(OPTIONS, defines=(("A", "1"), ("B", "3")))),
    "define name": (SOURCE, replace(OPTIONS, defines=(("A", "1"), ("C", "2")))),
    "flag": (SOURCE, replace(OPTIONS, flags=("--x",))),
    "flag order": (SOURCE, replace(OPTIONS, flags=("--y", "--x"))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_everything_that_decides_the_code_changes_the_key(change: str) -> None:
    compiler = CountingCompiler()
    assert cache_key(*CHANGES[change], compiler) != cache_key(SOURCE, OPTIONS, compiler)


def test_the_compilers_version_changes_the_key() -> None:
    older, newer = CountingCompiler("13.0"), CountingCompiler("13.1")
    assert cache_key(SOURCE, OPTIONS, older) != cache_key(SOURCE, OPTIONS, newer)


def test_the_order_of_defines_does_not_change_the_key() -> None:
    turned = replace(OPTIONS, defines=OPTIONS.defines[::-1])
    compiler = CountingCompiler()
    assert cache_key(SOURCE, turned, compiler) == cache_key(SOURCE, OPTIONS, compiler)


@pytest.mark.parametrize("header", ["a.h", "b.hpp", "sub/c.h", "sub/d.h"])
def test_the_bytes_of_every_toolkit_header_reached_change_the_key(
    tmp_path: Path, header: str
) -> None:
    kernel = replace(SOURCE, system_headers=("a.h",))
    (tmp_path / "sub").mkdir()
    texts = {
        "a.h": '#include "b.hpp"\n#include <sub/c.h>\n',
        "b.hpp": "",
        "sub/c.h": '#include "d.h"\n#include <gone.h>\n',
        "sub/d.h": '#include "c.h"\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    compiler = Compiler(include_dir=tmp_path)
    before = cache_key(kernel, OPTIONS, compiler)
    (tmp_path / header).write_text(texts[header] + "// changed\n")
    assert cache_key(kernel, OPTIONS, compiler) != before


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
