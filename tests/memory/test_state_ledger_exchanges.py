"""Check charges that change in one exchange, and reservations that leave no trace."""

import gc
from collections.abc import Callable, Iterator

import pytest

from nxrt.errors import ClosedError, InvalidInputError, StateGroupOutOfMemoryError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.snapshot import Snapshot
from nxrt.memory.state_bytes import StateGroupBytes
from nxrt.memory.state_ledger import PendingCharge, StateGroupLedger
from nxrt.memory.tier import device_tier
from tests.helpers.reserving import used

DEVICE = device_tier(0)
KEY = (0, 0)


def scratch(nbytes: int) -> StateGroupBytes:
    return StateGroupBytes(scratch=nbytes)


def state(ledger: StateGroupLedger) -> tuple[object, ...]:
    taken = ledger.snapshot()
    return (taken.groups, taken.resident, taken.peak, taken.charged, taken.reserved)


def drop(make: Callable[[], object]) -> None:
    make()
    gc.collect()


@pytest.fixture
def governor() -> Iterator[MemoryGovernor]:
    governor = MemoryGovernor(MemoryBudget.of(device=100), history=100)
    yield governor
    assert governor.outstanding() == ()


@pytest.fixture
def ledger(governor: MemoryGovernor) -> StateGroupLedger:
    return StateGroupLedger(governor)


@pytest.mark.parametrize("nbytes", [0, 39, 40, 41, 100])
def test_an_exchange_moves_the_difference_only(
    governor: MemoryGovernor, ledger: StateGroupLedger, nbytes: int
) -> None:
    with ledger.try_charge(KEY, scratch(40)) as charge:
        wanted = StateGroupBytes(index=nbytes)
        charge.exchange(wanted)
        assert (charge.bytes, charge.total, charge.lease_nbytes) == (wanted, nbytes, nbytes)
        assert (ledger.resident, used(governor, DEVICE)) == (nbytes, nbytes)
        assert ledger.by_class()["scratch"] == 0
        assert ledger.peak == max(40, nbytes)
    moved = [(e.event, e.nbytes) for e in governor.events()[1:-1]]
    change = [("grow" if nbytes > 40 else "shrink", abs(nbytes - 40))]
    assert moved == (change if nbytes != 40 else [])


