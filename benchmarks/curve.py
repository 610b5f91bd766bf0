"""Time against keys: the measured rows of one curve by batch, and whether they grow linearly.

Pure arithmetic over measurements; curve_picture.py draws it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import CURVE, IndexSelectShape
from benchmarks.index_select import Measurement


@dataclass(frozen=True)
class Point:
    """Hold one point of a curve; microseconds."""

    num_keys: int
    median_us: float
    floor_us: float

    @property
    def ratio(self) -> float:
        """Return how often its floor it takes."""
        return self.median_us / self.floor_us


@dataclass(frozen=True)
class Curve:
    """Hold the points of one batch, by their number of keys."""

    batch: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Growth:
    """Say how much more time one thing takes at a larger size; 1 is linear growth.

    Args:
        name: what was compared.
        ratio: of the time for the same work, the larger size over the smaller.
    """

    name: str
    ratio: float


def curves(rows: Sequence[Measurement]) -> list[Curve]:
    """Return what was measured of each batch's curve; nothing of a batch without a row."""
    by_case = {row.case: row for row in rows}
    found: dict[int, list[Point]] = {}
    for shape in CURVE:
        row = by_case.get(shape.id)
        if row is not None:
            point = Point(shape.T, row.median_us, row.floor_us)
            found.setdefault(shape.B, []).append(point)
    return [Curve(batch, tuple(points)) for batch, points in found.items()]


def growth(rows: Sequence[Measurement]) -> list[Growth]:
    """Return how time grows with keys at one row, and with rows at the same number of bytes.

    What was not measured is left out.
    """
    medians = {row.case: row.median_us for row in rows}
    found = []
    for name, small, large in (
        ("per key, 1 row, from 128k to 1M", (1, 2**17), (1, 2**20)),
        ("per byte, from 8 rows of 256k to 64 of 32k", (8, 2**18), (64, 2**15)),
    ):
        work = large[0] * large[1] / (small[0] * small[1])
        cases = [IndexSelectShape(batch, 1, num_keys).id for batch, num_keys in (small, large)]
        if all(case in medians for case in cases):
            found.append(Growth(name, medians[cases[1]] / medians[cases[0]] / work))
    return found
