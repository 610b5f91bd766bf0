"""Compile every registered CUDA kernel for every architecture and refuse what spills.

NVRTC needs no device, so this runs anywhere: `python -m tools.compile_kernels`. It measures no
speed and keeps no cubin.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table

from nxrt.errors import NxrtError
from nxrt.kernels.api import CompileUnit
from nxrt.providers import cuda
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import load_source

ROOT = Path(__file__).parent.parent
KERNELS_ROOT = ROOT / "nxrt"

ARCHS = ("sm_80", "sm_90", "sm_90a", "sm_100")

# Nothing may come from NVRTC's own cache: the log must be that of this compilation.
FLAGS = ("--ptxas-options=-v", "--no-cache")

SpillKey: TypeAlias = tuple[str, str, str]
"""Unit as the table shows it, such as "NXRT_DTYPE=F32", then arch, then entry."""

# Two warpgroups of 255 registers keep keys and sums there; what spills is written before the scan,
# and one word of it is read for each tile of keys.
_WARPGROUP_SPILLS = {("64", "8"): 24, ("128", "8"): 104, ("128", "4"): 108}

EXPECTED_SPILLS: Mapping[SpillKey, int] = {
    (
        f"NXRT_DTYPE={dtype} NXRT_DEPTH={depth} NXRT_WARPS=8",
        "sm_90a",
        f"dsa_index_select_prefill_{rows}",
    ): nbytes
    for dtype in ("F16", "BF16")
    for (depth, rows), nbytes in _WARPGROUP_SPILLS.items()
}
"""The most bytes of stack frame, spill stores and spill loads together."""

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '[^']+'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_CUMULATIVE = re.compile(r"(\d+) bytes cumulative stack size")
_LOCAL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

_TERMINAL_COLUMNS = 160


class UnreadableLogError(ValueError):
    """Report a log that does not say what every entry uses: nothing may pass unseen."""


@dataclass(frozen=True)
class EntryUsage:
    """Report what one entry point uses, its called functions included.

    Args:
        entry: the symbol.
        num_registers: of a thread.
        stack_nbytes: stack frames of a thread.
        cumulative_stack_nbytes: the deepest stack of a thread, None where ptxas does not tell.
        spill_store_nbytes: written to local memory for want of registers.
        spill_load_nbytes: read back likewise.
        shared_nbytes: static shared memory of a block.
    """

    entry: str
    num_registers: int
    stack_nbytes: int
    cumulative_stack_nbytes: int | None
    spill_store_nbytes: int
    spill_load_nbytes: int
    shared_nbytes: int

    @property
    def local_nbytes(self) -> int:
        """Return what EXPECTED_SPILLS limits."""
        return self.stack_nbytes + self.spill_store_nbytes + self.spill_load_nbytes


@dataclass(frozen=True)
class Row:
    """Report one entry point of one unit, compiled for one architecture."""

    source: str
    unit: str
    arch: str
    usage: EntryUsage
    cubin_nbytes: int

    @property
    def key(self) -> SpillKey:
        """Return the key in EXPECTED_SPILLS."""
        return self.unit, self.arch, self.usage.entry


@dataclass(frozen=True)
class Report:
    """Hold what compiled, and one message for everything that is wrong."""

    rows: tuple[Row, ...] = ()
    problems: tuple[str, ...] = ()

    def __add__(self, other: "Report") -> "Report":
        return Report(self.rows + other.rows, self.problems + other.problems)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the registered kernels; return 1 where anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.compile_kernels", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows to this file")
    json_path: Path | None = parser.parse_args(arguments).json
    report = check_kernels(cuda.all_compile_units(), KERNELS_ROOT, EXPECTED_SPILLS)
    print_report(report)
    if json_path is not None:
        json_path.write_text(to_json(report.rows), encoding="utf-8")
    return 1 if report.problems else 0


def check_kernels(
    units: Sequence[CompileUnit], kernels_root: Path, expected: Mapping[SpillKey, int]
) -> Report:
    """Compile the units for every architecture and hold the result against the rules.

    Args:
        units: what to compile.
        kernels_root: every .cu file below it must be in a unit.
        expected: as EXPECTED_SPILLS.
    """
    report = compile_units(units)
    problems = (*spill_problems(report.rows, expected), *uncovered_problems(units, kernels_root))
    return report + Report(problems=problems)


def compile_units(units: Sequence[CompileUnit]) -> Report:
    """Compile each unit for each architecture, several at a time, and report in their order."""
    jobs = [(unit, arch) for unit in units for arch in ARCHS]
    with ThreadPoolExecutor() as pool:
        return sum(pool.map(lambda job: _compile(*job), jobs), start=Report())


def _compile(unit: CompileUnit, arch: str) -> Report:
    source, name = _shown(unit.path), unit_name(unit)
    try:
        options = CompileOptions(arch, unit.defines, unit.flags + FLAGS)
        compiled = Compiler().compile(load_source(unit.path), options)
        usages = parse_log(compiled.log)
    except (NxrtError, UnreadableLogError) as error:
        return Report(problems=(f"{source}: {name} {arch}: {error}",))
    nbytes = len(compiled.cubin)
    return Report(tuple(Row(source, name, arch, usage, nbytes) for usage in usages))


def unit_name(unit: CompileUnit) -> str:
    """Return the unit's definitions, such as "NXRT_DTYPE=F32"; "-" where there are none."""
    return " ".join(f"{name}={value}" for name, value in unit.defines) or "-"


