"""Sources with their headers, and NVRTC itself, which needs no GPU."""

import os
from pathlib import Path
from typing import Any

import pytest

from nxrt import CompileError, InvalidInputError
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler, cuda_include_dir
from nxrt.runtime.compilation.nvrtc import nvrtc_location, supported_archs
from nxrt.runtime.compilation.source import KernelSource, load_source

OPTIONS = CompileOptions("sm_90a")


def source(text: str, **headers: str) -> KernelSource:
    return KernelSource("test.cu", text, tuple(headers.items()))


def test_load_resolves_quoted_headers_recursively(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n#include <cuda_fp16.h>\n')
    (tmp_path / "b.cuh").write_text("#pragma once\n")
    kernel = tmp_path / "kernel.cu"
    kernel.write_text('#include "a.cuh"\n')
    loaded = KernelSource.load(kernel, include_root=tmp_path)
    assert [name for name, _ in loaded.headers] == ["a.cuh", "b.cuh"]
    assert loaded.system_headers == ("cuda_fp16.h",)


def test_text_behind_a_nul_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="NUL character"):
        source("int a;\0int b;")


def test_a_header_beside_the_source_wins_over_the_shared_one(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "a.cuh").write_text("shared")
    (tmp_path / "a.cuh").write_text("beside")
    kernel = tmp_path / "kernel.cu"
    kernel.write_text('#include "a.cuh"\n')
    loaded = KernelSource.load(kernel, include_root=tmp_path / "shared")
    assert loaded.headers == (("a.cuh", "beside"),)


def kernel_with(tmp_path: Path, text: str) -> Path:
    kernel = tmp_path / "kernels" / "kernel.cu"
    kernel.parent.mkdir()
    kernel.write_text(text)
    return kernel


def load(kernel: Path) -> KernelSource:
    return KernelSource.load(kernel, include_root=kernel.parent.parent / "shared")


def test_load_names_a_missing_header(tmp_path: Path) -> None:
    kernel = kernel_with(tmp_path, '#include "gone.cuh"\n')
    with pytest.raises(CompileError, match=rf'{kernel}: includes "gone\.cuh": No such file'):
        load(kernel)


@pytest.mark.parametrize(
    "include",
    ['/* why */ #include "a.cuh"', '#inc\\\nlude "a.cuh"', '%:include "a.cuh"',
     '#include /* why */ "a.cuh"', '#if 0\n#include "a.cuh"\n#endif',
     '#if __has_include("a.cuh")\n#endif', '#include "sub/../a.cuh"',
     '/* one\n two */ # /* three\n four */ include "a.cuh"'],
    ids=["after a comment", "continued", "digraph", "around a comment", "not taken", "asked for",
         "roundabout", "among comments"],
)  # fmt: skip
def test_every_way_to_include_a_header_is_seen(tmp_path: Path, include: str) -> None:
    kernel = kernel_with(tmp_path, f"{include}\n")
    (kernel.parent / "a.cuh").write_text("int a;\n")
    assert [text for _, text in load(kernel).headers] == ["int a;\n"]


@pytest.mark.parametrize(
    "text",
    ['#if __has_include("gone.cuh")\n#endif', '// #include "gone.cuh"',
     '/*\n * #include "gone.cuh"\n */', 'const char* include = "gone.cuh";',
     '#define include_this "gone.cuh"'],
    ids=["asked for", "commented", "documented", "a variable", "a definition"],
)  # fmt: skip
def test_what_includes_nothing_needs_no_header(tmp_path: Path, text: str) -> None:
    assert load(kernel_with(tmp_path, f"{text}\n")).headers == ()


def test_a_header_may_include_what_lies_beside_it(tmp_path: Path) -> None:
    kernel = kernel_with(tmp_path, '#include "sub/a.cuh"\n')
    (kernel.parent / "sub").mkdir()
    (kernel.parent / "sub" / "a.cuh").write_text('#include "b.cuh"\n#include "../c.cuh"\n')
    (kernel.parent / "sub" / "b.cuh").write_text("b")
    (kernel.parent / "c.cuh").write_text("c")
    assert [name for name, _ in load(kernel).headers] == ["../c.cuh", "b.cuh", "sub/a.cuh"]


def test_one_name_for_two_headers_is_refused(tmp_path: Path) -> None:
    """They travel by name, so that one would silently stand for the other."""
    kernel = kernel_with(tmp_path, '#include "x/a.cuh"\n#include "y/a.cuh"\n')
    for folder in ("x", "y"):
        (kernel.parent / folder).mkdir()
        (kernel.parent / folder / "a.cuh").write_text('#include "b.cuh"\n')
        (kernel.parent / folder / "b.cuh").write_text(folder)
    with pytest.raises(CompileError, match=r'"b\.cuh" is .* for one file and .* for another'):
        load(kernel)


