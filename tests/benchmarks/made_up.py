"""Measurements that nobody made, for tests of what is done with them."""

from benchmarks.cases import IndexSelectShape
from benchmarks.index_select import Measurement, summarize


def row(
    shape: IndexSelectShape, median_us: float, floor_us: float = 1.0, floor: str = "bytes"
) -> Measurement:
    return summarize(shape, [median_us], floor_us, floor)
