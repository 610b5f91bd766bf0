"""The time axis of a memory report: seconds to pixels, with room for every phase and round ticks.

Time is linear inside a phase. A phase too short to be seen is drawn wider than its share.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MIN_PHASE_WIDTH = 84.0
"""Pixels that hold the name and the length of a phase."""

_TICK_STEP = 56.0
_LETTER_WIDTH = 6.4
_GAP = 12.0


@dataclass(frozen=True)
class PhaseSpan:
    """Place one phase: from `begin_s` for `length_s` seconds, and from `x` for `width` pixels."""

    name: str
    begin_s: float
    length_s: float
    x: float
    width: float


@dataclass(frozen=True)
class TimeScale:
    """Map seconds of the monotonic clock to pixels."""

    spans: tuple[PhaseSpan, ...]
    is_even: bool

    @classmethod
    def of(
        cls, phases: Sequence[tuple[str, float]], end_s: float, *, x: float, width: float
    ) -> "TimeScale":
        """Return a scale for phases that follow each other.

        Args:
            phases: names and begins, ascending, at least one.
            end_s: when the last one ends.
            x: where the axis begins.
            width: its length in pixels.
        """
        ends = [begin for _, begin in phases[1:]] + [max(end_s, phases[-1][1])]
        lengths = [max(end - begin, 0.0) for (_, begin), end in zip(phases, ends, strict=True)]
        widths, is_even = _widths(lengths, width)
        spans = []
        for (name, begin), length, pixels in zip(phases, lengths, widths, strict=True):
            spans.append(PhaseSpan(name, begin, length, x, pixels))
            x += pixels
        return cls(tuple(spans), is_even)

    @property
    def begin_s(self) -> float:
        """Return the moment that the axis counts from."""
        return self.spans[0].begin_s

    @property
    def end_x(self) -> float:
        """Return where the axis ends."""
        return self.spans[-1].x + self.spans[-1].width

    def position(self, time_s: float) -> float:
        """Return where a moment is drawn, the nearest end for one outside the axis."""
        span = next((s for s in reversed(self.spans) if s.begin_s <= time_s), self.spans[0])
        share = (time_s - span.begin_s) / span.length_s if span.length_s else 0.0
        return span.x + span.width * min(max(share, 0.0), 1.0)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield positions and labels of round moments; each label stays within its phase."""
        free_from = -math.inf
        for span in self.spans:
            if not span.length_s:
                continue
            step = _round_step(span.length_s * min(1.0, _TICK_STEP / span.width))
            begin = span.begin_s - self.begin_s
            for n in range(math.ceil(begin / step), math.floor((begin + span.length_s) / step) + 1):
                x = self.position(self.begin_s + n * step)
                label = time_text(n * step, step)
                half = len(label) * _LETTER_WIDTH / 2
                is_inside = span.x <= x - half and x + half <= span.x + span.width
                if x - half >= free_from and (is_inside or not x > self.spans[0].x):
                    free_from = x + half + _GAP
                    yield x, label


def _widths(lengths: Sequence[float], width: float) -> tuple[list[float], bool]:
    """Return pixels by phase, none below the least that it needs, and whether all are shares."""
    least = min(MIN_PHASE_WIDTH, width / len(lengths))
    narrow: set[int] = set()
    while True:
        wide = [n for n in range(len(lengths)) if n not in narrow]
        room, total = width - least * len(narrow), sum(lengths[n] for n in wide)
        if not total:
            return [width / len(lengths)] * len(lengths), len(lengths) == 1
        more = {n for n in wide if room * lengths[n] / total < least - 1e-9}
        if not more:
            widths = [least if n in narrow else room * s / total for n, s in enumerate(lengths)]
            return widths, not narrow
        narrow |= more


def _round_step(at_least: float) -> float:
    """Return the next of 1, 2 and 5 with zeros, in seconds and not below a microsecond."""
    power = 10.0 ** math.floor(math.log10(max(at_least, 1e-6)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= at_least * (1 - 1e-9))


def time_text(time_s: float, precision_s: float) -> str:
    """Return a time in seconds or milliseconds, with as many digits as the precision has."""
    if precision_s >= 1 or (precision_s >= 0.1 and abs(time_s) >= 1):
        return f"{time_s:,.{0 if precision_s >= 1 else 1}f} s"
    digits = max(0, -math.floor(math.log10(precision_s * 1e3) + 1e-9))
    return f"{time_s * 1e3:,.{digits}f} ms"


def length_text(length_s: float) -> str:
    """Return a length of time with three digits or so."""
    if length_s <= 0:
        return "0 ms"
    power = math.floor(math.log10(length_s))
    if power >= 0:
        return f"{length_s:,.{max(0, 2 - power)}f} s"
    return time_text(length_s, 10.0 ** (power - 2))