@pytest.mark.parametrize("name", ["../secret.cuh", "a/../../secret.cuh", "{}/secret.cuh"])
def test_no_header_is_read_outside_the_folders(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.cuh").write_text("secret")
    kernel = kernel_with(tmp_path, f'#include "{name.format(tmp_path)}"\n')
    with pytest.raises(CompileError, match="leads out of"):
        load(kernel)


def test_a_macro_that_names_a_header_is_refused(tmp_path: Path) -> None:
    kernel = kernel_with(tmp_path, '#define NAME "a.cuh"\n#include NAME\n')
    with pytest.raises(CompileError, match="the macro NAME"):
        load(kernel)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "long", "not text", "no permission"])
def test_a_source_that_cannot_be_read_is_a_compile_error(tmp_path: Path, kind: str) -> None:
    name = "a.cuh" if kind != "long" else f"{'a' * 300}.cuh"
    kernel = kernel_with(tmp_path, f'#include "{name}"\n')
    header = kernel.parent / name
    if kind == "folder":
        header.mkdir()
    elif kind == "pipe":
        os.mkfifo(header)
    elif kind == "loop":
        header.symlink_to(header)
    elif kind == "not text":
        header.write_bytes(b"\xff\xfe")
    elif kind == "no permission":
        header.write_text("")
        header.chmod(0)
        if os.access(header, os.R_OK):
            pytest.skip("root may read everything")
    with pytest.raises(CompileError, match=r"kernel\.cu does not compile"):
        load(kernel)
    if kind in ("folder", "pipe"):
        with pytest.raises(CompileError, match="not a regular file"):
            load(header)


def test_a_kernel_compiles_to_a_cubin() -> None:
    compiled = Compiler().compile(source('extern "C" __global__ void k() {}'), OPTIONS)
    assert compiled.cubin.startswith(b"\x7fELF")


def test_headers_are_given_in_memory_and_defines_reach_them() -> None:
    header = "__device__ int answer() { return ANSWER; }"
    text = '#include "h.cuh"\nextern "C" __global__ void k(int* p) { *p = answer(); }'
    options = CompileOptions("sm_80", (("ANSWER", "42"),))
    kernel = KernelSource("test.cu", text, (("h.cuh", header),))
    assert Compiler().compile(kernel, options).cubin


def test_an_error_carries_the_whole_log() -> None:
    with pytest.raises(CompileError) as failure:
        Compiler().compile(source('extern "C" __global__ void k() { nothing(); }'), OPTIONS)
    assert failure.value.log.startswith("test.cu(1)")
    assert '"nothing"' in failure.value.log


def test_an_error_names_the_real_files(tmp_path: Path) -> None:
    kernel = kernel_with(tmp_path, '#include "sub/a.cuh"\n__global__ void k() { twice(1) + x; }\n')
    header = kernel.parent / "sub" / "a.cuh"
    header.parent.mkdir()
    header.write_text("\ntemplate <class T> __device__ int twice(T t) { return t.two; }\n")
    with pytest.raises(CompileError) as failure:
        Compiler().compile(load(kernel), OPTIONS)
    log = failure.value.log
    assert f'\n{header}(2): error: expression must have class type but it has type "int"' in log
    assert f"at line 2 of {kernel}\n" in log
    assert f'{kernel}(2): error: identifier "x" is undefined' in log
    assert f'errors detected in the compilation of "{kernel}".' in log


def test_the_folder_of_a_source_is_not_in_its_code(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void k(const char** p) { *p = __FILE__; }\n'
    codes = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "k.cu").write_text(text)
        options = CompileOptions("sm_90a", flags=("-lineinfo",))
        codes.append(Compiler().compile(load_source(tmp_path / folder / "k.cu"), options).cubin)
    assert codes[0] == codes[1]
    assert bytes(tmp_path) not in codes[0]


