"""The timeline of a governor's events: what it says is what the governor's own books said."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxrt.cli.memory_timeline import EARLIER, HolderPeak, timelines
from nxrt.errors import LeaseRefusedError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.events import Event
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, PINNED, Role

ROLES = (Role.KV_CACHE, Role.WORKSPACE)


def event(time_s: float, what: str, nbytes: int, used: int, **labels: str) -> Event:
    named = {"role": "kv_cache", "holder": "cache", "request": ""} | labels
    return Event(time_s, what, "process", "host", **named, nbytes=nbytes, used=used)


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "close", "grow", "shrink", "split", "move", "commit"]),
        st.integers(0, 50),
        st.integers(0, 3),
    ),
    max_size=40,
)


def play(governor: MemoryGovernor, steps: list[Step]) -> list[dict[str, dict[str, int]]]:
    """Do things to a governor; return what each tier held by role after each of them."""
    leases: list[Any] = []
    seen = []
    for what, nbytes, n in steps:
        lease = leases[n % len(leases)] if leases else None
        labels: dict[str, Any] = {"role": ROLES[n % 2], "holder": f"h{n}", "request": "7" * (n % 2)}
        if what == "reserve":
            leases.append(governor.reserve(HOST, nbytes, **labels))
        elif what == "commit":
            leases.append(governor.record_committed(HOST, nbytes, **labels))
        elif lease is not None:
            if what == "close":
                lease.close()
                leases.remove(lease)
            elif what == "grow":
                lease.grow(nbytes)
            elif what == "move":
                lease.move(PINNED if lease.tier == HOST else HOST)
            elif nbytes <= lease.nbytes:
                part = lease.split(nbytes) if what == "split" else lease.shrink(nbytes)
                leases += [part] if what == "split" else []
        seen.append(held_by(governor))
    for lease in leases:
        lease.close()
    return seen


def held_by(governor: MemoryGovernor) -> dict[str, dict[str, int]]:
    return {
        str(usage.tier): {role.value: n for role, n in usage.by_role().items() if n}
        for usage in governor.snapshot()
    }


@given(STEPS)
def test_after_every_step_it_says_what_the_books_said(steps: list[Step]) -> None:
    governor = MemoryGovernor(history=1000)
    seen = play(governor, steps)
    tiers = timelines(governor.events())
    for timeline in tiers:
        said = [{r: n for r, n in m.by_role.items() if n} for m in timeline.moments]
        for moment in timeline.moments:
            assert min(moment.by_role.values(), default=0) >= 0
        assert all(books.get(timeline.tier, {}) in said for books in seen)
    for usage in governor.snapshot():
        found = next((t for t in tiers if t.tier == str(usage.tier)), None)
        assert (found.peak.used if found else 0) == usage.peak


@given(STEPS, st.integers(1, 12))
def test_where_the_first_events_are_forgotten_the_totals_are_still_right(
    steps: list[Step], history: int
) -> None:
    governor = MemoryGovernor(history=history)
    play(governor, steps)
    for timeline in timelines(governor.events()):
        for moment in timeline.moments[1:]:
            is_exchange = sum(moment.by_role.values()) - moment.used
            assert is_exchange == 0
            assert min(moment.by_role.values(), default=0) >= 0


def test_what_was_held_before_is_found_from_the_first_event() -> None:
    events = (
        event(1, "reserve", 5, 105),
        event(2, "release", 30, 75, holder="old"),
        event(3, "release", 1, 74, holder="small", role="graph"),
    )
    (timeline,) = timelines(events)
    assert [m.used for m in timeline.moments] == [100, 105, 75, 74]
    assert timeline.moments[0].by_role == {"kv_cache": 30, "graph": 1, EARLIER: 69}
    assert timeline.role_peaks == {"kv_cache": 35, "graph": 1, EARLIER: 69}


def test_peaks_of_holders_and_requests_are_told_with_their_first_moment() -> None:
    events = (
        event(1, "reserve", 5, 5, request="a"),
        event(2, "grow", 5, 10, request="a"),
        event(3, "release", 10, 0, request="a"),
        event(4, "reserve", 10, 10, request="b"),
        event(5, "reserve", 3, 13, holder="other", role="graph"),
    )
    (timeline,) = timelines(events)
    assert timeline.holders == (
        HolderPeak("kv_cache", "cache", 10, 2),
        HolderPeak("graph", "other", 3, 5),
    )
    assert timeline.requests == (("a", 10), ("b", 10))
    assert (timeline.peak.used, timeline.peak.time_s) == (13, 5)


def test_refusals_are_kept_and_change_nothing() -> None:
    governor = MemoryGovernor(MemoryBudget.of(host=10), history=10)
    with pytest.raises(LeaseRefusedError):
        governor.reserve(HOST, 11, role=Role.STAGING, holder="large")
    (timeline,) = timelines(governor.events())
    assert [(e.event, e.nbytes) for e in timeline.failures] == [("refuse", 11)]
    assert timeline.peak.used == 0


def test_no_events_are_no_timelines() -> None:
    assert timelines(()) == ()
