"""Check levels: a reservation is charged at every level or at none, and levels close clean."""

from collections.abc import Iterator
from typing import Any

import pytest

from nxrt.errors import ClosedError, InvalidInputError, LeaseRefusedError, LeasesOutstandingError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, PINNED, Role, device_tier
from tests.helpers.reserving import Waiters, close_all, reserve, used

LIMIT = 1000


@pytest.fixture
def process() -> Iterator[MemoryGovernor]:
    governor = MemoryGovernor(MemoryBudget.of(host=LIMIT))
    yield governor
    assert governor.outstanding() == ()
    assert used(governor) == 0


@pytest.fixture
def engine(process: MemoryGovernor) -> MemoryGovernor:
    return process.child("engine", MemoryBudget.of(host=600))


@pytest.fixture
def request_level(engine: MemoryGovernor) -> MemoryGovernor:
    return engine.child("request 7", MemoryBudget.of(host=100))


def test_a_reservation_is_charged_at_every_level(
    process: MemoryGovernor, engine: MemoryGovernor, request_level: MemoryGovernor
) -> None:
    with reserve(request_level, 80):
        assert [used(level) for level in (process, engine, request_level)] == [80, 80, 80]
    assert [used(level) for level in (process, engine, request_level)] == [0, 0, 0]


def test_a_level_does_not_see_its_siblings(process: MemoryGovernor, engine: MemoryGovernor) -> None:
    other = process.child("other")
    with reserve(other, 500):
        assert (used(engine), used(process)) == (0, 500)


@pytest.mark.parametrize(
    ("held_at", "refusing"),
    [("request_level", "process/engine/request 7"), ("engine", "process/engine"), ("process", "")],
)
def test_a_refusal_at_any_level_changes_none(
    request: pytest.FixtureRequest, held_at: str, refusing: str, request_level: MemoryGovernor
) -> None:
    levels = {name: request.getfixturevalue(name) for name in ("process", "engine")}
    levels["request_level"] = request_level
    holding: MemoryGovernor = levels[held_at]
    limit = holding.usage(HOST).limit
    assert limit is not None
    with reserve(holding, limit - 10, "other"):
        before = [used(level) for level in levels.values()]
        with pytest.raises(LeaseRefusedError) as caught:
            reserve(request_level, 11)
        assert [used(level) for level in levels.values()] == before
    assert (caught.value.available, caught.value.limit) == (10, limit)
    assert caught.value.level == (refusing or "process")
    assert caught.value.largest_holders == (("other", limit - 10),)
    assert [level.usage(HOST).num_refused for level in levels.values()] == [1, 1, 1]


def test_exchanges_are_charged_at_every_level(
    process: MemoryGovernor, engine: MemoryGovernor
) -> None:
    lease = reserve(engine, 100)
    lease.grow(50)
    part = lease.split(30)
    part.move(PINNED)
    lease.shrink(20)
    for level in (process, engine):
        assert (used(level), used(level, PINNED)) == (100, 30)
    close_all(lease, part)
    assert [used(level, PINNED) for level in (process, engine)] == [0, 0]


def test_recorded_memory_oversubscribes_every_level(
    process: MemoryGovernor, engine: MemoryGovernor
) -> None:
    with engine.record_committed(HOST, 1005, role=Role.WEIGHTS, holder="engine"):
        found = [level.usage(HOST).oversubscribed for level in (process, engine)]
    assert found == [5, 405]


def test_a_share_is_one_of_the_limit_above() -> None:
    device = device_tier(0)
    governor = MemoryGovernor(MemoryBudget.of(device="50%"), capacities={device: 4000})
    engine = governor.child("engine", MemoryBudget.of(device="50%"))
    assert engine.usage(device).limit == 1000


def test_a_share_is_one_of_the_capacity_where_the_level_above_has_no_limit() -> None:
    device = device_tier(0)
    governor = MemoryGovernor(capacities={device: 4000})
    engine = governor.child("engine").child("inner", MemoryBudget.of(device="50%"))
    assert engine.usage(device).limit == 2000


