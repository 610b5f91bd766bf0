"""What tools/compile_kernels.py reads in the compiler's log, and what it refuses."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nxrt.errors import CompileError
from nxrt.kernels.api import CompileUnit, OpKey
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelectFactory
from nxrt.kernels.registry import KernelPlugin
from nxrt.providers.cuda import all_compile_units
from nxrt.runtime.compilation import compiler
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from tools import compile_kernels
from tools.compile_kernels import EntryUsage, Report, Row

CLEAN_LOG = """\
clean.cu(1): warning #177-D: variable "unused" was declared but never referenced

ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'clean' for 'sm_90a'
ptxas info    : Function properties for clean
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Compile time = 0.645 ms
"""

SPILLING_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spilling' for 'sm_90'
ptxas info    : Function properties for spilling
ptxas         .     16 bytes stack frame, 24 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 16 bytes cumulative stack size, 20864 bytes smem
ptxas info    : Compile time = 58.187 ms
"""

TWO_ENTRIES_LOG = """\
ptxas info    : 76 bytes gmem, 144 bytes cmem[4]
ptxas info    : Compiling entry function 'select' for 'sm_80'
ptxas info    : Function properties for select
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 1 barriers, 3216 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 50.588 ms
ptxas info    : Compiling entry function 'score' for 'sm_80'
ptxas info    : Function properties for score
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 92 registers, used 1 barriers, 20864 bytes smem, 448 bytes cmem[0]
ptxas info    : Compile time = 44.678 ms
"""

CALLED_FUNCTION_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'caller' for 'sm_100'
ptxas info    : Function properties for caller
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 72 registers, used 0 barriers, 416 bytes cumulative stack size
ptxas info    : Compile time = 15.527 ms
ptxas info    : Function properties for _Z6calledPfi
ptxas         .     408 bytes stack frame, 132 bytes spill stores, 140 bytes spill loads
"""

KERNEL = 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] = VALUE; }'

# More live values than the 32 registers that two blocks of 1024 threads leave.
SPILLING_KERNEL = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x, int n) {
    float a[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) a[i] = x[i * n + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; ++i) x[i * n + threadIdx.x] = a[i] * a[(i * 31 + 7) % 96];
}
"""


def row_of(log: str, *, unit: str = "N=1", arch: str = "sm_90") -> Row:
    (usage,) = compile_kernels.parse_log(log)
    return Row("folder/kernel.cu", unit, arch, usage, cubin_nbytes=1000)


def write_unit(path: Path, text: str, **defines: str) -> CompileUnit:
    path.write_text(text)
    return CompileUnit(path, tuple(defines.items()))


@pytest.fixture(scope="module")
def report() -> Report:
    """Return the registered kernels, compiled once for the tests of this file."""
    return compile_kernels.compile_units(all_compile_units())


def test_log_of_a_clean_entry_is_read() -> None:
    assert compile_kernels.parse_log(CLEAN_LOG) == [EntryUsage("clean", 10, 0, None, 0, 0, 0)]


def test_log_of_a_spilling_entry_is_read() -> None:
    (usage,) = compile_kernels.parse_log(SPILLING_LOG)
    assert usage == EntryUsage("spilling", 64, 16, 16, 24, 36, 20864)
    assert usage.local_nbytes == 76


def test_log_of_several_entries_is_read_in_its_order() -> None:
    assert compile_kernels.parse_log(TWO_ENTRIES_LOG) == [
        EntryUsage("select", 31, 0, None, 0, 0, 3216),
        EntryUsage("score", 92, 0, None, 0, 0, 20864),
    ]


def test_spills_of_a_called_function_count_for_its_entry() -> None:
    assert compile_kernels.parse_log(CALLED_FUNCTION_LOG) == [
        EntryUsage("caller", 72, 416, 416, 132, 140, 0)
    ]


@pytest.mark.parametrize(
    "log",
    [
        "",
        "ptxas info    : 0 bytes gmem\n",
        CLEAN_LOG.replace("registers", "slots"),
        CLEAN_LOG.replace("spill", "spilled"),
    ],
    ids=["empty", "no entry", "no registers", "no spills"],
)
def test_log_that_does_not_tell_is_an_error(log: str) -> None:
    with pytest.raises(compile_kernels.UnreadableLogError, match="log"):
        compile_kernels.parse_log(log)


def test_clean_entry_is_no_problem() -> None:
    assert list(compile_kernels.spill_problems([row_of(CLEAN_LOG)], {})) == []


