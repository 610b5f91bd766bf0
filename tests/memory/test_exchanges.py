"""Check grow, shrink, split and move: one exchange each, and no trace where it is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nxrt.errors import (
    BudgetError,
    ClosedError,
    InvalidInputError,
    LeaseRefusedError,
    SizeOverflowError,
)
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor, TierUsage
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, PINNED, Role, Tier, device_tier
from nxrt.tensor import MAX_SIZE
from tests.helpers.reserving import close_all, reserve, used

LIMIT = 1000
DEVICE = device_tier(0)


@pytest.fixture
def governor() -> Iterator[MemoryGovernor]:
    governor = MemoryGovernor(MemoryBudget.of(host=LIMIT, pinned=100))
    yield governor
    assert governor.outstanding() == ()
    assert [usage.used for usage in governor.snapshot() if usage.used or usage.holders] == []


def counts(usage: TierUsage) -> tuple[object, ...]:
    """Return everything but the refusals."""
    return (usage.used, usage.peak, usage.holders, usage.requests, usage.committed)


def test_growing_charges_the_difference(governor: MemoryGovernor) -> None:
    with reserve(governor, 300) as lease:
        lease.grow(700)
        assert (lease.nbytes, used(governor)) == (1000, 1000)


def test_growing_past_the_limit_changes_nothing(governor: MemoryGovernor) -> None:
    with reserve(governor, 300) as lease:
        before = counts(governor.usage(HOST))
        with pytest.raises(LeaseRefusedError) as caught:
            lease.grow(701)
        assert (lease.nbytes, counts(governor.usage(HOST))) == (300, before)
    assert (caught.value.requested, caught.value.available) == (701, 700)


def test_a_lease_of_nothing_can_grow(governor: MemoryGovernor) -> None:
    with reserve(governor, 0) as lease:
        lease.grow(5)
        assert governor.usage(HOST).by_holder() == {"test": 5}


def test_shrinking_gives_the_difference_back(governor: MemoryGovernor) -> None:
    with reserve(governor, 300) as lease:
        lease.shrink(299)
        assert (lease.nbytes, used(governor)) == (1, 1)


def test_splitting_moves_bytes_into_a_lease_of_the_same_labels(governor: MemoryGovernor) -> None:
    lease = reserve(governor, 300, role=Role.KV_CACHE, request="7")
    part = lease.split(100)
    assert (lease.nbytes, part.nbytes, used(governor)) == (200, 100, 300)
    assert (part.tier, part.role, part.holder, part.request) == (HOST, Role.KV_CACHE, "test", "7")
    lease.close()
    assert used(governor) == 100
    part.close()


def test_splitting_a_full_tier_needs_no_room(governor: MemoryGovernor) -> None:
    with reserve(governor, LIMIT) as lease, lease.split(LIMIT) as part:
        assert (lease.nbytes, part.nbytes, governor.usage(HOST).peak) == (0, LIMIT, LIMIT)


def test_moving_charges_the_other_tier_instead(governor: MemoryGovernor) -> None:
    with reserve(governor, 60) as lease:
        lease.move(PINNED)
        assert (lease.tier, lease.nbytes) == (PINNED, 60)
        assert (used(governor), used(governor, PINNED)) == (0, 60)


def test_moving_to_a_tier_that_is_full_changes_nothing(governor: MemoryGovernor) -> None:
    with reserve(governor, 101) as lease:
        before = counts(governor.usage(HOST))
        with pytest.raises(LeaseRefusedError, match="on pinned"):
            lease.move(PINNED)
        assert (lease.tier, counts(governor.usage(HOST))) == (HOST, before)
        assert used(governor, PINNED) == 0


def test_moving_to_the_same_tier_needs_no_room(governor: MemoryGovernor) -> None:
    with reserve(governor, LIMIT) as lease:
        lease.move(HOST)
        assert used(governor) == LIMIT


def test_moving_to_a_tier_whose_limit_is_not_known_changes_nothing() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device="50%"))
    with reserve(governor, 5) as lease:
        with pytest.raises(BudgetError):
            lease.move(DEVICE)
        assert [usage.tier for usage in governor.snapshot()] == [HOST]


@pytest.mark.parametrize("tier", ["host", None, [HOST]], ids=repr)
def test_moving_to_what_is_no_tier_changes_nothing(governor: MemoryGovernor, tier: Any) -> None:
    with reserve(governor, 5) as lease:
        with pytest.raises(InvalidInputError, match="tier: got"):
            lease.move(tier)
        assert lease.tier == HOST


CHANGES: dict[str, Callable[[MemoryLease, Any], object]] = {
    "grow": MemoryLease.grow,
    "shrink": MemoryLease.shrink,
    "split": MemoryLease.split,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("nbytes", [-1, True, 1.5, None, "8"], ids=repr)
def test_what_is_no_size_changes_nothing(
    governor: MemoryGovernor, change: Callable[[MemoryLease, Any], object], nbytes: Any
) -> None:
    with reserve(governor, 50) as lease:
        with pytest.raises(InvalidInputError, match="nbytes"):
            change(lease, nbytes)
        assert (lease.nbytes, used(governor)) == (50, 50)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_size_past_63_bits_changes_nothing(
    governor: MemoryGovernor, change: Callable[[MemoryLease, Any], object]
) -> None:
    with reserve(governor, 50) as lease:
        with pytest.raises(SizeOverflowError):
            change(lease, 2**63)
        assert lease.nbytes == 50


@pytest.mark.parametrize("change", [MemoryLease.shrink, MemoryLease.split])
def test_more_than_a_lease_holds_cannot_be_taken_from_it(
    governor: MemoryGovernor, change: Callable[[MemoryLease, int], object]
) -> None:
    with reserve(governor, 50) as lease:
        with pytest.raises(InvalidInputError, match="up to 50, what the lease holds"):
            change(lease, 51)
        assert (lease.nbytes, used(governor)) == (50, 50)


USES: dict[str, Callable[[MemoryLease], object]] = {
    "grow": lambda lease: lease.grow(1),
    "shrink": lambda lease: lease.shrink(1),
    "split": lambda lease: lease.split(1),
    "move": lambda lease: lease.move(PINNED),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_closed_lease_cannot_be_used(
    governor: MemoryGovernor, use: Callable[[MemoryLease], object]
) -> None:
    lease = reserve(governor, 50)
    lease.close()
    with pytest.raises(ClosedError, match="lease is closed"):
        use(lease)
    assert used(governor) == 0


def test_closing_after_changes_gives_back_what_is_held_by_then(governor: MemoryGovernor) -> None:
    lease = reserve(governor, 50)
    lease.grow(10)
    lease.move(PINNED)
    lease.shrink(20)
    part = lease.split(15)
    close_all(lease, lease, part, part)
    assert (lease.nbytes, lease.tier, part.nbytes) == (25, PINNED, 15)


def committed(governor: MemoryGovernor, nbytes: Any, tier: Tier = HOST) -> MemoryLease:
    return governor.record_committed(tier, nbytes, role=Role.WEIGHTS, holder="engine")


def test_memory_that_is_held_already_is_recorded_above_the_limit(
    governor: MemoryGovernor,
) -> None:
    with committed(governor, LIMIT + 5):
        usage = governor.usage(HOST)
        assert (usage.used, usage.committed, usage.oversubscribed) == (1005, 1005, 5)
        assert usage.available == 0
        with pytest.raises(LeaseRefusedError) as caught:
            reserve(governor, 1)
    assert (caught.value.available, caught.value.limit) == (0, LIMIT)


def test_nothing_is_granted_even_above_the_limit(governor: MemoryGovernor) -> None:
    with committed(governor, LIMIT + 5), reserve(governor, 0):
        assert governor.usage(HOST).oversubscribed == 5


def test_recorded_memory_leaves_the_rest_to_reserve(governor: MemoryGovernor) -> None:
    with committed(governor, 400), reserve(governor, 600):
        usage = governor.usage(HOST)
        assert (usage.used, usage.committed) == (1000, 400)


def test_recorded_memory_grows_splits_and_moves_above_the_limit(governor: MemoryGovernor) -> None:
    with committed(governor, 900) as lease:
        lease.grow(200)
        with lease.split(50) as part:
            lease.move(PINNED)
            assert (part.is_committed, governor.usage(HOST).committed) == (True, 50)
            assert governor.usage(PINNED).oversubscribed == 1050 - 100


def test_recording_past_63_bits_in_all_is_refused(governor: MemoryGovernor) -> None:
    with committed(governor, MAX_SIZE) as lease:
        with pytest.raises(SizeOverflowError, match="in use"):
            committed(governor, 1)
        with pytest.raises(SizeOverflowError, match="in use"):
            lease.grow(1)
        assert used(governor) == MAX_SIZE
