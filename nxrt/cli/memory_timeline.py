"""The events of a governor as a timeline: what each tier held from one moment to the next.

Arithmetic only. Where the first events were forgotten, what was held before is found from the
totals that every event carries, and counted as `EARLIER` where nobody says whose it was.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nxrt.memory.events import Event

EARLIER = "earlier"
"""Stands for the role of what was reserved before the first event that is remembered."""

FAILED = ("refuse", "time_out", "cancel")
_SIGNS = {"reserve": 1, "grow": 1, "move_in": 1, "commit": 1}
_SIGNS |= {"release": -1, "shrink": -1, "move_out": -1}

Owner = tuple[str, str, str]
"""A role, a holder and a request."""


@dataclass(frozen=True)
class Moment:
    """State what one tier holds from `time_s` until the next moment, in all and by role."""

    time_s: float
    used: int
    by_role: Mapping[str, int]


@dataclass(frozen=True)
class HolderPeak:
    """State the most that one holder held in one role, and when it first did."""

    role: str
    holder: str
    peak: int
    time_s: float


@dataclass(frozen=True)
class TierTimeline:
    """Tell of one tier.

    Args:
        tier: its name.
        moments: ascending in time; nothing changes between two.
        peak: the moment of the highest use, the first of several.
        role_peaks: the most bytes of each role that held any.
        holders: the largest first.
        requests: the most bytes of each named request, the largest first.
        failures: requests that were refused, timed out or cancelled.
    """

    tier: str
    moments: tuple[Moment, ...]
    peak: Moment
    role_peaks: Mapping[str, int]
    holders: tuple[HolderPeak, ...]
    requests: tuple[tuple[str, int], ...]
    failures: tuple[Event, ...]


def timelines(events: Iterable[Event]) -> tuple[TierTimeline, ...]:
    """Return a timeline for each tier that an event names, by name."""
    by_tier: dict[str, list[Event]] = {}
    for event in events:
        by_tier.setdefault(event.tier, []).append(event)
    return tuple(_timeline(tier, by_tier[tier]) for tier in sorted(by_tier))


def _timeline(tier: str, events: Sequence[Event]) -> TierTimeline:
    books = _Books(_held_before(events))
    moments = [Moment(events[0].time_s, books.used, dict(books.roles))]
    for event in events:
        if event.event in _SIGNS:
            books.post(event)
            moments.append(Moment(event.time_s, event.used, dict(books.roles)))
    holders = sorted(books.holder_peaks.values(), key=lambda h: (-h.peak, h.role, h.holder))
    requests = sorted(books.request_peaks.items(), key=lambda item: (-item[1], item[0]))
    return TierTimeline(
        tier,
        tuple(moments),
        max(moments, key=lambda moment: moment.used),
        {role: peak for role, peak in books.role_peaks.items() if peak},
        tuple(holder for holder in holders if holder.peak),
        tuple((request, peak) for request, peak in requests if peak),
        tuple(event for event in events if event.event in FAILED),
    )


def _change(event: Event) -> int:
    return _SIGNS.get(event.event, 0) * event.nbytes


def _owner(event: Event) -> Owner:
    return event.role, event.holder, event.request


def _held_before(events: Sequence[Event]) -> dict[Owner, int]:
    """Return what must have been held before the first event."""
    sums: dict[Owner, int] = {}
    least: dict[Owner, int] = {}
    for event in events:
        owner = _owner(event)
        sums[owner] = sums.get(owner, 0) + _change(event)
        least[owner] = min(least.get(owner, 0), sums[owner])
    held = {owner: -lowest for owner, lowest in least.items() if lowest < 0}
    unknown = events[0].used - _change(events[0]) - sum(held.values())
    return held | ({(EARLIER, EARLIER, ""): unknown} if unknown > 0 else {})


@dataclass
class _Books:
    """Follow the events of one tier."""

    owners: dict[Owner, int]
    roles: dict[str, int] = field(default_factory=dict)
    role_peaks: dict[str, int] = field(default_factory=dict)
    holders: dict[tuple[str, str], int] = field(default_factory=dict)
    holder_peaks: dict[tuple[str, str], HolderPeak] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    request_peaks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used = sum(self.owners.values())
        for owner, nbytes in self.owners.items():
            self._add(owner, nbytes, float("-inf"))

    def post(self, event: Event) -> None:
        self._add(_owner(event), _change(event), event.time_s)

    def _add(self, owner: Owner, change: int, time_s: float) -> None:
        role, holder, request = owner
        used = self.roles[role] = self.roles.get(role, 0) + change
        self.role_peaks[role] = max(self.role_peaks.get(role, 0), used)
        used = self.holders[role, holder] = self.holders.get((role, holder), 0) + change
        best = self.holder_peaks.get((role, holder))
        if best is None or used > best.peak:
            self.holder_peaks[role, holder] = HolderPeak(role, holder, used, time_s)
        if request:
            used = self.requests[request] = self.requests.get(request, 0) + change
            self.request_peaks[request] = max(self.request_peaks.get(request, 0), used)