def _shown(path: Path) -> str:
    return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()


def parse_log(log: str) -> list[EntryUsage]:
    """Return what each entry uses, from the log of `--ptxas-options=-v`.

    Raises:
        UnreadableLogError: there is no entry, or one without its numbers.
    """
    _, *parts = _ENTRY.split(log)
    if not parts:
        raise UnreadableLogError(f"no entry function in the compiler's log:\n{log}")
    return [_entry_usage(entry, text) for entry, text in zip(parts[::2], parts[1::2], strict=True)]


def _entry_usage(entry: str, text: str) -> EntryUsage:
    registers = _REGISTERS.search(text)
    # The functions that an entry calls follow it, each with a line of its own.
    local = [tuple(map(int, found)) for found in _LOCAL.findall(text)]
    if registers is None or not local:
        raise UnreadableLogError(f"the compiler's log does not say what {entry} uses:\n{text}")
    stack, stores, loads = (sum(column) for column in zip(*local, strict=True))
    shared, cumulative = _SHARED.search(text), _CUMULATIVE.search(text)
    return EntryUsage(
        entry=entry,
        num_registers=int(registers[1]),
        stack_nbytes=stack,
        cumulative_stack_nbytes=int(cumulative[1]) if cumulative else None,
        spill_store_nbytes=stores,
        spill_load_nbytes=loads,
        shared_nbytes=int(shared[1]) if shared else 0,
    )


def spill_problems(rows: Sequence[Row], expected: Mapping[SpillKey, int]) -> Iterator[str]:
    """Yield a message for each spill that is not expected, and for each expected one that is gone.

    Args:
        rows: everything that was compiled.
        expected: as EXPECTED_SPILLS.
    """
    for row in rows:
        allowed = expected.get(row.key, 0)
        if row.usage.local_nbytes > allowed:
            where = f"{row.source}: {row.unit} {row.arch} {row.usage.entry}"
            yield f"{where}: {_local_memory(row.usage)}; {allowed} B expected"
    spilling = {row.key for row in rows if row.usage.local_nbytes}
    for key in expected:
        if key not in spilling:
            yield f"{' '.join(key)}: no longer spills; take it out of EXPECTED_SPILLS"


def _local_memory(usage: EntryUsage) -> str:
    return (
        f"{usage.local_nbytes} B of local memory ({usage.stack_nbytes} B stack frame,"
        f" {usage.spill_store_nbytes} B spill stores, {usage.spill_load_nbytes} B spill loads)"
    )


def uncovered_problems(units: Sequence[CompileUnit], kernels_root: Path) -> Iterator[str]:
    """Yield a message for each .cu file that nothing compiles."""
    covered = {unit.path.resolve() for unit in units}
    for path in sorted(kernels_root.rglob("*.cu")):
        if path.resolve() not in covered:
            yield f"{_shown(path)}: not in nxrt.providers.cuda.all_compile_units()"


def to_json(rows: Sequence[Row]) -> str:
    """Return the rows as a JSON list of flat objects."""
    flat = [{**asdict(row), **asdict(row.usage)} for row in rows]
    for entry in flat:
        del entry["usage"]
    return json.dumps(flat, indent=2) + "\n"


def print_report(report: Report) -> None:
    """Print the table, every problem, and a line that counts both."""
    # Where output goes to a file the table must not be cut to rich's 80 columns.
    console = Console(width=None if sys.stdout.isatty() else _TERMINAL_COLUMNS)
    console.print(_table(report.rows))
    for problem in report.problems:
        print(problem)
    print(f"{len(report.rows)} kernels compiled, {len(report.problems)} failed")


def _table(rows: Sequence[Row]) -> Table:
    table = Table("unit", "arch", "entry", box=box.SIMPLE)
    for quantity in ("registers", "stack B", "deepest B", "spill B", "shared B", "cubin B"):
        table.add_column(quantity, justify="right")
    for row in rows:
        usage = row.usage
        deepest = usage.cumulative_stack_nbytes
        numbers = (
            usage.num_registers,
            usage.stack_nbytes,
            "-" if deepest is None else deepest,
            usage.spill_store_nbytes + usage.spill_load_nbytes,
            usage.shared_nbytes,
            row.cubin_nbytes,
        )
        table.add_row(row.unit, row.arch, usage.entry, *map(str, numbers))
    return table


if __name__ == "__main__":
    sys.exit(main())
