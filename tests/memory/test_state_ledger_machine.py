"""Check ledger and governor against a simple model: any sequence of calls, and failures between.

NXRT_LONG_TESTS=1 runs 200 sequences of 60 steps.
"""

import logging
import os
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nxrt.errors import ClosedError, StateGroupOutOfMemoryError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.state_bytes import StateGroupBytes
from nxrt.memory.state_ledger import PendingCharge, StateGroupCharge, StateGroupLedger
from nxrt.memory.tier import Role, device_tier

IS_LONG = os.environ.get("NXRT_LONG_TESTS") == "1"
LEVELS = {"process": 1000, "engine": 600}
Handle = StateGroupCharge | PendingCharge

levels = st.sampled_from(list(LEVELS))
devices = st.integers(0, 1)
keys = st.tuples(st.integers(0, 2), devices)
amounts = st.integers(0, 120) | st.sampled_from([0, 1, 600])
sizes = st.builds(
    StateGroupBytes, compressed=amounts, carry=amounts, index=amounts, scratch=amounts
)


@dataclass(frozen=True)
class Held:
    """What the model knows of a charge, of a reservation, or of what somebody else holds."""

    level: str
    device: int
    nbytes: int
    request: int = -1
    bytes: StateGroupBytes | None = None
    is_committed: bool = False


