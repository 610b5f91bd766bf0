"""Everything that is measured on a device, in one run: ceilings, the table, the curve, outcomes.

`make bench` and `make gpu` print and write what this returns. The whole takes about a minute and a
half on a GPU; most of that is drawing inputs and writing them.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import outcomes
from benchmarks.cases import CURVE, EVERYTHING, INDEX_SELECT, PUBLIC_ARE, short_count
from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.curve import Growth, curves, growth
from benchmarks.curve_picture import as_svg
from benchmarks.index_select import Measurement, judged, measure_cuda
from benchmarks.inputs import KeyPool
from benchmarks.outcomes import OutcomeRow
from nxrt import CudaProvider

RESULTS = Path(__file__).parent / "results"
WIDTH = 140
"""Columns that the tables are made for."""

_CONDITIONS = "bf16, H = 32, D = 128, top_k = 2,048; captured, caches cold, median"


@dataclass(frozen=True)
class DeviceFigures:
    """Hold what one run on a device found.

    Args:
        device: its name.
        ceilings: what it can do.
        rows: the table's, in its order, and then the rest of the curve.
        outcomes: how far the filter got.
    """

    device: str
    ceilings: Ceilings
    rows: tuple[Measurement, ...]
    outcomes: tuple[OutcomeRow, ...]

    @property
    def growth(self) -> list[Growth]:
        """Return how time grows."""
        return growth(self.rows)

    def as_json(self) -> dict[str, Any]:
        """Return everything as data."""
        return {
            "ceilings": dataclasses.asdict(self.ceilings),
            "benchmarks": [dataclasses.asdict(row) | {"is_met": row.is_met} for row in self.rows],
            "growth": [dataclasses.asdict(found) for found in self.growth],
            "outcomes": [dataclasses.asdict(row) for row in self.outcomes],
        }

    def print(self, console: Console) -> None:
        """Print everything for a person."""
        console.print(f"{self.device}: {self.ceilings}")
        in_table = {shape.id for shape in INDEX_SELECT}
        console.print(as_table([row for row in self.rows if row.case in in_table]))
        console.print(curve_table(self.rows))
        for found in self.growth:
            console.print(f"{found.name}: time {found.ratio:.2f} times what linear growth gives")
        console.print(outcomes.as_table(self.outcomes))

    def write_picture(self, day: date, folder: Path = RESULTS) -> Path:
        """Draw time against keys; return the file, which is replaced where it is there."""
        path = folder / f"{file_name(self.device)}-time-against-keys.svg"
        folder.mkdir(exist_ok=True)
        conditions = f"{day.isoformat()}; {_CONDITIONS}"
        path.write_text(as_svg(curves(self.rows), self.device, conditions), encoding="utf-8")
        return path


def measure_device(provider: CudaProvider, console: Console) -> DeviceFigures:
    """Measure everything on a device.

    Raises:
        NxrtError: as sessions, captures and kernels do; nothing is left out silently.
    """
    ceilings = measure_ceilings(provider)
    pool = KeyPool(EVERYTHING)
    in_table = set(INDEX_SELECT)
    rows = [
        measure_cuda(provider, shape, ceilings, pool, has_rivals=shape in in_table)
        for shape in track(EVERYTHING, "sizes", console=console)
    ]
    name = provider.capabilities.name
    found = outcomes.measure_outcomes(provider)
    return DeviceFigures(name, ceilings, tuple(judged(rows, name)), tuple(found))


def as_table(rows: Sequence[Measurement]) -> Table:
    """Return the rows for a person; green where what must be reached is, red where it is not."""
    has_public = any(row.public for row in rows)
    table = Table(
        title="DsaIndexSelect, microseconds",
        title_justify="left",
        caption=PUBLIC_ARE if has_public else None,
        caption_justify="left",
    )
    table.add_column("rows x keys", no_wrap=True)
    for name in ("median", "must", "aim", "floor", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for name in ("torch", "exact", "public"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("which is", no_wrap=True)
    for row in rows:
        table.add_row(
            row.label,
            _colored(row),
            _us(row.must_us),
            _us(row.aim_us),
            _us(row.floor_us),
            f"{row.ratio:,.2f}",
            row.floor,
            _us(row.torch_us),
            _us(row.exact_us),
            _us(row.public_us),
            row.public,
        )
    return table


def _colored(row: Measurement) -> str:
    if row.is_met is None:
        return _us(row.median_us)
    return f"[bold {'green' if row.is_met else 'red'}]{_us(row.median_us)}"


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}"


def curve_table(rows: Sequence[Measurement]) -> Table:
    """Return time against keys for a person: a column for each batch."""
    table = Table(title="microseconds (times the floor) against keys", title_justify="left")
    table.add_column("keys", justify="right")
    found = curves(rows)
    for curve in found:
        table.add_column(f"B = {curve.batch}", justify="right", no_wrap=True)
    for num_keys in sorted({shape.T for shape in CURVE}):
        cells = []
        for curve in found:
            points = [point for point in curve.points if point.num_keys == num_keys]
            cells += [f"{_us(p.median_us)} ({p.median_us / p.floor_us:.2f})" for p in points] or [
                ""
            ]
        if any(cells):
            table.add_row(short_count(num_keys), *cells)
    return table


def file_name(device: str) -> str:
    """Return a device's name as a file name: "NVIDIA H200" becomes "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
