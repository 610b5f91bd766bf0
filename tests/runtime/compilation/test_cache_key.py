"""The key changes with everything that decides the code, and with nothing else."""

import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxrt.runtime.compilation import cache_key as cache_key_module
from nxrt.runtime.compilation import nvrtc
from nxrt.runtime.compilation.cache_key import cache_key
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource, load_source
from tests.helpers.cache_processes import StubCompiler

SOURCE = KernelSource("k.cu", "text", (("h.cuh", "header"),))
OPTIONS = CompileOptions("sm_90a", (("A", "1"), ("B", "2")), ("--x", "--y"))


class NamedCompiler(Compiler):
    """Be an NVRTC of some identity."""

    def __init__(self, identity: str = "13.0 build 1") -> None:
        super().__init__()
        self._identity = identity

    @property
    def version(self) -> str:
        return "13.0"

    @property
    def identity(self) -> str:
        return self._identity


CHANGES = {
    "name": (replace(SOURCE, name="other.cu"), OPTIONS),
    "text": (replace(SOURCE, text="text "), OPTIONS),
    "header text": (replace(SOURCE, headers=(("h.cuh", "header "),)), OPTIONS),
    "header name": (replace(SOURCE, headers=(("g.cuh", "header"),)), OPTIONS),
    "field boundary": (replace(SOURCE, name="k.cut", text="ext"), OPTIONS),
    "group boundary": (replace(SOURCE, headers=()), replace(OPTIONS, flags=("h.cuh", "header"))),
    "arch": (SOURCE, replace(OPTIONS, arch="sm_90")),
    "artefact": (SOURCE, replace(OPTIONS, artefact="ptx")),
    "define value": (SOURCE, replace(OPTIONS, defines=(("A", "1"), ("B", "3")))),
    "define name": (SOURCE, replace(OPTIONS, defines=(("A", "1"), ("C", "2")))),
    "define that is a flag": (
        SOURCE,
        replace(OPTIONS, defines=(), flags=("A", "1", "B", "2", "--x", "--y")),
    ),
    "flag": (SOURCE, replace(OPTIONS, flags=("--x",))),
    "flag order": (SOURCE, replace(OPTIONS, flags=("--y", "--x"))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_everything_that_decides_the_code_changes_the_key(change: str) -> None:
    compiler = NamedCompiler()
    assert cache_key(*CHANGES[change], compiler) != cache_key(SOURCE, OPTIONS, compiler)


def test_the_order_of_defines_does_not_change_the_key() -> None:
    turned = replace(OPTIONS, defines=OPTIONS.defines[::-1])
    compiler = NamedCompiler()
    assert cache_key(SOURCE, turned, compiler) == cache_key(SOURCE, OPTIONS, compiler)
    assert turned.arguments() == OPTIONS.arguments()


def test_the_place_of_a_source_does_not_change_the_key(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "k.cu").write_text('#include "h.cuh"\n')
        (tmp_path / folder / "h.cuh").write_text("int a;\n")
    first, second = (load_source(tmp_path / folder / "k.cu") for folder in ("a", "b"))
    assert first.paths != second.paths
    compiler = NamedCompiler()
    assert cache_key(first, OPTIONS, compiler) == cache_key(second, OPTIONS, compiler)


def test_a_patch_release_of_the_compiler_changes_the_key() -> None:
    older, newer = NamedCompiler("13.0 build 1"), NamedCompiler("13.0 build 2")
    assert cache_key(SOURCE, OPTIONS, older) != cache_key(SOURCE, OPTIONS, newer)


def test_a_new_key_version_changes_key_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cache_key(SOURCE, OPTIONS, NamedCompiler())
    monkeypatch.setattr(cache_key_module, "KEY_VERSION", 4)
    assert cache_key(SOURCE, OPTIONS, NamedCompiler()) != before


def test_the_identity_of_nvrtc_names_its_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVRTC_APPEND_FLAGS", raising=False)
    identity = Compiler().identity
    library = Path(nvrtc.nvrtc_location()[0]).resolve()
    assert identity.startswith(f"{Compiler().version}\n")
    assert nvrtc.build_id(library) in identity
    assert "libnvrtc-builtins" in identity
    monkeypatch.setenv("NVRTC_APPEND_FLAGS", "--use_fast_math")
    assert Compiler().identity != identity


def test_a_build_id_is_that_of_the_file(tmp_path: Path) -> None:
    """Without one, as in a file that is no library, the content stands for it."""
    assert len(bytes.fromhex(nvrtc.build_id(Path(nvrtc.nvrtc_location()[0])))) >= 16
    for content in (b"", b"\x7fELF\x02\x01 torn", b"text"):
        (tmp_path / "lib").write_bytes(content)
        assert nvrtc.build_id(tmp_path / "lib").startswith("sha256:")


names = st.text(string.ascii_letters + string.digits + "_./", min_size=1, max_size=8)
macros = st.from_regex(r"[A-Z_]{1,4}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
pairs = st.dictionaries(names, texts, max_size=3).map(lambda found: tuple(sorted(found.items())))
sources = st.builds(KernelSource, name=names, text=texts, headers=pairs)
options = st.builds(
    CompileOptions,
    arch=st.sampled_from(["sm_80", "sm_90", "sm_90a"]),
    defines=st.dictionaries(macros, texts, max_size=3).map(lambda found: tuple(found.items())),
    flags=st.lists(st.sampled_from(["--fmad=false", "-lineinfo", "--x"]), max_size=3).map(tuple),
    artefact=st.sampled_from(["cubin", "ptx"]),
)
inputs = st.tuples(sources, options, st.sampled_from(["13.0 build 1", "13.0 build 2"]))


def key_of(case: tuple[KernelSource, CompileOptions, str]) -> str:
    return cache_key(case[0], case[1], NamedCompiler(case[2]))


def content_of(case: tuple[KernelSource, CompileOptions, str]) -> tuple[object, ...]:
    source, chosen, identity = case
    return source, replace(chosen, defines=tuple(sorted(chosen.defines))), identity


@given(inputs, inputs)
def test_keys_are_equal_exactly_where_the_inputs_are(
    first: tuple[KernelSource, CompileOptions, str],
    second: tuple[KernelSource, CompileOptions, str],
) -> None:
    assert (key_of(first) == key_of(second)) == (content_of(first) == content_of(second))
    assert key_of(first) == key_of(first)


@given(inputs, st.data())
def test_one_changed_character_changes_the_key(
    case: tuple[KernelSource, CompileOptions, str], data: st.DataObject
) -> None:
    source, chosen, identity = case
    place = data.draw(st.integers(0, len(source.text)))
    text = f"{source.text[:place]}x{source.text[place:]}"
    assert key_of((replace(source, text=text), chosen, identity)) != key_of(case)


_IN_A_NEW_PROCESS = """
import random, sys
from pathlib import Path
from nxrt.runtime.compilation.cache_key import cache_key
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.source import load_source
path, folder, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
compiler = Compiler()
cache = CompileCache(compiler, folder)
others = [CompileOptions("sm_80", (("N", str(n)),)) for n in range(10)]
random.Random(seed).shuffle(others)
for options in others[: 3 * seed]:
    cache.get(load_source(path), options)
options = CompileOptions("sm_90a", (("N", "1"), ("M", "2")))
source = load_source(path)
print(cache_key(source, options, compiler), cache.fetch(source, options).origin)
"""


def test_the_key_is_the_same_in_any_process_after_any_history(tmp_path: Path) -> None:
    kernel = tmp_path / "k.cu"
    kernel.write_text('extern "C" __global__ void k(int* p) { *p = N; }\n')
    lines = [
        subprocess.run(
            [sys.executable, "-c", _IN_A_NEW_PROCESS, str(kernel), str(tmp_path / "c"), str(seed)],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(__file__).parents[3])},
        ).stdout.split()
        for seed in (0, 1, 3)
    ]
    assert len({key for key, _ in lines}) == 1
    assert [origin for _, origin in lines] == ["compiler", "disk", "disk"]


def test_an_edited_header_gives_new_code_in_the_same_process(tmp_path: Path) -> None:
    """As whoever writes a plug-in does: edit, and open a new session."""
    kernel, header = tmp_path / "k.cu", tmp_path / "h.cuh"
    kernel.write_text('#include "h.cuh"\nextern "C" __global__ void k(int* p) { *p = VALUE; }\n')
    cache = CompileCache(Compiler(), tmp_path / "cache")
    codes = []
    for value in (1, 2, 1):
        header.write_text(f"#define VALUE {value}\n")
        codes.append(cache.get(load_source(kernel), CompileOptions("sm_90a")))
    assert codes[0] == codes[2] != codes[1]
    assert cache.stats.compilations == 2


def test_entries_of_an_older_layout_are_never_read(tmp_path: Path) -> None:
    """Neither by the name that layout had, nor under today's name."""
    compiler = StubCompiler(tmp_path / "journal", 0)
    folder = tmp_path / "cache"
    CompileCache(compiler, folder).get(SOURCE, CompileOptions("sm_90a"))
    (entry,) = folder.glob("*.cubin")
    old = b"NXRTCUB2" + entry.read_bytes()[8:]
    entry.write_bytes(old)
    entry.with_name(entry.name.removeprefix("3-")).write_bytes(old)
    cache = CompileCache(compiler, folder)
    assert cache.fetch(SOURCE, CompileOptions("sm_90a")).origin == "compiler"


@pytest.mark.parametrize("header", ["a.h", "b.hpp", "sub/c.h", "sub/d.h", "cccl/e.h"])
def test_the_bytes_of_every_toolkit_header_reached_change_the_key(
    tmp_path: Path, header: str
) -> None:
    kernel = replace(SOURCE, system_headers=("a.h",))
    for folder in ("sub", "cccl"):
        (tmp_path / folder).mkdir()
    texts = {
        "a.h": '#include "b.hpp"\n#  include /* why */ <sub/../sub/c.h>\n#include "../../escape.h"',
        "b.hpp": "#if __has_include(<e.h>)\n#endif\n",
        "sub/c.h": '#include "d.h"\n#include <gone.h>\n',
        "sub/d.h": '#include "c.h"\n',
        "cccl/e.h": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path.parent / "escape.h").write_text("must not be read")
    compiler = Compiler(include_dir=tmp_path)
    before = cache_key(kernel, OPTIONS, compiler)
    assert not [name for name, _ in compiler.header_bytes(kernel) if "escape" in name]
    (tmp_path / header).write_text(texts[header] + "// changed\n")
    assert cache_key(kernel, OPTIONS, compiler) != before


def test_where_a_macro_names_a_toolkit_header_all_of_them_count(tmp_path: Path) -> None:
    kernel = replace(SOURCE, system_headers=("a.h",))
    (tmp_path / "a.h").write_text("#define NAME <b.h>\n#include NAME\n")
    (tmp_path / "b.h").write_text("one")
    compiler = Compiler(include_dir=tmp_path)
    before = cache_key(kernel, OPTIONS, compiler)
    assert cache_key(kernel, OPTIONS, compiler) == before
    (tmp_path / "b.h").write_text("three")
    assert cache_key(kernel, OPTIONS, compiler) != before


@pytest.mark.parametrize("flags", [("-I{}",), ("-I", "{}"), ("--include-path={}",)], ids=str)
def test_headers_in_a_folder_that_a_flag_adds_change_the_key(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "mine.h").write_text("#define VALUE 1\n")
    text = '#include <mine.h>\nextern "C" __global__ void k(int* p) { *p = VALUE; }'
    kernel = KernelSource("k.cu", text, system_headers=("mine.h",))
    chosen = CompileOptions("sm_90a", flags=tuple(flag.format(tmp_path) for flag in flags))
    cache = CompileCache(Compiler(), None)
    first = cache.get(kernel, chosen)
    (tmp_path / "mine.h").write_text("#define VALUE 2\n")
    assert cache.get(kernel, chosen) != first
