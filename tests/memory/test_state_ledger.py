"""Check the ledger of state groups: it follows the governor, and every figure has an owner."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from nxrt.errors import (
    ClosedError,
    InvalidInputError,
    LeaseRefusedError,
    SizeOverflowError,
    StateGroupOutOfMemoryError,
)
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.state_bytes import StateGroupBytes
from nxrt.memory.state_ledger import StateGroupLedger, StateLedgerSnapshot
from nxrt.memory.tier import Role, device_tier
from nxrt.tensor import MAX_SIZE
from tests.helpers.reserving import reserve, used

DEVICE = device_tier(0)
SPLIT = StateGroupBytes(compressed=100, carry=30, dense_ring=20, index=10, index_carry=5, scratch=3)


def scratch(nbytes: int) -> StateGroupBytes:
    return StateGroupBytes(scratch=nbytes)


def governed(limit: object = None, **others: Any) -> MemoryGovernor:
    limits = {} if limit is None else {"device": limit}
    return MemoryGovernor(MemoryBudget.of(**limits), **others)


def state(ledger: StateGroupLedger) -> tuple[object, ...]:
    """Return all that a refusal must leave as it is."""
    taken = ledger.snapshot()
    return (taken.groups, taken.resident, taken.peak, taken.charged, taken.reserved)


@pytest.fixture
def governor() -> Iterator[MemoryGovernor]:
    governor = governed(150, history=100)
    yield governor
    assert governor.outstanding() == ()


@pytest.fixture
def ledger(governor: MemoryGovernor) -> StateGroupLedger:
    return StateGroupLedger(governor)


def test_a_charge_is_split_by_class_and_leaves_only_the_peak() -> None:
    governor = governed(4096)
    ledger = StateGroupLedger(governor)
    with ledger.try_charge((7, 0), SPLIT) as charge:
        assert (charge.total, charge.lease_nbytes, charge.bytes) == (168, 168, SPLIT)
        assert (ledger.resident, ledger.by_class()) == (168, SPLIT.by_class())
        assert ledger.snapshot().by_class() == SPLIT.by_class()
        assert used(governor, DEVICE) == 168
    assert (ledger.resident, ledger.peak, used(governor, DEVICE)) == (0, 168, 0)
    assert set(ledger.by_class().values()) == {0}


def test_the_peak_never_falls(ledger: StateGroupLedger) -> None:
    ledger.try_charge((0, 0), scratch(90)).close()
    ledger.try_charge((0, 0), scratch(40)).close()
    assert ledger.peak == 90


def test_the_governor_knows_the_role_the_holder_and_the_request(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    with ledger.try_charge((7, 0), scratch(40)):
        usage = governor.usage(DEVICE)
        assert usage.by_role() == {Role.STATE_GROUP: 40}
        assert usage.by_holder() == {f"{ledger.name}/7": 40}
        assert usage.by_request() == {"7": 40}


def test_a_refusal_counts_and_moves_nothing_else(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    with ledger.try_charge((1, 0), scratch(100)):
        before = state(ledger)
        with pytest.raises(StateGroupOutOfMemoryError) as caught:
            ledger.try_charge((2, 0), scratch(100))
        assert (state(ledger), ledger.charge_failures) == (before, 1)
        assert (ledger.resident, ledger.resident_for(2, 0)) == (100, 0)
        assert used(governor, DEVICE) == 100
    error, cause = caught.value, caught.value.__cause__
    assert (error.request, error.device, error.requested) == (2, 0, 100)
    assert (error.resident, error.limit) == (100, 150)
    assert isinstance(cause, LeaseRefusedError)
    assert (cause.available, cause.level) == (50, "process")


def test_a_refusal_counts_what_everybody_holds(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    with reserve(governor, 60, tier=DEVICE), pytest.raises(StateGroupOutOfMemoryError) as caught:
        ledger.try_charge((2, 0), scratch(91))
    assert (caught.value.resident, caught.value.limit) == (60, 150)


def test_a_refusal_under_a_lowered_limit_tells_the_whole_use(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    with ledger.try_charge((1, 0), scratch(100)):
        governor.set_limit(DEVICE, 50)
        with pytest.raises(StateGroupOutOfMemoryError) as caught:
            ledger.try_charge((2, 0), scratch(1))
    assert (caught.value.resident, caught.value.limit) == (100, 50)


def test_one_byte_too_few_leaves_no_group() -> None:
    governor = governed(SPLIT.total - 1)
    ledger = StateGroupLedger(governor)
    with pytest.raises(StateGroupOutOfMemoryError):
        ledger.try_charge((0, 0), SPLIT)
    assert (ledger.resident, ledger.active_group_count, ledger.charge_failures) == (0, 0, 1)
    assert used(governor, DEVICE) == 0


def test_requests_and_devices_are_apart(ledger: StateGroupLedger) -> None:
    sizes = {(1, 0): 100, (2, 0): 50, (1, 1): 25}
    charges = {key: ledger.try_charge(key, scratch(nbytes)) for key, nbytes in sizes.items()}
    assert ledger.active_group_count == 3
    for key in list(sizes):
        assert {other: ledger.resident_for(*other) for other in sizes} == sizes
        groups = {(g.request, g.device): g.charged for g in ledger.snapshot().groups}
        assert groups == {other: nbytes for other, nbytes in sizes.items() if nbytes}
        charges[key].close()
        sizes[key] = 0
    assert (ledger.resident, ledger.peak, ledger.active_group_count) == (0, 175, 0)


def test_charges_of_one_key_add_up(ledger: StateGroupLedger) -> None:
    first, second = (ledger.try_charge((1, 0), scratch(n)) for n in (30, 40))
    (group,) = ledger.snapshot().groups
    assert (group.bytes, group.num_charges, group.charged) == (scratch(70), 2, 70)
    assert (ledger.resident_for(1, 0), ledger.active_group_count) == (70, 1)
    first.close()
    assert (ledger.resident_for(1, 0), ledger.active_group_count) == (40, 1)
    second.close()


def test_a_charge_of_nothing_is_a_group(governor: MemoryGovernor) -> None:
    governor.set_limit(DEVICE, 0)
    ledger = StateGroupLedger(governor)
    with ledger.try_charge((1, 0), StateGroupBytes()):
        assert (ledger.active_group_count, ledger.resident, ledger.charge_failures) == (1, 0, 0)
        with ledger.try_charge((1, 0), StateGroupBytes()):
            assert ledger.active_group_count == 1
    assert ledger.active_group_count == 0


def test_request_numbers_increase_from_0(ledger: StateGroupLedger) -> None:
    assert [ledger.next_request_id() for _ in range(3)] == [0, 1, 2]
    ledger.try_charge((2, 0), scratch(1)).close()
    assert ledger.next_request_id() == 3


def test_without_a_limit_everything_is_admitted_and_counted() -> None:
    ledger = StateGroupLedger(governed())
    assert ledger.device_available(0) == MAX_SIZE
    with ledger.try_charge((0, 0), scratch(2**62)):
        assert (ledger.device_used(0), ledger.charge_failures) == (2**62, 0)


def test_two_devices_may_hold_more_together_than_a_size_can_say() -> None:
    ledger = StateGroupLedger(governed())
    with ledger.try_charge((0, 0), scratch(MAX_SIZE)), ledger.try_charge((0, 1), scratch(9)):
        assert ledger.resident == ledger.by_class()["scratch"] == MAX_SIZE + 9
        assert ledger.snapshot().charged == MAX_SIZE + 9


def test_what_is_available_is_what_the_governor_has_left() -> None:
    ledger = StateGroupLedger(governed(4096))
    with ledger.try_charge((0, 0), scratch(1000)):
        assert (ledger.device_available(0), ledger.device_used(0)) == (3096, 1000)
        assert ledger.device_available(1) == 4096


def test_another_holder_of_the_governor_is_no_part_of_the_ledger() -> None:
    governor = governed(8192)
    ledger = StateGroupLedger(governor)
    with reserve(governor, 4096, tier=DEVICE, role=Role.STATE_GROUP):
        with ledger.try_charge((0, 0), SPLIT):
            assert used(governor, DEVICE) == 4096 + 168
            assert (ledger.resident, ledger.snapshot().charged) == (168, 168)
        assert used(governor, DEVICE) == 4096


def test_two_ledgers_of_one_governor_are_apart(governor: MemoryGovernor) -> None:
    one, two = StateGroupLedger(governor), StateGroupLedger(governor)
    with one.try_charge((0, 0), scratch(30)), two.try_charge((0, 0), scratch(40)):
        assert (one.snapshot().charged, two.snapshot().charged) == (30, 40)
        assert one.device_used(0) == 70


def test_a_charge_is_one_reservation_and_one_release(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    charge = ledger.try_charge((0, 0), SPLIT.workspace_only([5, 6]))
    for _ in range(3):
        charge.close()
    assert [(e.event, e.nbytes) for e in governor.events()] == [("reserve", 11), ("release", 11)]
    assert charge.is_closed
    assert (charge.total, charge.lease_nbytes, ledger.resident) == (11, 11, 0)


def test_a_ledger_of_a_child_is_charged_above_too() -> None:
    governor = governed(100)
    with governor.child("engine", MemoryBudget.of(device=80)) as engine:
        ledger = StateGroupLedger(engine)
        with ledger.try_charge((1, 0), scratch(60)):
            assert (used(governor, DEVICE), used(engine, DEVICE)) == (60, 60)
            assert ledger.snapshot().charged == 60
            with pytest.raises(StateGroupOutOfMemoryError) as caught:
                ledger.try_charge((2, 0), scratch(30))
            assert (caught.value.resident, caught.value.limit) == (60, 80)
            with reserve(governor, 30, tier=DEVICE), pytest.raises(MemoryError) as above:
                ledger.try_charge((2, 0), scratch(15))
            assert isinstance(above.value, StateGroupOutOfMemoryError)
            assert (above.value.resident, above.value.limit) == (90, 100)
    assert used(governor, DEVICE) == 0


@pytest.mark.parametrize("key", [(-1, 0), (0, -1), (0.5, 0), ("a", 0), (True, 0), (0,), 7])
def test_what_is_no_key_is_refused_before_anything_is_asked(
    governor: MemoryGovernor, ledger: StateGroupLedger, key: Any
) -> None:
    with pytest.raises(InvalidInputError):
        ledger.try_charge(key, scratch(1))
    assert (governor.events(), ledger.charge_failures) == ((), 0)


def test_a_sum_past_63_bits_is_refused_before_anything_is_asked(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    with pytest.raises(SizeOverflowError):
        ledger.try_charge((0, 0), StateGroupBytes(compressed=MAX_SIZE, carry=1))
    with ledger.try_charge((0, 0), scratch(1)) as charge, pytest.raises(SizeOverflowError):
        charge.exchange(StateGroupBytes(compressed=MAX_SIZE, carry=1))
    assert len(governor.events()) == 2
    assert ledger.charge_failures == 0


def test_a_snapshot_stays_as_it_was(ledger: StateGroupLedger) -> None:
    charge = ledger.try_charge((1, 0), scratch(40))
    taken = ledger.snapshot()
    charge.close()
    assert (taken.resident, taken.charged, taken.groups[0].bytes) == (40, 40, scratch(40))
    usage = taken.governor.tier(DEVICE)
    assert usage is not None
    assert usage.used == 40
    for report in (taken, taken.groups[0]):
        with pytest.raises(FrozenInstanceError):
            report.charged = 0  # type: ignore[misc]
    assert isinstance(taken, StateLedgerSnapshot)


def test_a_closed_governor_is_no_refusal(governor: MemoryGovernor) -> None:
    engine = governor.child("engine")
    ledger = StateGroupLedger(engine)
    engine.close()
    with pytest.raises(ClosedError):
        ledger.try_charge((0, 0), scratch(1))
    assert ledger.charge_failures == 0


def test_a_group_makes_room_for_another_when_asked(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    idle = ledger.try_charge((1, 0), scratch(100))
    governor.register_reclaimer(DEVICE, lambda _: idle.close(), name="idle groups")
    with ledger.try_charge((2, 0), scratch(100)):
        assert (ledger.resident_for(1, 0), ledger.resident_for(2, 0)) == (0, 100)
