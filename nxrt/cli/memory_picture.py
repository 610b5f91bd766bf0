"""The memory report as a picture and as a page: a chart for each tier, and who held the most.

Drawing only; every figure comes from the recording.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nxrt.cli.memory_chart import PLOT_WIDTH, PLOT_X, chart
from nxrt.cli.memory_timeline import TierTimeline, timelines
from nxrt.cli.recording import Recording
from nxrt.cli.sizes import size_text
from nxrt.cli.svg import (
    BAD,
    FAINT,
    GOOD,
    MARGIN,
    OTHER_COLOR,
    ROLE_COLORS,
    TRACK,
    WIDTH,
    document,
    line,
    mixed,
    page,
    printable,
    rect,
    table,
    text,
)
from nxrt.cli.time_scale import TimeScale, length_text
from nxrt.memory.events import MAX_EVENTS

MOST_ROWS = 10
"""Rows of each table in the picture; the page has them all."""

_TOP, _ROW, _GAP = 104, 22, 30
_COLUMNS = (MARGIN, MARGIN + 110, MARGIN + 250, WIDTH - MARGIN - 120, WIDTH - MARGIN)
_EVENT_NAMES = {"refuse": "refused", "time_out": "timed out", "cancel": "cancelled"}

Row = tuple[str, str, str, str, str]
"""A tier, a role or what happened, who, when, and how many bytes."""


@dataclass(frozen=True)
class _Table:
    title: str
    columns: Row
    rows: Sequence[Row]


def as_svg(recording: Recording) -> str:
    """Return the picture."""
    tiers, scale = timelines(recording.events), time_scale(recording)
    usages = {str(usage.tier): usage for usage in recording.tiers}
    y: float = _TOP
    body = list(_heading(recording, scale))
    for tier in tiers:
        if tier.peak.used or tier.failures:
            shapes, y = chart(tier, usages.get(tier.tier), scale, y)
            body += shapes
    for drawn in _tables(tiers, scale):
        if drawn.rows:
            body += _drawn(drawn, y)
            num_lines = min(len(drawn.rows), MOST_ROWS) + (len(drawn.rows) > MOST_ROWS) + 2
            y += num_lines * _ROW + _GAP
    for note in _notes(recording, scale):
        body.append(text(MARGIN, y, note, color=FAINT, size=12))
        y += _ROW
    return document(_name(recording), y + 4, body)


def as_html(recording: Recording) -> str:
    """Return a page: the picture, and every table as text."""
    tiers, scale = timelines(recording.events), time_scale(recording)
    roles = [
        (tier.tier, role, size_text(peak), peak)
        for tier in tiers
        for role, peak in tier.role_peaks.items()
    ]
    limits = [
        (str(usage.tier), usage.peak, *map(_bytes, (usage.limit, usage.watermark)))
        for usage in recording.tiers
    ]
    phases = [
        (span.name, length_text(span.begin_s - scale.begin_s), length_text(span.length_s))
        for span in scale.spans
    ]
    failure = [(recording.failure,)] if recording.failure else []
    parts = [
        table("the run failed", ("",), failure),
        table("tiers, in bytes", ("tier", "peak", "limit", "watermark"), limits),
        table("roles", ("tier", "role", "peak", "bytes"), roles),
        *(table(drawn.title, drawn.columns, drawn.rows) for drawn in _tables(tiers, scale)),
        table("phases", ("phase", "begins after", "lasts"), phases),
    ]
    return page(_name(recording), as_svg(recording), "".join(parts))


def time_scale(recording: Recording) -> TimeScale:
    """Return the time axis: from the first phase, or the first event, to the end."""
    first = recording.events[0].time_s if recording.events else recording.ended_s
    last = recording.events[-1].time_s if recording.events else recording.ended_s
    phases = recording.phases or [("run", first)]
    return TimeScale.of(phases, max(recording.ended_s, last), x=PLOT_X, width=PLOT_WIDTH)


def _bytes(nbytes: int | None) -> str | int:
    return "none" if nbytes is None else nbytes


def _name(recording: Recording) -> str:
    return f"nxrt memory: {recording.title}"


def _heading(recording: Recording, scale: TimeScale) -> Iterator[str]:
    title = printable(f"memory of {recording.title}", 70)
    yield text(MARGIN, 46, title, size=22, weight="bold")
    color = BAD if recording.failure else GOOD
    lasted = length_text(scale.spans[-1].begin_s + scale.spans[-1].length_s - scale.begin_s)
    what = f"ended after {lasted}"
    if recording.failure:
        what = printable(f"failed after {lasted}: {recording.failure}", 92)
    yield f'<circle cx="{MARGIN + 6}" cy="69" r="6" fill="{color}"/>'
    yield text(MARGIN + 20, 74, what, color=color, size=14, weight="bold")


def _tables(tiers: Sequence[TierTimeline], scale: TimeScale) -> Iterator[_Table]:
    def at(time_s: float) -> str:
        is_known = math.isfinite(time_s)
        return length_text(time_s - scale.begin_s) if is_known else "before the first event"

    holders = [
        (holder.peak, (tier.tier, holder.role, holder.holder, at(holder.time_s)))
        for tier in tiers
        for holder in tier.holders
    ]
    requests = [(peak, (t.tier, "", request, "")) for t in tiers for request, peak in t.requests]
    failures = [
        (tier.tier, _EVENT_NAMES[e.event], e.holder, at(e.time_s), size_text(e.nbytes))
        for tier in tiers
        for e in tier.failures
    ]
    yield _Table("largest holders", ("tier", "role", "holder", "after", "peak"), _largest(holders))
    yield _Table("largest requests", ("tier", "", "request", "", "peak"), _largest(requests))
    yield _Table("requests that failed", ("tier", "", "holder", "after", "asked"), failures)


def _largest(rows: Sequence[tuple[int, tuple[str, str, str, str]]]) -> list[Row]:
    return [(*row, size_text(peak)) for peak, row in sorted(rows, key=lambda r: (-r[0], r[1]))]


def _drawn(drawn: _Table, y: float) -> Iterator[str]:
    yield text(MARGIN, y, drawn.title, size=14, weight="bold")
    y += _ROW
    yield from _cells(drawn.columns, y, color=FAINT)
    yield line(MARGIN, y + 6, WIDTH - MARGIN, y + 6, TRACK)
    for row in drawn.rows[:MOST_ROWS]:
        y += _ROW
        if row[1] in ROLE_COLORS:
            color = mixed(ROLE_COLORS.get(row[1], OTHER_COLOR))
            yield rect(_COLUMNS[1], y - 9, 10, 10, color, extra=' rx="2"')
        yield from _cells(row, y, indent=18 if row[1] in ROLE_COLORS else 0)
    if len(drawn.rows) > MOST_ROWS:
        more = f"and {len(drawn.rows) - MOST_ROWS:,} more"
        yield text(MARGIN, y + _ROW, more, color=FAINT, size=12)


def _cells(row: Row, y: float, *, color: str | None = None, indent: int = 0) -> Iterator[str]:
    for index, (x, cell) in enumerate(zip(_COLUMNS, row, strict=True)):
        anchor = "end" if index >= 3 else "start"
        shown = printable(cell, 62)
        shift = indent if index == 1 else 0
        if color is None:
            yield text(x + shift, y, shown, size=12, anchor=anchor)
        else:
            yield text(x + shift, y, shown, size=12, anchor=anchor, color=color)


def _notes(recording: Recording, scale: TimeScale) -> Iterator[str]:
    if not recording.events:
        yield "Nothing was reserved."
    if len(recording.events) == MAX_EVENTS:
        yield (
            f"Only the last {MAX_EVENTS:,} events are shown;"
            " what was held before them is drawn as far as they tell."
        )
    if not scale.is_even:
        yield "Time is linear within a phase; short phases are drawn wider than their share."
