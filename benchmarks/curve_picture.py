"""The picture of time against keys: a line for each batch and its floor, both axes logarithmic.

Drawn as SVG by hand, with the shapes and colours of nxrt's other pictures. Drawing only; the
figures are in curve.py.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.cases import short_count
from benchmarks.curve import Curve, Point
from nxrt.cli.svg import (
    FAINT,
    GROUND,
    MARGIN,
    TRACK,
    Color,
    document,
    line,
    mixed,
    rect,
    text,
)

PLOT_X, PLOT_Y, PLOT_WIDTH, PLOT_HEIGHT = 92, 96, 710, 420
HEIGHT = PLOT_Y + PLOT_HEIGHT + 100
_COLORS: tuple[Color, ...] = ((0, 114, 178), (0, 158, 115), (213, 94, 0), (204, 121, 167))
"""From the same set as the other pictures' colours; see nxrt.cli.svg."""

_DASHES = "6 5"
_MINOR = (2, 5)


class LogScale:
    """Place numbers along an axis by their logarithm.

    Args:
        low: the number at `begin`, above 0.
        high: the number at `end`, above `low`.
        begin: a coordinate.
        end: another; below `begin` where the axis points up.
    """

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high = low, high
        self._begin = begin
        self._length = (end - begin) / math.log(high / low)

    def __call__(self, value: float) -> float:
        """Return the coordinate of a number."""
        return self._begin + math.log(value / self.low) * self._length


def as_svg(curves: Sequence[Curve], device: str, conditions: str) -> str:
    """Return the picture.

    Args:
        curves: at least one, each with at least one point.
        device: that was measured.
        conditions: one line on how.
    """
    points = [point for curve in curves for point in curve.points]
    x = LogScale(*key_range(points), PLOT_X, PLOT_X + PLOT_WIDTH)
    y = LogScale(*time_range(points), PLOT_Y + PLOT_HEIGHT, PLOT_Y)
    name = "DsaIndexSelect: time against keys"
    body = [*_heading(name, device, conditions), *_x_axis(x), *_y_axis(y)]
    colors = [mixed(_COLORS[index % len(_COLORS)]) for index in range(len(curves))]
    for curve, color in zip(curves, colors, strict=True):
        body += _curve(curve, color, x, y)
    # Labels last: no line crosses one.
    for curve in curves:
        body += _label(curve, x, y)
    return document(f"{name}, {device}", HEIGHT, [*body, *_legend()])


def key_range(points: Iterable[Point]) -> tuple[float, float]:
    """Return the ends of the axis of keys: powers of two round what is drawn."""
    keys = [point.num_keys for point in points]
    bottom, top = math.floor(math.log2(min(keys))), math.ceil(math.log2(max(keys)))
    return 2**bottom, 2 ** max(top, bottom + 1)


def time_range(points: Sequence[Point]) -> tuple[float, float]:
    """Return the ends of the axis of time in microseconds: powers of ten round what is drawn."""
    low = min(min(point.median_us, point.floor_us) for point in points)
    high = max(max(point.median_us, point.floor_us) for point in points)
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high * 1.5))
    return 10.0**bottom, 10.0 ** max(top, bottom + 1)


def _heading(name: str, device: str, conditions: str) -> Iterator[str]:
    yield text(MARGIN, 42, name, size=22, weight="bold")
    yield text(MARGIN, 68, f"{device}; {conditions}", color=FAINT, size=13)


def _x_axis(x: LogScale) -> Iterator[str]:
    bottom = PLOT_Y + PLOT_HEIGHT
    yield rect(PLOT_X, PLOT_Y, PLOT_WIDTH, PLOT_HEIGHT, TRACK, extra=' opacity="0.4"')
    num_keys = int(x.low)
    while num_keys <= x.high:
        at = x(num_keys)
        yield line(at, PLOT_Y, at, bottom, FAINT, extra=' stroke-opacity="0.2"')
        yield line(at, bottom, at, bottom + 5, FAINT)
        label = short_count(num_keys)
        yield text(at, bottom + 20, label, color=FAINT, size=12, anchor="middle")
        num_keys *= 2
    middle = PLOT_X + PLOT_WIDTH / 2
    yield text(middle, bottom + 42, "keys of a row (T)", size=13, anchor="middle")


def _y_axis(y: LogScale) -> Iterator[str]:
    right = PLOT_X + PLOT_WIDTH
    decades = round(math.log10(y.high / y.low))
    for decade in range(decades + 1):
        value = y.low * 10**decade
        yield line(PLOT_X, y(value), right, y(value), FAINT, extra=' stroke-opacity="0.45"')
        label = f"{value:,.6g}"
        yield text(PLOT_X - 8, y(value) + 4, label, color=FAINT, size=12, anchor="end")
        for factor in _MINOR if decade < decades else ():
            minor = y(value * factor)
            yield line(PLOT_X, minor, right, minor, FAINT, extra=' stroke-opacity="0.15"')
    x, middle = 34, PLOT_Y + PLOT_HEIGHT / 2
    turned = f' transform="rotate(-90 {x} {middle:.1f})"'
    yield text(x, middle, "microseconds", size=13, anchor="middle", extra=turned)


def _curve(curve: Curve, color: str, x: LogScale, y: LogScale) -> Iterator[str]:
    floors = [(x(point.num_keys), y(point.floor_us)) for point in curve.points]
    medians = [(x(point.num_keys), y(point.median_us)) for point in curve.points]
    dashes = f' stroke-width="1.8" stroke-dasharray="{_DASHES}"'
    yield _polyline(floors, color, f"floor, B = {curve.batch}", dashes)
    yield _polyline(medians, color, f"measured, B = {curve.batch}", ' stroke-width="2.4"')
    for (at, height), point in zip(medians, curve.points, strict=True):
        title = f"B = {curve.batch}, T = {short_count(point.num_keys)}: {_us(point.median_us)}"
        yield (
            f'<circle cx="{at:.1f}" cy="{height:.1f}" r="4" fill="{color}" stroke="{GROUND}">'
            f"<title>{title}, floor {_us(point.floor_us)}</title></circle>"
        )


def _polyline(points: Sequence[tuple[float, float]], color: str, name: str, style: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-linejoin="round"{style}>'
        f"<title>{name}</title></polyline>"
    )


def _label(curve: Curve, x: LogScale, y: LogScale) -> Iterator[str]:
    """Write beside a line's end which it is, how long that took, and how near the floor it is."""
    last = curve.points[-1]
    at, height = x(last.num_keys) + 10, y(last.median_us)
    yield text(at, height - 4, f"B = {curve.batch}", size=13, weight="bold")
    what = f"{_us(last.median_us)}, {last.ratio:.2f} × floor"
    yield text(at, height + 11, what, color=FAINT, size=11)


def _legend() -> Iterator[str]:
    y = HEIGHT - 28
    yield line(PLOT_X, y - 4, PLOT_X + 34, y - 4, FAINT, extra=' stroke-width="2.4"')
    yield text(PLOT_X + 44, y, "measured, median", size=12)
    left = PLOT_X + 190
    dashes = f' stroke-width="1.8" stroke-dasharray="{_DASHES}"'
    yield line(left, y - 4, left + 34, y - 4, FAINT, extra=dashes)
    what = "floor: bytes at the read bandwidth or FLOPs at the matrix rate of the same run"
    yield text(left + 44, y, what, size=12)


def _us(value: float) -> str:
    return f"{value:,.0f} us" if value >= 100 else f"{value:.3g} us"