def test_headers_in_the_current_folder_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC looks beside the source, and a bare name is beside whatever runs."""
    (tmp_path / "stray.h").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r'cannot open source file "stray\.h"'):
        Compiler().compile(source('#include "stray.h"\n'), OPTIONS)


def test_ptx_is_text_for_the_virtual_architecture() -> None:
    options = CompileOptions("sm_90a", artefact="ptx")
    ptx = Compiler().compile(source('extern "C" __global__ void k() {}'), options).cubin
    assert b".target sm_90a" in ptx
    assert ptx.endswith(b"\0")


def test_ptx_for_a_device_newer_than_nvrtc_is_for_the_newest_that_it_knows() -> None:
    newest = supported_archs()[-1]
    assert Compiler().ptx_arch(f"sm_{newest + 1}a") == f"sm_{newest}"
    assert Compiler().ptx_arch("sm_90a") == "sm_90a"
    with pytest.raises(CompileError, match="and newer"):
        Compiler().ptx_arch("sm_50")


@pytest.mark.parametrize(
    "wrong",
    [
        {"artefact": "elf"},
        {"defines": (("A", "1"), ("A", "2"))},
        {"defines": (("A", "1"), ("A(x)", "2"))},
        {"defines": (("", "1"),)},
        {"defines": (("A", "1\0"),)},
        {"flags": ("--pre-include=a.h",)},
        {"flags": ("-include", "a.h")},
        {"flags": ("--use-pch=a.pch",)},
    ],
    ids=str,
)
def test_options_that_the_key_could_not_stand_for_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        CompileOptions("sm_90a", **wrong)


def test_an_architecture_that_does_not_exist_is_explained() -> None:
    with pytest.raises(CompileError, match="sm_1"):
        Compiler().compile(source('extern "C" __global__ void k() {}'), CompileOptions("sm_1"))


@pytest.mark.parametrize(
    ("header", "remedy"),
    [
        ("cuda_fp16.h", "nvidia-cuda-runtime"),
        ("cooperative_groups.h", "nvidia-cuda-runtime"),
        ("crt/mma.h", "nvidia-cuda-crt"),
        ("cub/cub.cuh", "nvidia-cuda-cccl"),
        ("thrust/sort.h", "nvidia-cuda-cccl"),
        ("cuda/std/cstdint", "nvidia-cuda-cccl"),
        ("nv/target", "nvidia-cuda-cccl"),
        ("curand_kernel.h", "nvidia-curand"),
        ("stdint.h", "belongs to the host's compiler"),
        ("my_own.h", "include headers of your own in quotes"),
    ],
)
def test_a_missing_header_is_named_with_the_package_that_ships_it(
    tmp_path: Path, header: str, remedy: str
) -> None:
    kernel = KernelSource("test.cu", f"#include <{header}>\n", system_headers=(header,))
    with pytest.raises(CompileError) as failure:
        Compiler(include_dir=tmp_path).compile(kernel, OPTIONS)
    assert header in failure.value.remedy
    assert remedy in failure.value.remedy


def test_headers_of_another_release_are_refused_before_they_are_compiled(tmp_path: Path) -> None:
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    (tmp_path / "cuda_fp16.h").write_text("")
    kernel = KernelSource("k.cu", "#include <cuda_fp16.h>\n", system_headers=("cuda_fp16.h",))
    compiler = Compiler(include_dir=tmp_path)
    for use in (compiler.compile, compiler.header_bytes):
        with pytest.raises(CompileError) as failure:
            use(kernel, OPTIONS)
        for part in (str(tmp_path), "12.8", compiler.version, nvrtc_location()[0]):
            assert part in failure.value.log
    assert compiler.compile(source('extern "C" __global__ void k() {}'), OPTIONS).cubin


@pytest.mark.parametrize("name", ["/etc/hostname", "../../../../etc/hostname"])
def test_no_toolkit_header_is_read_outside_its_folder(tmp_path: Path, name: str) -> None:
    kernel = KernelSource("k.cu", f"#include <{name}>\n", system_headers=(name,))
    with pytest.raises(CompileError, match="leads out of every folder"):
        Compiler(include_dir=tmp_path).header_bytes(kernel)


def test_half_precision_headers_compile_where_they_are_installed() -> None:
    if cuda_include_dir() is None:
        pytest.skip("no toolkit headers on this machine")
    text = (
        "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
        'extern "C" __global__ void k(__half* a, __nv_bfloat16* b)'
        " { a[0] = __float2half(1.f); b[0] = __float2bfloat16(1.f); }"
    )
    kernel = KernelSource("test.cu", text, system_headers=("cuda_bf16.h", "cuda_fp16.h"))
    assert Compiler().compile(kernel, OPTIONS).cubin


def test_the_shipped_source_needs_no_toolkit_header() -> None:
    root = Path(__file__).parents[3] / "nxrt" / "kernels"
    for path in root.glob("*/*.cu"):
        assert load_source(path).system_headers == ()
