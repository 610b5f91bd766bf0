"""Sources with their headers, and NVRTC itself, which needs no GPU."""

from pathlib import Path

import pytest

from nxrt import CompileError, InvalidInputError
from nxrt.runtime.compiler import CompileOptions, Compiler, cuda_include_dir
from nxrt.runtime.source import KernelSource, load_source

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


def test_load_names_a_missing_header(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.cu"
    kernel.write_text('#include "gone.cuh"\n')
    with pytest.raises(InvalidInputError, match=r"gone\.cuh"):
        KernelSource.load(kernel, include_root=tmp_path)


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
    assert "test.cu(1)" in failure.value.log
    assert '"nothing"' in failure.value.log


def test_an_architecture_that_does_not_exist_is_explained() -> None:
    with pytest.raises(CompileError, match="sm_1"):
        Compiler().compile(source('extern "C" __global__ void k() {}'), CompileOptions("sm_1"))


def test_a_missing_toolkit_header_names_its_package(tmp_path: Path) -> None:
    kernel = KernelSource("test.cu", "#include <cuda_fp16.h>\n", system_headers=("cuda_fp16.h",))
    with pytest.raises(CompileError, match=r"cuda_fp16\.h ships with .*nvidia-cuda-runtime"):
        Compiler(include_dir=tmp_path).compile(kernel, OPTIONS)


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
    root = Path(__file__).parents[2] / "nxrt" / "kernels"
    for path in root.glob("*/*.cu"):
        assert load_source(path).system_headers == ()