def test_a_refused_exchange_changes_nothing(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    with ledger.try_charge(KEY, scratch(40)) as charge:
        before = state(ledger)
        with pytest.raises(StateGroupOutOfMemoryError) as caught:
            charge.exchange(StateGroupBytes(index=101))
        assert (state(ledger), charge.bytes, ledger.charge_failures) == (before, scratch(40), 1)
    assert (caught.value.requested, caught.value.resident, caught.value.limit) == (61, 40, 100)


def test_a_closed_charge_is_exchanged_no_more(ledger: StateGroupLedger) -> None:
    charge = ledger.try_charge(KEY, scratch(40))
    charge.close()
    for nbytes in (1, 40, 90):
        with pytest.raises(ClosedError):
            charge.exchange(scratch(nbytes))
    assert (ledger.resident, ledger.charge_failures) == (0, 0)


@pytest.mark.parametrize("makes_room", ["close", "shrink", "grow"])
def test_a_charge_that_changes_while_it_grows_ends_whole(
    governor: MemoryGovernor, ledger: StateGroupLedger, makes_room: str
) -> None:
    charge = ledger.try_charge(KEY, scratch(40))
    other = ledger.try_charge((1, 0), scratch(55))
    acted: list[int] = []

    def act(_: int) -> None:
        if makes_room == "close":
            charge.close()
        else:
            other.close()
            charge.exchange(scratch(10 if makes_room == "shrink" else 60))
        acted.append(ledger.snapshot().resident)

    governor.register_reclaimer(DEVICE, act, name="itself")
    if makes_room == "close":
        with pytest.raises(ClosedError, match="charge of request 0 on device:0"):
            charge.exchange(scratch(70))
        assert (ledger.resident, used(governor, DEVICE)) == (55, 55)
    else:
        charge.exchange(scratch(70))
        assert (ledger.resident, used(governor, DEVICE)) == (70, 70)
    assert acted == [{"close": 55, "shrink": 10, "grow": 60}[makes_room]]
    charge.close()
    other.close()


def test_exchanges_inside_each_other_keep_nothing_too_much(
    ledger: StateGroupLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge = ledger.try_charge(KEY, scratch(10))
    inner = [15, 20]
    real, seen = MemoryLease.grow, []

    def grow(lease: MemoryLease, nbytes: int) -> None:
        if inner:
            wanted = inner.pop()
            charge.exchange(scratch(wanted))
            seen.append((wanted, charge.total, charge.lease_nbytes))
        real(lease, nbytes)

    monkeypatch.setattr(MemoryLease, "grow", grow)
    charge.exchange(scratch(40))
    assert seen == [(15, 15, 15), (20, 20, 20)]
    assert (charge.total, charge.lease_nbytes) == (40, 40)
    charge.close()


def test_an_interrupted_commit_leaves_no_trace(
    governor: MemoryGovernor, ledger: StateGroupLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: PendingCharge) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PendingCharge, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.try_charge(KEY, scratch(40))
    assert (ledger.snapshot().reserved, used(governor, DEVICE)) == (0, 0)


def test_a_snapshot_begins_again_where_a_charge_was_closed_meanwhile(
    governor: MemoryGovernor, ledger: StateGroupLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    charge = ledger.try_charge(KEY, scratch(40))
    real = governor.snapshot

    def close_first() -> Snapshot:
        charge.close()
        return real()

    monkeypatch.setattr(governor, "snapshot", close_first)
    taken = ledger.snapshot()
    assert (taken.resident, taken.charged, taken.groups) == (0, 0, ())


@pytest.mark.parametrize("nbytes", [10, 90])
@pytest.mark.parametrize("comes", ["before", "after"])
def test_an_interrupted_exchange_is_done_or_not_done(
    governor: MemoryGovernor,
    ledger: StateGroupLedger,
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int,
    comes: str,
) -> None:
    def interrupted(change: Callable[[MemoryLease, int], None]) -> Callable[..., None]:
        def act(lease: MemoryLease, nbytes: int) -> None:
            monkeypatch.undo()
            if comes == "after":
                change(lease, nbytes)
            raise KeyboardInterrupt

        return act

    with ledger.try_charge(KEY, scratch(40)) as charge:
        name = "grow" if nbytes > 40 else "shrink"
        monkeypatch.setattr(MemoryLease, name, interrupted(getattr(MemoryLease, name)))
        with pytest.raises(KeyboardInterrupt):
            charge.exchange(scratch(nbytes))
        assert charge.total in {40, nbytes}
        assert ledger.resident == charge.total == charge.lease_nbytes == used(governor, DEVICE)


def test_a_reservation_is_charged_and_not_attributed(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    with ledger.reserve(KEY, scratch(40)) as pending:
        taken = ledger.snapshot()
        assert (taken.resident, taken.reserved, taken.charged, taken.groups) == (0, 40, 40, ())
        assert (ledger.peak, ledger.active_group_count, ledger.resident_for(*KEY)) == (0, 0, 0)
        charge = pending.commit()
        assert pending.is_closed
    assert (ledger.resident, ledger.snapshot().reserved, used(governor, DEVICE)) == (40, 0, 40)
    charge.close()
    pending.close()
    assert [e.event for e in governor.events()] == ["reserve", "release"]


@pytest.mark.parametrize("end", ["roll_back", "close"])
def test_what_was_rolled_back_cannot_be_committed(ledger: StateGroupLedger, end: str) -> None:
    pending = ledger.reserve(KEY, scratch(40))
    for _ in range(2):
        getattr(pending, end)()
    with pytest.raises(ClosedError):
        pending.commit()
    assert (ledger.resident, ledger.snapshot().charged) == (0, 0)


def test_a_reservation_is_committed_once(ledger: StateGroupLedger) -> None:
    pending = ledger.reserve(KEY, scratch(40))
    with pending.commit():
        with pytest.raises(ClosedError):
            pending.commit()
        pending.roll_back()
        assert ledger.resident == 40


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt, GeneratorExit])
def test_a_step_that_is_aborted_leaves_no_trace(
    governor: MemoryGovernor, ledger: StateGroupLedger, error: type[BaseException]
) -> None:
    fresh = StateGroupLedger(governor)
    with pytest.raises(error), ledger.reserve(KEY, scratch(40)):
        raise error
    assert state(ledger) == state(fresh)
    assert (ledger.charge_failures, ledger.by_class()) == (0, fresh.by_class())
    assert used(governor, DEVICE) == 0


@pytest.mark.parametrize("is_aborted", [False, True], ids=["ended", "aborted"])
def test_the_next_sequence_in_a_slot_starts_at_0(
    ledger: StateGroupLedger, is_aborted: bool
) -> None:
    former = ledger.try_charge(KEY, StateGroupBytes(compressed=50, carry=10, dense_ring=20))
    try:
        with former, ledger.reserve(KEY, scratch(15)):
            former.exchange(StateGroupBytes(compressed=60, carry=10))
            if is_aborted:
                raise ValueError("in the middle of a step")
    except ValueError:
        assert is_aborted
    assert (ledger.resident_for(*KEY), ledger.active_group_count) == (0, 0)
    wanted = StateGroupBytes(compressed=3, carry=10, dense_ring=87)
    with ledger.try_charge(KEY, wanted):  # all there is: nothing of the former is left
        (group,) = ledger.snapshot().groups
        assert (group.bytes, group.num_charges, group.charged) == (wanted, 1, 100)


def test_a_dropped_reservation_is_rolled_back_when_the_ledger_closes(
    governor: MemoryGovernor,
) -> None:
    with StateGroupLedger(governor) as ledger:
        kept, charge = ledger.reserve(KEY, scratch(10)), ledger.try_charge(KEY, scratch(20))
        with pytest.warns(ResourceWarning, match="PendingCharge 40 B request 0 device:0 open"):
            drop(lambda: ledger.reserve(KEY, scratch(40)))
        assert ledger.snapshot().reserved == 50
    ledger.close()
    assert (ledger.snapshot().reserved, ledger.resident) == (10, 20)
    for refused in (kept.commit, lambda: ledger.try_charge(KEY, scratch(1))):
        with pytest.raises(ClosedError, match="state ledger"):
            refused()
    kept.close()
    charge.close()


def test_a_dropped_charge_stays_until_it_is_written_off(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    with pytest.warns(ResourceWarning, match="StateGroupCharge 40 B"):
        drop(lambda: ledger.try_charge(KEY, scratch(40)))
    ledger.close()
    assert governor.write_off_dropped() == 0
    assert (ledger.resident, used(governor, DEVICE)) == (40, 40)
    assert (ledger.write_off_dropped(), ledger.write_off_dropped()) == (40, 0)
    assert (ledger.resident, used(governor, DEVICE)) == (0, 0)


def test_only_closing_is_allowed_in_the_middle_of_another_call(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    charges = [ledger.try_charge(KEY, scratch(0)) for _ in range(500)]
    charges.append(ledger.try_charge(KEY, scratch(40)))

    def handler() -> None:
        for charge in charges:
            charge.close()
        for use in (ledger.snapshot, lambda: ledger.try_charge(KEY, scratch(1))):
            with pytest.raises(InvalidInputError, match="finaliser or signal handler"):
                use()

    ledger._books._exclusively(handler)
    assert (ledger.resident, ledger.active_group_count, used(governor, DEVICE)) == (0, 0, 0)


def test_an_exchange_in_the_middle_of_a_call_of_the_governor_changes_nothing(
    governor: MemoryGovernor, ledger: StateGroupLedger
) -> None:
    with ledger.try_charge(KEY, scratch(40)) as charge:
        with governor._ledger.lock:
            governor._ledger.is_busy = True
            for nbytes in (10, 90):
                with pytest.raises(InvalidInputError):
                    charge.exchange(scratch(nbytes))
            governor._ledger.is_busy = False
        assert ledger.resident == charge.total == charge.lease_nbytes == 40