def test_spill_that_is_not_expected_is_a_problem() -> None:
    (problem,) = compile_kernels.spill_problems([row_of(SPILLING_LOG)], {})
    assert problem == (
        "folder/kernel.cu: N=1 sm_90 spilling: 76 B of local memory (16 B stack frame,"
        " 24 B spill stores, 36 B spill loads); 0 B expected"
    )


def test_stack_frame_without_a_spill_is_a_problem() -> None:
    clean = row_of(CLEAN_LOG)
    stacked = replace(clean, usage=replace(clean.usage, stack_nbytes=8))
    (problem,) = compile_kernels.spill_problems([stacked], {})
    assert "8 B stack frame" in problem


def test_deepest_stack_alone_is_no_problem() -> None:
    clean = row_of(CLEAN_LOG)
    deep = replace(clean, usage=replace(clean.usage, cumulative_stack_nbytes=16))
    assert list(compile_kernels.spill_problems([deep], {})) == []


@pytest.mark.parametrize(
    ("expected", "num_problems"),
    [
        ({("N=1", "sm_90", "spilling"): 76}, 0),
        ({("N=1", "sm_90", "spilling"): 75}, 1),
        ({("N=2", "sm_90", "spilling"): 76}, 2),
        ({("N=1", "sm_80", "spilling"): 76}, 2),
    ],
    ids=["as expected", "more than expected", "another unit", "another arch"],
)
def test_spill_is_expected_for_its_unit_arch_and_entry_alone(
    expected: Mapping[tuple[str, str, str], int], num_problems: int
) -> None:
    assert (
        len(list(compile_kernels.spill_problems([row_of(SPILLING_LOG)], expected))) == num_problems
    )


def test_expected_spill_that_is_gone_is_a_problem() -> None:
    expected = {("N=1", "sm_90", "clean"): 8}
    (problem,) = compile_kernels.spill_problems([row_of(CLEAN_LOG)], expected)
    assert problem == "N=1 sm_90 clean: no longer spills; take it out of EXPECTED_SPILLS"


def test_real_kernels_compile_for_every_architecture(report: Report) -> None:
    assert report.problems == ()
    units = all_compile_units()
    compiled = {(row.source, row.unit, row.arch) for row in report.rows}
    assert len(compiled) == len(units) * len(compile_kernels.ARCHS)
    assert {row.arch for row in report.rows} == {"sm_80", "sm_90", "sm_90a", "sm_100"}


def test_real_kernels_have_the_same_entries_on_every_architecture(report: Report) -> None:
    archs: dict[tuple[str, str, str], list[str]] = {}
    for row in report.rows:
        archs.setdefault((row.source, row.unit, row.usage.entry), []).append(row.arch)
    assert set(map(tuple, archs.values())) == {compile_kernels.ARCHS}


def test_every_real_source_is_in_a_unit() -> None:
    units = all_compile_units()
    assert list(compile_kernels.uncovered_problems(units, compile_kernels.KERNELS_ROOT)) == []


def test_source_in_no_unit_is_a_problem(tmp_path: Path) -> None:
    unit = write_unit(tmp_path / "used.cu", KERNEL)
    write_unit(tmp_path / "forgotten.cu", KERNEL)
    (problem,) = compile_kernels.uncovered_problems([unit], tmp_path)
    assert problem.endswith("forgotten.cu: not in nxrt.providers.cuda.all_compile_units()")


def test_unit_of_two_keys_is_compiled_once() -> None:
    factory = DsaIndexSelectFactory()
    keys = (OpKey("test", "A"), OpKey("test", "A", 2))
    plugin = KernelPlugin("twice", tuple((key, factory) for key in keys))
    assert all_compile_units(plugin)[:-1] == list(factory.compile_units())


def test_unit_is_named_by_its_definitions(tmp_path: Path) -> None:
    assert (
        compile_kernels.unit_name(CompileUnit(tmp_path, (("A", "1"), ("B", "F32")))) == "A=1 B=F32"
    )
    assert compile_kernels.unit_name(CompileUnit(tmp_path)) == "-"


def test_spilling_source_fails_the_check_on_every_architecture(tmp_path: Path) -> None:
    unit = write_unit(tmp_path / "spilling.cu", SPILLING_KERNEL)
    report = compile_kernels.check_kernels([unit], tmp_path, {})
    assert len(report.rows) == len(compile_kernels.ARCHS)
    assert len(report.problems) == len(compile_kernels.ARCHS)
    assert all("spill stores" in problem for problem in report.problems)


