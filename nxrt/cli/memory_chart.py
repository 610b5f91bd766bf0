"""The chart of one tier: stacked steps by role over time, with its limits, peak and phases.

Drawing only; the figures are in `memory_timeline`, the time axis in `time_scale`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from nxrt.cli.memory_timeline import Moment, TierTimeline
from nxrt.cli.plan import share_text
from nxrt.cli.sizes import size_text
from nxrt.cli.svg import (
    BAD,
    FAINT,
    GROUND,
    INK,
    MARGIN,
    OTHER_COLOR,
    ROLE_COLORS,
    TRACK,
    WIDTH,
    line,
    mixed,
    rect,
    text,
)
from nxrt.cli.time_scale import TimeScale, length_text
from nxrt.memory.governor import TierUsage

PLOT_X, PLOT_WIDTH, PLOT_HEIGHT = 116, 690, 190
_HEAD, _AXIS, _LEGEND_STEP, _GAP = 40, 54, 22, 44
_LETTER_WIDTH = 6.7
_FAR = 2.0
"""A limit above the peak by more than this would flatten the picture, and is written instead."""
_FEW_FAILURES, _MARK_STEP = 5, 4
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
Height = Callable[[float], float]
"""Where a number of bytes is drawn."""

_HALO = f' stroke="{GROUND}" stroke-width="4" stroke-linejoin="round" aria-hidden="true"'


def chart(
    timeline: TierTimeline, usage: TierUsage | None, scale: TimeScale, y: float
) -> tuple[list[str], float]:
    """Return the shapes of one tier from `y` down, and where the next thing may begin."""
    lines = _lines_of(usage)
    top = _top(timeline.peak.used, lines)
    floor = y + _HEAD + PLOT_HEIGHT

    def height(nbytes: float) -> float:
        return floor - PLOT_HEIGHT * nbytes / top

    body = [*_heading(timeline, usage, scale, y), *_grid(top, scale, floor)]
    moments = [*timeline.moments, _last(timeline, scale)]
    for role, below, above in _bands(moments, timeline.role_peaks):
        body += _area(role, thinned(moments, below, above, scale), height)
    body += _limit_lines(lines, top, height)
    body += _refusals(timeline, scale, floor)
    body += _peak(timeline.peak, scale, height(timeline.peak.used))
    body += _phases(scale, floor)
    legend, y = _legend(timeline, floor + _AXIS + 22)
    return [*body, *legend], y + _GAP


def tick_step(top: float) -> int:
    """Return the power of two, in bytes, that gives from three to six ticks."""
    return 1 << max(0, (int(top) // 3).bit_length() - 1)


def _lines_of(usage: TierUsage | None) -> dict[str, int]:
    named = {"limit": usage.limit, "watermark": usage.watermark} if usage is not None else {}
    return {name: nbytes for name, nbytes in named.items() if nbytes is not None}


def _top(peak: int, lines: Mapping[str, int]) -> float:
    near = [nbytes * 1.06 for nbytes in lines.values() if nbytes <= peak * _FAR]
    return max([peak * 1.22, 4.0, *near])


def _last(timeline: TierTimeline, scale: TimeScale) -> Moment:
    """Return the last state once more, where the axis ends."""
    moment, end = timeline.moments[-1], scale.spans[-1]
    return Moment(
        max(moment.time_s, end.begin_s + end.length_s), moment.used, moment.by_role
    )  # fmt: skip


def _heading(
    timeline: TierTimeline, usage: TierUsage | None, scale: TimeScale, y: float
) -> Iterator[str]:
    peak = timeline.peak
    after = length_text(peak.time_s - scale.begin_s)
    what = f"peak {size_text(peak.used)} after {after}"
    limit = None if usage is None else usage.limit
    if limit is None:
        what += ", no limit"
    elif limit:
        what += f", {share_text(peak.used, limit)} of the limit, {size_text(limit)}"
    yield text(MARGIN, y + 16, timeline.tier, size=16, weight="bold")
    x = MARGIN + 28 + len(timeline.tier) * 9
    yield text(x, y + 16, what, color=FAINT, size=14)


def _grid(top: float, scale: TimeScale, floor: float) -> Iterator[str]:
    yield rect(PLOT_X, floor - PLOT_HEIGHT, PLOT_WIDTH, PLOT_HEIGHT, TRACK, extra=' opacity="0.4"')
    step = tick_step(top)
    for nbytes in range(0, int(top) + 1, step):
        y = floor - PLOT_HEIGHT * nbytes / top
        yield line(PLOT_X, y, PLOT_X + PLOT_WIDTH, y, FAINT, extra=' stroke-opacity="0.3"')
        yield text(PLOT_X - 8, y + 4, _tick_text(nbytes, step), color=FAINT, size=11, anchor="end")
    for x, label in scale.ticks():
        yield line(x, floor, x, floor + 5, FAINT)
        yield text(x, floor + 17, label, color=FAINT, size=11, anchor="middle")


def _tick_text(nbytes: int, step: int) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if max(nbytes, step) >= size)
    return f"{nbytes / size:g} {unit}" if nbytes else "0"


Band = tuple[str, list[int], list[int]]
"""A role, and the lower and upper edge of its area at each moment."""


def _bands(moments: Sequence[Moment], role_peaks: Mapping[str, int]) -> Iterator[Band]:
    edge = [0] * len(moments)
    for role in _ordered(role_peaks):
        above = [e + m.by_role.get(role, 0) for e, m in zip(edge, moments, strict=True)]
        yield role, edge, above
        edge = above


def _ordered(roles: Mapping[str, int]) -> list[str]:
    return [r for r in roles if r not in ROLE_COLORS] + [r for r in ROLE_COLORS if r in roles]


Step = tuple[float, int, int]
"""A position, and the lower and upper edge from there on."""


def thinned(
    moments: Sequence[Moment], below: Sequence[int], above: Sequence[int], scale: TimeScale
) -> list[Step]:
    """Return the steps of a band; of those within a pixel the widest and the last."""
    columns: dict[int, list[Step]] = {}
    for moment, low, high in zip(moments, below, above, strict=True):
        x = scale.position(moment.time_s)
        columns.setdefault(round(x), []).append((x, low, high))
    steps: list[Step] = []
    for column in columns.values():
        widest = max(range(len(column)), key=lambda n: column[n][2] - column[n][1])
        steps += [column[n] for n in sorted({widest, len(column) - 1})]
    return steps


def _area(role: str, steps: Sequence[Step], height: Height) -> Iterator[str]:
    color = mixed(ROLE_COLORS.get(role, OTHER_COLOR))
    upper: list[str] = []
    lower: list[str] = []
    paths = []
    before = (0, 0)
    for (x, low, high), (next_x, _, _) in pairwise(steps):
        if upper and not max(low, before[0]) < min(high, before[1]):
            # Nothing of it goes on at the same height: an outline between would be a stray line.
            paths.append(_closed(upper, lower))
            upper, lower = [], []
        if high > low:
            upper += [f"{x:.1f},{height(high):.1f}", f"{next_x:.1f},{height(high):.1f}"]
            lower += [f"{x:.1f},{height(low):.1f}", f"{next_x:.1f},{height(low):.1f}"]
        before = (low, high)
    if upper:
        paths.append(_closed(upper, lower))
    # The outline keeps a role visible that is less than a pixel high.
    yield (
        f'<path d="{" ".join(paths)}" fill="{color}" stroke="{color}" stroke-width="1.2">'
        f"<title>{role}</title></path>"
    )


def _closed(upper: Sequence[str], lower: Sequence[str]) -> str:
    return f"M{' L'.join([*upper, *reversed(lower)])} Z"


def _limit_lines(lines: Mapping[str, int], top: float, height: Height) -> Iterator[str]:
    right, taken = PLOT_X + PLOT_WIDTH, -100.0
    far_y = height(top) + 8
    for name, nbytes in lines.items():
        is_far = nbytes > top
        y = far_y if is_far else height(nbytes)
        dashes = "7 4" if name == "limit" else "2 3"
        if not is_far:
            style = f' stroke-width="1.6" stroke-dasharray="{dashes}"'
            yield line(PLOT_X, y, right, y, INK, extra=style)
        y = max(y, taken + 28)
        taken = y
        weight = "bold" if name == "limit" else "normal"
        yield text(right + 10, y + 1, name, size=11, weight=weight)
        yield text(right + 10, y + 14, f"{size_text(nbytes)}{' ↑' if is_far else ''}", size=11)


def _refusals(timeline: TierTimeline, scale: TimeScale, floor: float) -> Iterator[str]:
    top = floor - PLOT_HEIGHT
    xs = [scale.position(event.time_s) for event in timeline.failures]
    # Many would hide the areas, so that only a mark above the plot is left of each.
    ends = floor if len(xs) <= _FEW_FAILURES else top
    for x in dict.fromkeys(round(x / _MARK_STEP) * _MARK_STEP for x in xs):
        yield line(x, top, x, ends, BAD, extra=' stroke-width="1.2"')
        yield (
            f'<path d="M{x - 5},{top - 9} L{x + 5},{top - 9} L{x},{top} Z" fill="{BAD}">'
            "<title>a request failed</title></path>"
        )


def _peak(peak: Moment, scale: TimeScale, y: float) -> Iterator[str]:
    x = scale.position(peak.time_s)
    is_right = x > PLOT_X + PLOT_WIDTH / 2
    label = f"peak {size_text(peak.used)} at {length_text(peak.time_s - scale.begin_s)}"
    at = x - 2 if is_right else x + 2
    anchor = "end" if is_right else "start"
    # Drawn below the letters, not by paint-order, which some readers of SVG do not know.
    yield text(at, y - 10, label, color=GROUND, size=12, weight="bold", anchor=anchor, extra=_HALO)
    yield text(at, y - 10, label, size=12, weight="bold", anchor=anchor)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{INK}" stroke="{GROUND}"/>'


def _phases(scale: TimeScale, floor: float) -> Iterator[str]:
    y = floor + 24
    for index, span in enumerate(scale.spans):
        opacity = ' opacity="0.9"' if index % 2 else ' opacity="0.5"'
        yield rect(span.x, y, span.width, 30, TRACK, extra=opacity)
        middle = span.x + span.width / 2
        yield text(middle, y + 13, span.name, size=12, anchor="middle")
        length = length_text(span.length_s)
        yield text(middle, y + 26, length, color=FAINT, size=10, anchor="middle")
        if index:
            style = ' stroke-dasharray="3 3" stroke-opacity="0.6"'
            yield line(span.x, floor - PLOT_HEIGHT, span.x, y, FAINT, extra=style)


def _legend(timeline: TierTimeline, y: float) -> tuple[list[str], float]:
    body, x = [], float(PLOT_X)
    for role in reversed(_ordered(timeline.role_peaks)):
        label = f"{role}, peak {size_text(timeline.role_peaks[role])}"
        width = 22 + len(label) * _LETTER_WIDTH + 10
        if x > PLOT_X and x + width > WIDTH - MARGIN:
            x, y = float(PLOT_X), y + _LEGEND_STEP
        color = mixed(ROLE_COLORS.get(role, OTHER_COLOR))
        body += [rect(x, y - 11, 14, 14, color, extra=' rx="3"'), text(x + 22, y, label, size=12)]
        x += width
    return body, y
