"""Time against keys: what is drawn where, nothing outside, no label over another."""

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

import pytest

from benchmarks.cases import CURVE, IndexSelectShape
from benchmarks.curve import Curve, Growth, Point, curves, growth
from benchmarks.curve_picture import (
    HEIGHT,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    PLOT_X,
    PLOT_Y,
    LogScale,
    as_svg,
    key_range,
    time_range,
)
from nxrt.cli.svg import WIDTH
from tests.benchmarks.made_up import row

SVG = "{http://www.w3.org/2000/svg}"
LETTER_WIDTH = 0.62
"""Of the size of the letters; what a usual font takes at most on average."""

FULL = [row(shape, 5 + shape.B * shape.T / 1e4, shape.B * shape.T / 1.3e4) for shape in CURVE]


def picture(found: list[Curve]) -> ET.Element:
    return ET.fromstring(as_svg(found, "A <device>", "how & when"))


def lines(found: list[Curve]) -> dict[str, list[tuple[float, float]]]:
    drawn = {}
    for element in picture(found).iter(f"{SVG}polyline"):
        pairs = re.findall(r"([-\d.]+),([-\d.]+)", element.get("points", ""))
        drawn[element.findtext(f"{SVG}title", "")] = [(float(x), float(y)) for x, y in pairs]
    return drawn


def test_rows_become_curves_by_batch_in_order_of_keys() -> None:
    found = curves(FULL[::-1])
    assert [curve.batch for curve in found] == [1, 8, 64]
    assert sum(len(curve.points) for curve in found) == len(CURVE)
    for curve in found:
        assert all(a.num_keys < b.num_keys for a, b in pairwise(curve.points))


def test_rows_of_no_curve_are_left_out() -> None:
    prefill = IndexSelectShape(1, 1024, 16_384)
    assert curves([row(prefill, 3)]) == []
    (only,) = curves([row(CURVE[2], 3, floor_us=2), row(prefill, 3)])
    assert only == Curve(1, (Point(CURVE[2].T, 3, 2),))
    assert only.points[0].ratio == 1.5


def test_linear_growth_is_1_and_more_is_more() -> None:
    rows = [
        row(IndexSelectShape(1, 1, 2**17), 10),
        row(IndexSelectShape(1, 1, 2**20), 88),
        row(IndexSelectShape(8, 1, 2**18), 20),
        row(IndexSelectShape(64, 1, 2**15), 20),
    ]
    assert [found.ratio for found in growth(rows)] == pytest.approx([1.1, 1.0])
    assert growth(rows[:1]) == []
    assert isinstance(growth(rows)[0], Growth)


def test_a_scale_maps_ends_to_ends_and_the_geometric_middle_to_the_middle() -> None:
    scale = LogScale(1, 100, 400, 200)
    assert (scale(1), scale(10), scale(100)) == pytest.approx((400, 300, 200))


def test_axes_end_at_powers() -> None:
    points = [Point(2048, 9.9, 0.12), Point(131_072, 640, 526)]
    assert key_range(points) == (2048, 131_072)
    assert time_range(points) == pytest.approx((0.1, 1000))


def test_one_point_has_axes_too() -> None:
    points = [Point(4096, 10, 10)]
    assert key_range(points) == (4096, 8192)
    assert time_range(points) == pytest.approx((10, 100))
    assert len(lines([Curve(1, tuple(points))])) == 2


def test_each_batch_has_a_line_and_a_floor_below_it() -> None:
    drawn = lines(curves(FULL))
    assert len(drawn) == 6
    for batch in (1, 8, 64):
        measured, floor = drawn[f"measured, B = {batch}"], drawn[f"floor, B = {batch}"]
        assert [x for x, _ in measured] == [x for x, _ in floor]
        assert all(top < bottom for (_, top), (_, bottom) in zip(measured, floor, strict=True))


def test_a_power_of_two_is_the_same_step_everywhere() -> None:
    steps = [b - a for (a, _), (b, _) in pairwise(lines(curves(FULL))["measured, B = 1"])]
    assert steps == pytest.approx([PLOT_WIDTH / 9] * 9, abs=0.2)


def test_lines_stay_within_the_plot() -> None:
    for points in lines(curves(FULL)).values():
        for x, y in points:
            assert PLOT_X - 0.1 <= x <= PLOT_X + PLOT_WIDTH + 0.1
            assert PLOT_Y - 0.1 <= y <= PLOT_Y + PLOT_HEIGHT + 0.1


def boxes(root: ET.Element) -> dict[str, tuple[float, float, float, float]]:
    """Return left, top, right and bottom of every level text."""
    found = {}
    for element in root.iter(f"{SVG}text"):
        if element.get("transform"):
            continue
        size, what = float(element.get("font-size", 0)), element.text or ""
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        width = len(what) * size * LETTER_WIDTH
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor", "")]
        found[what] = (left, y - 0.75 * size, left + width, y + 0.2 * size)
    return found


def test_texts_are_inside_and_apart() -> None:
    found = boxes(picture(curves(FULL)))
    assert {"B = 1", "B = 8", "B = 64", "2k", "1M", "keys of a row (T)"} <= set(found)
    for left, top, right, bottom in found.values():
        assert left >= 0 <= top
        assert right <= WIDTH
        assert bottom <= HEIGHT
    for (one, a), (other, b) in combinations(found.items(), 2):
        is_apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert is_apart, f"{one!r} lies over {other!r}"


def test_the_picture_names_its_axes_device_and_conditions() -> None:
    texts = [element.text for element in picture(curves(FULL)).iter(f"{SVG}text")]
    assert "microseconds" in texts
    assert "A <device>; how & when" in texts