class StateLedgerMachine(RuleBasedStateMachine):
    """Drive a ledger at each of two levels beside a list of what is held."""

    handles: Bundle[Handle] = Bundle("handles")
    foreign: Bundle[MemoryLease] = Bundle("foreign")

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[Handle | MemoryLease, Held] = {}
        self.limits: dict[tuple[str, int], int] = {}
        self.num_failures: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.reclaimable: list[Handle] = []

    @initialize()
    def build(self) -> None:
        process = MemoryGovernor(MemoryBudget.of(device=LEVELS["process"]))
        engine = process.child("engine", MemoryBudget.of(device=LEVELS["engine"]))
        self.levels = {"process": process, "engine": engine}
        self.ledgers = {name: StateGroupLedger(level) for name, level in self.levels.items()}
        self.limits = {(name, device): LEVELS[name] for name in LEVELS for device in range(2)}
        for device in range(2):
            process.register_reclaimer(device_tier(device), self.give_back, name=f"{device}")

    def give_back(self, _nbytes: int) -> None:
        if not self.reclaimable:
            raise ValueError("nothing left")
        self.forget(self.reclaimable[-1])

    def forget(self, handle: Handle | MemoryLease) -> None:
        handle.close()
        self.open.pop(handle, None)
        self.reclaimable = [other for other in self.reclaimable if other is not handle]

    def used(self, level: str, device: int) -> int:
        below = ("process", "engine") if level == "process" else ("engine",)
        held = [h for h in self.open.values() if h.level in below and h.device == device]
        return sum(h.nbytes for h in held)

    def fits(self, level: str, device: int, nbytes: int) -> bool:
        above = ("process",) if level == "process" else ("process", "engine")
        free = min(self.limits[name, device] - self.used(name, device) for name in above)
        return nbytes == 0 or nbytes <= free

    def check(
        self, error: StateGroupOutOfMemoryError, level: str, key: tuple[int, int], nbytes: int
    ) -> None:
        figures = (error.request, error.device, error.requested)
        assert figures == (*key, nbytes)
        limits = {self.limits["process", key[1]], self.limits[level, key[1]]}
        assert error.limit in limits
        assert nbytes > error.limit - error.resident

    def note(self, handle: Handle, held: Held) -> None:
        self.open[handle] = held
        live = [h.nbytes for h in self.open.values() if h.is_committed and h.level == held.level]
        self.peaks[held.level] = max(self.peaks[held.level], sum(live))

    @rule(
        target=handles,
        level=levels,
        key=keys,
        wanted=sizes,
        two_phases=st.booleans(),
        is_reclaimable=st.booleans(),
    )
    def take(
        self,
        level: str,
        key: tuple[int, int],
        wanted: StateGroupBytes,
        two_phases: bool,
        is_reclaimable: bool,
    ) -> Handle:
        ledger = self.ledgers[level]
        held = Held(level, key[1], wanted.total, key[0], wanted, not two_phases)
        handle: Handle
        try:
            handle = (ledger.reserve if two_phases else ledger.try_charge)(key, wanted)
        except StateGroupOutOfMemoryError as error:
            self.check(error, level, key, wanted.total)
            assert not self.fits(level, key[1], wanted.total)
            self.num_failures[level] += 1
            handle = ledger.try_charge(key, StateGroupBytes())
            held = replace(held, nbytes=0, bytes=StateGroupBytes(), is_committed=True)
        assert self.fits(level, key[1], held.nbytes)
        self.note(handle, held)
        if is_reclaimable:
            self.reclaimable.append(handle)
        return handle

    @rule(target=handles, handle=handles)
    def commit(self, handle: Handle) -> Handle:
        if isinstance(handle, StateGroupCharge):
            return handle
        held = self.open.pop(handle, None)
        if held is None:
            with pytest.raises(ClosedError):
                handle.commit()
            return handle
        self.reclaimable = [other for other in self.reclaimable if other is not handle]
        charge = handle.commit()
        self.note(charge, replace(held, is_committed=True))
        return charge

    @rule(handle=handles, wanted=sizes)
    def exchange(self, handle: Handle, wanted: StateGroupBytes) -> None:
        held = self.open.get(handle)
        if held is None or isinstance(handle, PendingCharge):
            return
        growth = wanted.total - held.nbytes
        try:
            handle.exchange(wanted)
        except StateGroupOutOfMemoryError as error:
            self.check(error, held.level, (held.request, held.device), growth)
            assert not self.fits(held.level, held.device, growth)
            self.num_failures[held.level] += 1
        except ClosedError:
            assert handle not in self.open  # it was given back to make room for itself
        else:
            assert self.fits(held.level, held.device, max(0, growth))
            self.note(handle, replace(held, nbytes=wanted.total, bytes=wanted))

    @rule(handle=handles)
    def close(self, handle: Handle) -> None:
        self.forget(handle)

    @rule(level=levels, key=keys, wanted=sizes, is_charged=st.booleans())
    def abort_a_step(
        self, level: str, key: tuple[int, int], wanted: StateGroupBytes, is_charged: bool
    ) -> None:
        try:
            with self.ledgers[level].reserve(key, wanted) as pending:
                if is_charged:
                    with pending.commit() as charge:
                        self.note(charge, Held(level, key[1], wanted.total, is_committed=True))
                        del self.open[charge]
                        raise ValueError("after the commit")
                raise ValueError("before the commit")
        except ValueError:
            pass
        except StateGroupOutOfMemoryError:
            self.num_failures[level] += 1

    @rule(target=foreign, level=levels, device=devices, nbytes=st.integers(0, 700))
    def hold_elsewhere(self, level: str, device: int, nbytes: int) -> MemoryLease:
        lease = self.levels[level].record_committed(
            device_tier(device), nbytes, role=Role.STATE_GROUP, holder="weights"
        )
        self.open[lease] = Held(level, device, nbytes)
        return lease

    @rule(lease=foreign)
    def release_elsewhere(self, lease: MemoryLease) -> None:
        self.forget(lease)

    @rule(level=levels, device=devices, limit=st.integers(0, 1200))
    def set_limit(self, level: str, device: int, limit: int) -> None:
        self.levels[level].set_limit(device_tier(device), limit)
        self.limits[level, device] = limit

    @invariant()
    def books_match_the_model(self) -> None:
        if not self.limits:
            return  # nothing was built yet
        for level, ledger in self.ledgers.items():
            mine = [h for h in self.open.values() if h.level == level and h.request >= 0]
            live = [h for h in mine if h.is_committed]
            taken = ledger.snapshot()
            assert taken.resident == ledger.resident == sum(h.nbytes for h in live)
            assert taken.charged == sum(h.nbytes for h in mine)
            assert taken.peak == ledger.peak == self.peaks[level]
            assert ledger.charge_failures == self.num_failures[level]
            sums = sum((h.bytes for h in live if h.bytes), StateGroupBytes())
            assert taken.by_class() == ledger.by_class() == sums.by_class()
            self.groups_match(ledger, live, mine)
            for device in range(2):
                assert ledger.device_used(device) == self.used(level, device)

    def groups_match(self, ledger: StateGroupLedger, live: list[Held], mine: list[Held]) -> None:
        groups = {(g.request, g.device): g for g in ledger.snapshot().groups}
        assert groups.keys() == {(h.request, h.device) for h in live}
        assert len(groups) == ledger.active_group_count
        for key, group in groups.items():
            own = [h for h in live if (h.request, h.device) == key]
            assert (group.num_charges, group.bytes.total) == (len(own), ledger.resident_for(*key))
            assert group.bytes.total == sum(h.nbytes for h in own)
            assert group.charged == sum(h.nbytes for h in mine if (h.request, h.device) == key)

    def teardown(self) -> None:
        for handle in tuple(self.open):
            self.forget(handle)
        if self.limits:
            assert [taken.used for taken in self.levels["process"].snapshot() if taken.used] == []
            assert [ledger.resident for ledger in self.ledgers.values()] == [0, 0]
            self.levels["engine"].close()
            self.levels["process"].close()


def test_ledger_and_governor_agree_with_a_model_after_any_sequence_of_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "nxrt.memory")
    run_state_machine_as_test(
        StateLedgerMachine,
        settings=settings(
            max_examples=200 if IS_LONG else 30,
            stateful_step_count=60 if IS_LONG else 30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
