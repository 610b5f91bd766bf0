"""Run every benchmark and print tables: `make bench`.

On CUDA where a device answers, and on the CPU otherwise, with the sizes that end in time there.
What a reservation costs is measured everywhere; what a launch costs only on a device, where time
against keys is drawn as well: benchmarks/results/<device>-time-against-keys.svg.
"""

import dataclasses
import json
import sys
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import governor, host_cost
from benchmarks.cases import EVERYTHING
from benchmarks.index_select import measure_cpu
from benchmarks.suite import WIDTH, as_table, measure_device
from nxrt import CudaProvider, select_provider
from nxrt.providers.base import ExecutionProvider


def main() -> None:
    """Measure and print; `--json` prints data instead of the tables of sizes."""
    notes = Console(stderr=True)
    results = Console(width=None if sys.stdout.isatty() else WIDTH)
    is_json = "--json" in sys.argv[1:]
    notes.print(governor_table(governor.measure()))
    choice = select_provider()
    with choice.provider as provider:
        notes.print(f"{provider.name}: {choice.reason}")
        if isinstance(provider, CudaProvider):
            data = on_device(provider, notes, None if is_json else results)
        else:
            data = on_cpu(provider, notes, None if is_json else results)
    if is_json:
        print(json.dumps(data, indent=2))


def on_device(provider: CudaProvider, notes: Console, results: Console | None) -> dict[str, Any]:
    """Measure everything, draw the picture, print the results where they are wanted."""
    notes.print(host_cost.as_table(host_cost.measure_host_cost(provider)))
    notes.print(host_cost.measure_cold_start())
    figures = measure_device(provider, notes)
    if results is not None:
        figures.print(results)
    notes.print(f"drawn: {figures.write_picture(datetime.now(UTC).date())}")
    return figures.as_json()


def on_cpu(provider: ExecutionProvider, notes: Console, results: Console | None) -> dict[str, Any]:
    """Measure the sizes that end in time, print the results where they are wanted."""
    quick = [shape for shape in EVERYTHING if shape.is_quick]
    rows = [measure_cpu(provider, shape) for shape in track(quick, "sizes", console=notes)]
    if results is not None:
        results.print(as_table(rows))
    return {"benchmarks": [dataclasses.asdict(row) for row in rows]}


def governor_table(rows: list[governor.GovernorCost]) -> Table:
    """Return what reservations cost for a person."""
    table = Table(title="memory governor", title_justify="left")
    table.add_column("pair of calls", no_wrap=True)
    for name in ("us", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.name, f"{row.pair_us:.2f}", f"{row.ratio:.2f}")
    return table


if __name__ == "__main__":
    main()
