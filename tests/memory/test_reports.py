"""Check what the governor says of itself: snapshots, events and log records."""

import copy
import json
import logging
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from nxrt.errors import InvalidInputError, LeaseRefusedError, LeasesOutstandingError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor, Snapshot
from nxrt.memory.tier import HOST, PINNED, Role
from tests.helpers.reserving import close_all, eager_switching, reserve

LIMIT = 1000


@pytest.fixture
def governor() -> MemoryGovernor:
    return MemoryGovernor(MemoryBudget.of(host={"limit": LIMIT, "watermark": "90%"}), history=100)


def test_snapshot_reports_by_role_holder_and_request(governor: MemoryGovernor) -> None:
    leases = [
        reserve(governor, 1, "a", role=Role.KV_CACHE, request="7"),
        reserve(governor, 2, "a", role=Role.GRAPH, request="7"),
        reserve(governor, 4, "b", role=Role.GRAPH, request="8"),
        reserve(governor, 8, "b", role=Role.GRAPH),
    ]
    (usage,) = governor.snapshot()
    assert usage.by_role() == {Role.KV_CACHE: 1, Role.GRAPH: 14}
    assert usage.by_holder() == {"a": 3, "b": 12}
    assert usage.by_request() == {"7": 3, "8": 4}
    assert sum(usage.by_role().values()) == sum(usage.by_holder().values()) == usage.used == 15
    close_all(*leases)


def test_peak_of_a_request_is_since_it_last_held_nothing(governor: MemoryGovernor) -> None:
    reserve(governor, 100, request="7").close()
    with reserve(governor, 10, request="7"):
        (request,) = governor.usage(HOST).requests
        assert (request.request, request.used, request.peak) == ("7", 10, 10)


def test_snapshot_holds_the_levels_below_as_of_the_same_moment(governor: MemoryGovernor) -> None:
    with governor.child("engine") as engine, reserve(engine, 5), reserve(governor, 7, tier=PINNED):
        snapshot = governor.snapshot()
    assert (snapshot.level, [usage.tier for usage in snapshot]) == ("process", [HOST, PINNED])
    below = snapshot.child("engine")
    assert (below.level, [usage.used for usage in below]) == ("process/engine", [5])
    with pytest.raises(KeyError):
        snapshot.child("nobody")


def test_snapshot_finds_a_tier(governor: MemoryGovernor) -> None:
    with reserve(governor, 5):
        snapshot = governor.snapshot()
    usage = snapshot.tier(HOST)
    assert usage is not None
    assert usage.used == 5
    assert snapshot.tier(PINNED) is None


def test_snapshot_cannot_be_changed_and_survives_copies(governor: MemoryGovernor) -> None:
    with governor.child("engine") as engine, reserve(engine, 5):
        snapshot = governor.snapshot()
    with pytest.raises(FrozenInstanceError):
        snapshot.level = "other"
    for back in (pickle.loads(pickle.dumps(snapshot)), copy.deepcopy(snapshot)):
        assert isinstance(back, Snapshot)
        assert (back, back.level, back.children) == (snapshot, "process", snapshot.children)


def test_snapshots_of_a_tree_are_of_one_moment() -> None:
    """What a level holds is what it holds itself and what those below it hold."""
    governor = MemoryGovernor()
    children = [governor.child(str(n)) for n in range(4)]

    def take_turns(child: MemoryGovernor) -> None:
        for n in range(30):
            with reserve(child, n, request=str(n % 3)) as lease:
                lease.move(PINNED)

    with eager_switching(), ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(take_turns, child) for child in children]
        while not all(future.done() for future in futures):
            snapshot = governor.snapshot()
            for usage in snapshot:
                below = [child.tier(usage.tier) for child in snapshot.children]
                assert usage.used == sum(found.used for found in below if found)
                assert usage.used == sum(usage.by_holder().values())


def test_outstanding_lists_the_largest_first(governor: MemoryGovernor) -> None:
    with reserve(governor, 5, "a"), reserve(governor, 9, "b", role=Role.GRAPH, request="7"):
        first, second = governor.outstanding()
        assert (first.holder, first.role, first.request, first.nbytes) == ("b", Role.GRAPH, "7", 9)
        assert (second.holder, second.level, second.is_dropped) == ("a", "process", False)
        with pytest.raises(LeasesOutstandingError) as caught:
            governor.close()
    assert caught.value.holders == (("host", "graph", "b", 9), ("host", "workspace", "a", 5))
    governor.close()


