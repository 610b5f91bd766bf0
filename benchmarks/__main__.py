"""Run every benchmark and print one table: `make bench`.

On CUDA where a device answers, and on the CPU otherwise, with the sizes that end in time there.
What a reservation costs is measured everywhere; what a launch costs only on a device.
"""

import dataclasses
import json
import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import governor, host_cost
from benchmarks.cases import INDEX_SELECT
from benchmarks.index_select import Measurement, measure_ceilings, measure_cpu, measure_cuda
from nxrt import CudaProvider, select_provider


def main() -> None:
    """Measure and print; `--json` prints data."""
    console = Console(stderr=True)
    console.print(governor_table(governor.measure()))
    choice = select_provider()
    with choice.provider as provider:
        console.print(f"{provider.name}: {choice.reason}")
        if isinstance(provider, CudaProvider):
            console.print(host_cost.as_table(host_cost.measure_host_cost(provider)))
            console.print(host_cost.measure_cold_start())
            rows = cuda_rows(provider, console)
        else:
            quick = [shape for shape in INDEX_SELECT if shape.is_quick]
            rows = [measure_cpu(provider, s) for s in track(quick, console=console)]
    if "--json" in sys.argv[1:]:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(as_table(rows))


def cuda_rows(provider: CudaProvider, console: Console) -> list[Measurement]:
    """Measure every case on a device."""
    ceilings = measure_ceilings(provider)
    console.print(f"copy bandwidth {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, read and written")
    return [
        measure_cuda(provider, shape, ceilings) for shape in track(INDEX_SELECT, console=console)
    ]


def governor_table(rows: list[governor.GovernorCost]) -> Table:
    """Return what reservations cost for a person."""
    table = Table(title="memory governor", title_justify="left")
    table.add_column("pair of calls", no_wrap=True)
    for name in ("us", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.name, f"{row.pair_us:.2f}", f"{row.ratio:.2f}")
    return table


def as_table(rows: list[Measurement]) -> Table:
    """Return the rows for a person."""
    table = Table(title="DsaIndexSelect", title_justify="left")
    table.add_column("case", no_wrap=True)
    for name in ("median us", "p90 us", "floor us", "ratio", "MB", "G operations"):
        table.add_column(name, justify="right")
    table.add_column("floor is")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.median_us:,.1f}",
            f"{row.p90_us:,.1f}",
            f"{row.floor_us:,.1f}",
            f"{row.ratio:,.1f}",
            f"{row.nbytes / 1e6:,.1f}",
            f"{row.operations / 1e9:,.2f}",
            row.floor,
        )
    return table


if __name__ == "__main__":
    main()