def test_a_level_without_a_budget_is_counted(process: MemoryGovernor) -> None:
    with process.child("free") as free, reserve(free, LIMIT):
        assert (free.usage(HOST).limit, used(free)) == (None, LIMIT)


def test_holders_of_one_name_are_added_up_above(
    process: MemoryGovernor, engine: MemoryGovernor
) -> None:
    other = process.child("other")
    with reserve(engine, 100, "cache"), reserve(other, 50, "cache"), reserve(process, 5, "cache"):
        found = [level.usage(HOST).by_holder() for level in (process, engine, other)]
    assert found == [{"cache": 155}, {"cache": 100}, {"cache": 50}]


def test_closing_a_level_twice_is_harmless(process: MemoryGovernor) -> None:
    child = process.child("once")
    child.close()
    child.close()
    assert process.snapshot() == ()


def test_a_level_with_open_leases_does_not_close(engine: MemoryGovernor) -> None:
    with reserve(engine, 96, "decode", role=Role.GRAPH), reserve(engine, 5, "cache"):
        with pytest.raises(LeasesOutstandingError) as caught:
            engine.close()
        assert used(engine) == 101
    error = caught.value
    assert error.holders == (("host", "graph", "decode", 96), ("host", "workspace", "cache", 5))
    engine.close()


def test_a_lease_of_nothing_keeps_a_level_open_too(engine: MemoryGovernor) -> None:
    with reserve(engine, 0), pytest.raises(LeasesOutstandingError):
        engine.close()


def test_a_level_with_open_children_does_not_close(
    engine: MemoryGovernor, request_level: MemoryGovernor
) -> None:
    with pytest.raises(LeasesOutstandingError, match="open children: request 7"):
        engine.close()
    request_level.close()
    engine.close()


def test_a_closed_level_grants_nothing(process: MemoryGovernor) -> None:
    child = process.child("gone")
    reserve(child, 5).close()
    child.close()
    uses = (
        lambda: reserve(child, 1),
        lambda: reserve(child, 0),
        lambda: reserve(child, LIMIT + 1, timeout_s=60),
        lambda: child.record_committed(HOST, 1, role=Role.WEIGHTS, holder="x"),
        lambda: child.child("below"),
        lambda: child.set_limit(HOST, 1),
    )
    for use in uses:
        with pytest.raises(ClosedError, match="governor 'process/gone' is closed"):
            use()
    assert process.snapshot().children == ()


def test_a_name_is_free_again_once_its_level_is_closed(process: MemoryGovernor) -> None:
    process.child("name").close()
    with process.child("name") as again, reserve(again, 5):
        assert used(again) == 5


@pytest.mark.parametrize("name", ["", "engine", None, 7], ids=repr)
@pytest.mark.usefixtures("engine")
def test_a_name_that_is_none_or_taken_is_refused(process: MemoryGovernor, name: Any) -> None:
    with pytest.raises(InvalidInputError, match="name: got"):
        process.child(name)


def test_closing_a_level_ends_the_waits_in_it(
    process: MemoryGovernor, engine: MemoryGovernor
) -> None:
    with reserve(process, LIMIT), Waiters(process) as waiters:
        inside = waiters.add(5, "inside", governor=engine)
        behind = waiters.add(5, "behind")
        engine.close()
        with pytest.raises(ClosedError):
            inside.result()
        assert process.usage(HOST).num_waiting == 1
        process.set_limit(HOST, LIMIT + 5)
        behind.result().close()


def test_closed_levels_leave_nothing_behind(process: MemoryGovernor) -> None:
    for number in range(50):
        with process.child(f"request {number}") as level:
            close_all(*[reserve(level, 1, f"holder {number}.{n}") for n in range(10)])
    book = process._account.books[HOST]
    assert (len(book.holders), len(book.caps), process.snapshot().children) == (0, 0, ())