def test_broken_source_is_a_problem_that_names_file_unit_and_arch(tmp_path: Path) -> None:
    unit = write_unit(tmp_path / "broken.cu", KERNEL, VALUE="missing_name")
    report = compile_kernels.check_kernels([unit], tmp_path, {})
    assert report.rows == ()
    assert len(report.problems) == len(compile_kernels.ARCHS)
    assert "broken.cu: VALUE=missing_name sm_80: broken.cu does not compile" in report.problems[0]
    assert 'identifier "missing_name" is undefined' in report.problems[0]


def test_source_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    report = compile_kernels.compile_units([CompileUnit(tmp_path / "absent.cu")])
    assert "absent.cu: No such file" in report.problems[0]


def test_compile_error_of_a_broken_source_has_the_file_name_in_its_log(tmp_path: Path) -> None:
    write_unit(tmp_path / "broken.cu", KERNEL)
    with pytest.raises(CompileError) as caught:
        Compiler().compile(KernelSource.load(tmp_path / "broken.cu"), CompileOptions("sm_90a"))
    assert 'broken.cu(1): error: identifier "VALUE" is undefined' in caught.value.log
    assert caught.value.arch == "sm_90a"


def load_with_missing_header(tmp_path: Path) -> KernelSource:
    write_unit(tmp_path / "includes.cu", f"#include <cuda_absent.h>\n{KERNEL}", VALUE="1.0f")
    return KernelSource.load(tmp_path / "includes.cu")


def test_missing_header_gives_the_remedy_where_no_headers_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "cuda_include_dir", lambda: None)
    with pytest.raises(CompileError) as caught:
        Compiler().compile(load_with_missing_header(tmp_path), CompileOptions("sm_90a"))
    assert "cuda_absent.h ships with the CUDA runtime headers: pip install" in caught.value.remedy


def test_missing_header_gives_the_remedy_where_the_include_folder_lacks_it(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        Compiler(tmp_path).compile(load_with_missing_header(tmp_path), CompileOptions("sm_90a"))
    assert "cuda_absent.h ships with the CUDA runtime headers: pip install" in caught.value.remedy


def test_json_has_one_flat_object_for_each_row() -> None:
    rows = [row_of(SPILLING_LOG), row_of(CLEAN_LOG)]
    spilling, clean = json.loads(compile_kernels.to_json(rows))
    assert spilling == {
        "source": "folder/kernel.cu",
        "unit": "N=1",
        "arch": "sm_90",
        "entry": "spilling",
        "num_registers": 64,
        "stack_nbytes": 16,
        "cumulative_stack_nbytes": 16,
        "spill_store_nbytes": 24,
        "spill_load_nbytes": 36,
        "shared_nbytes": 20864,
        "cubin_nbytes": 1000,
    }
    assert clean["cumulative_stack_nbytes"] is None


def test_report_shows_each_row_whole_and_counts_at_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long_name = "compressed_sparse_attention_" + "x" * 20
    rows = (row_of(SPILLING_LOG.replace("spilling", long_name)), row_of(CLEAN_LOG))
    compile_kernels.print_report(Report(rows, ("folder/kernel.cu: a problem",)))
    *table, problem, last = capsys.readouterr().out.splitlines()
    (line,) = [line for line in table if long_name in line]
    assert line.split() == ["N=1", "sm_90", long_name, "64", "16", "16", "60", "20864", "1000"]
    assert problem == "folder/kernel.cu: a problem"
    assert last == "2 kernels compiled, 1 failed"


@pytest.mark.parametrize(("value", "status"), [("1.0f", 0), ("missing_name", 1)])
def test_main_fails_on_a_problem_and_writes_the_rows_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, status: int
) -> None:
    unit = write_unit(tmp_path / "tiny.cu", KERNEL, VALUE=value)
    monkeypatch.setattr("nxrt.providers.cuda.all_compile_units", lambda: [unit])
    monkeypatch.setattr(compile_kernels, "EXPECTED_SPILLS", {})
    monkeypatch.setattr(compile_kernels, "KERNELS_ROOT", tmp_path)
    json_path = tmp_path / "rows.json"
    assert compile_kernels.main(["--json", str(json_path)]) == status
    archs = [written["arch"] for written in json.loads(json_path.read_text())]
    assert archs == ([] if status else list(compile_kernels.ARCHS))