def test_events_tell_the_story(governor: MemoryGovernor) -> None:
    lease = reserve(governor, 500, "cache", role=Role.KV_CACHE, request="7")
    lease.grow(450)
    lease.shrink(50)
    part = lease.split(100)
    part.move(PINNED)
    with pytest.raises(LeaseRefusedError):
        reserve(governor, 300, "other")
    with pytest.raises(LeaseRefusedError):
        reserve(governor, 300, "other", timeout_s=0.001)
    governor.set_limit(HOST, 900)
    governor.record_committed(HOST, 5, role=Role.WEIGHTS, holder="w").close()
    close_all(lease, part)
    story = [(event.event, event.nbytes, event.used) for event in governor.events()]
    assert story == [
        ("reserve", 500, 500),
        ("watermark", 900, 950),
        ("grow", 450, 950),
        ("shrink", 50, 900),
        ("split", 100, 900),
        ("move_in", 100, 100),
        ("move_out", 100, 800),
        ("refuse", 300, 800),
        ("wait", 300, 800),
        ("time_out", 300, 800),
        ("limit", 900, 800),
        ("commit", 5, 805),
        ("release", 5, 800),
        ("release", 800, 0),
        ("release", 100, 0),
    ]
    first = governor.events()[0]
    assert (first.level, first.tier, first.role) == ("process", "host", "kv_cache")
    assert (first.holder, first.request) == ("cache", "7")
    times = [event.time_s for event in governor.events()]
    assert times == sorted(times)


def test_events_forget_the_oldest() -> None:
    governor = MemoryGovernor(history=3)
    for n in range(10):
        reserve(governor, n).close()
    assert [(event.event, event.nbytes) for event in governor.events()] == [
        ("release", 8),
        ("reserve", 9),
        ("release", 9),
    ]


def test_events_are_off_by_default(tmp_path: Path) -> None:
    governor = MemoryGovernor()
    reserve(governor, 1).close()
    governor.write_events(tmp_path / "events.jsonl")
    assert governor.events() == ()
    assert (tmp_path / "events.jsonl").read_text() == ""


@pytest.mark.parametrize("history", [-1, 65_537])
def test_a_history_without_bounds_is_refused(history: int) -> None:
    with pytest.raises(InvalidInputError, match="history"):
        MemoryGovernor(history=history)


def test_events_are_written_as_json_lines(governor: MemoryGovernor, tmp_path: Path) -> None:
    engine = governor.child('an "engine"\n')
    reserve(engine, 5, "naïve\n", request="7").close()
    path = tmp_path / "events.jsonl"
    governor.write_events(path)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["event"] for line in lines] == ["reserve", "release"]
    assert lines[0] == vars_of(governor.events()[0])
    assert lines[0]["holder"] == "naïve\n"
    assert [file.name for file in tmp_path.iterdir()] == ["events.jsonl"]


def vars_of(event: object) -> dict[str, object]:
    return {name: getattr(event, name) for name in event.__dataclass_fields__}  # type: ignore[attr-defined]


def test_a_file_that_cannot_be_written_leaves_nothing(
    governor: MemoryGovernor, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="Is a directory"):
        governor.write_events(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_logged_with_fields(
    governor: MemoryGovernor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nxrt.memory"), pytest.raises(LeaseRefusedError) as caught:
        reserve(governor, LIMIT + 1, "x", request="7")
    (record,) = caplog.records
    assert record.getMessage() == str(caught.value)
    fields = {"level": "process", "tier": "host", "holder": "x", "request": "7", "nbytes": 1001}
    assert fields.items() <= vars(record).items()


def test_oversubscription_is_logged_with_fields(
    governor: MemoryGovernor, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "nxrt.memory"),
        governor.record_committed(HOST, LIMIT + 5, role=Role.WEIGHTS, holder="w"),
    ):
        (record,) = caplog.records
    fields = {"level": "process", "tier": "host", "used": 1005, "limit": 1000, "oversubscribed": 5}
    assert fields.items() <= vars(record).items()


def test_nothing_is_printed_where_nobody_listens() -> None:
    program = """
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, Role
governor = MemoryGovernor()
governor.record_committed(HOST, 5, role=Role.WEIGHTS, holder="w")
governor.set_limit(HOST, 1)
governor.write_off_dropped()
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
