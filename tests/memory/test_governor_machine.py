"""Check the governor against a simple model: any sequence of calls, at any level, with refusals.

NXRT_LONG_TESTS=1 runs 500 sequences of 100 steps.
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
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nxrt.errors import (
    AllocationFailedError,
    ClosedError,
    InvalidInputError,
    LeaseRefusedError,
)
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, PINNED, Role, Tier, device_tier
from tests.memory.test_allocator import ScriptedAllocator

IS_LONG = os.environ.get("NXRT_LONG_TESTS") == "1"
TIERS = (HOST, PINNED, device_tier(0))
ROLES = (Role.KV_CACHE, Role.WORKSPACE)
LEVELS = {"process": 1000, "engine": 600, "request": 250}
CAP = 400
"""The most that the key-value cache may hold of a tier in the whole process."""

tiers = st.sampled_from(TIERS)
sizes = st.integers(0, 300) | st.sampled_from([0, 1, CAP, 1000])


@dataclass(frozen=True)
class Held:
    """What the model knows of a lease."""

    level: str
    tier: Tier
    role: Role
    holder: str
    nbytes: int
    is_committed: bool = False


class GovernorMachine(RuleBasedStateMachine):
    """Drive three levels beside a list of what is held; levels are nested in the order given."""

    leases: Bundle[MemoryLease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[MemoryLease, Held] = {}
        self.limits: dict[tuple[str, Tier], int] = {}
        self.num_refused: Counter[tuple[str, Tier]] = Counter()
        self.reclaimable: list[MemoryLease] = []
        self.num_asked = 0

    @initialize()
    def build(self) -> None:
        def limits(level: str, **more: object) -> MemoryBudget:
            table = {"limit": LEVELS[level], **more}
            return MemoryBudget.of(device=table, pinned=table, host=table)

        process = MemoryGovernor(limits("process", roles={"kv_cache": CAP}), history=50)
        engine = process.child("engine", limits("engine"))
        request = engine.child("request", limits("request"))
        self.levels = {"process": process, "engine": engine, "request": request}
        self.limits = {(name, tier): LEVELS[name] for name in LEVELS for tier in TIERS}
        for tier in TIERS:
            process.register_reclaimer(tier, self.give_back, name=str(tier))

    def give_back(self, nbytes: int) -> None:
        """Close the newest reclaimable lease, whatever its tier, or fail."""
        assert nbytes > 0
        self.num_asked += 1
        if not self.reclaimable:
            raise ValueError("nothing left")
        self.forget(self.reclaimable.pop())

    def forget(self, lease: MemoryLease) -> None:
        lease.close()
        self.open.pop(lease, None)
        self.reclaimable = [other for other in self.reclaimable if other is not lease]

    def used(self, level: str, tier: Tier, role: Role | None = None) -> int:
        below = list(LEVELS)[list(LEVELS).index(level) :]
        return sum(
            held.nbytes
            for held in self.open.values()
            if held.level in below and held.tier == tier and role in (None, held.role)
        )

    def fits(self, held: Held, nbytes: int) -> bool:
        above = list(LEVELS)[: list(LEVELS).index(held.level) + 1]
        free = [self.limits[level, held.tier] - self.used(level, held.tier) for level in above]
        if held.role is Role.KV_CACHE:
            free.append(CAP - self.used("process", held.tier, Role.KV_CACHE))
        return nbytes == 0 or nbytes <= min(free)

    def refuse(self, held: Held) -> None:
        for level in list(LEVELS)[: list(LEVELS).index(held.level) + 1]:
            self.num_refused[level, held.tier] += 1

    @rule(
        target=leases,
        level=st.sampled_from(list(LEVELS)),
        tier=tiers,
        role=st.sampled_from(ROLES),
        holder=st.sampled_from("abc"),
        nbytes=sizes,
        is_reclaimable=st.booleans(),
    )
    def reserve(
        self, level: str, tier: Tier, role: Role, holder: str, nbytes: int, is_reclaimable: bool
    ) -> MemoryLease:
        held = Held(level, tier, role, holder, nbytes)
        fitted = self.fits(held, nbytes)
        try:
            lease = self.levels[level].reserve(tier, nbytes, role=role, holder=holder)
        except LeaseRefusedError:
            assert not fitted
            assert not self.fits(held, nbytes)
            self.refuse(held)
            return self.reserve_nothing(held)
        assert self.fits(held, nbytes)
        self.open[lease] = held
        if is_reclaimable:
            self.reclaimable.append(lease)
        return lease

    def reserve_nothing(self, held: Held) -> MemoryLease:
        held = replace(held, nbytes=0)
        lease = self.levels[held.level].reserve(held.tier, 0, role=held.role, holder=held.holder)
        self.open[lease] = held
        return lease

    @rule(target=leases, level=st.sampled_from(list(LEVELS)), tier=tiers, nbytes=sizes)
    def record_committed(self, level: str, tier: Tier, nbytes: int) -> MemoryLease:
        lease = self.levels[level].record_committed(
            tier, nbytes, role=Role.WEIGHTS, holder="engine"
        )
        self.open[lease] = Held(level, tier, Role.WEIGHTS, "engine", nbytes, is_committed=True)
        return lease

    @rule(lease=leases, nbytes=sizes)
    def grow(self, lease: MemoryLease, nbytes: int) -> None:
        if lease not in self.open:
            return
        held = self.open[lease]
        try:
            lease.grow(nbytes)
        except LeaseRefusedError:
            assert not held.is_committed
            assert not self.fits(held, nbytes)
            self.refuse(held)
        except ClosedError:
            assert lease not in self.open  # it was given back to make room for itself
        else:
            assert held.is_committed or self.fits(held, nbytes)
            self.open[lease] = replace(held, nbytes=held.nbytes + nbytes)

    @rule(lease=leases, share=st.integers(0, 110))
    def shrink(self, lease: MemoryLease, share: int) -> None:
        if lease not in self.open:
            return
        held = self.open[lease]
        nbytes = held.nbytes * share // 100
        if nbytes > held.nbytes:
            with pytest.raises(InvalidInputError):
                lease.shrink(nbytes)
        else:
            lease.shrink(nbytes)
            self.open[lease] = replace(held, nbytes=held.nbytes - nbytes)

    @rule(target=leases, lease=leases, share=st.integers(0, 100))
    def split(self, lease: MemoryLease, share: int) -> MemoryLease:
        if lease not in self.open:
            return lease
        held = self.open[lease]
        nbytes = held.nbytes * share // 100
        part = lease.split(nbytes)
        self.open[lease] = replace(held, nbytes=held.nbytes - nbytes)
        self.open[part] = replace(held, nbytes=nbytes)
        return part

    @rule(lease=leases, tier=tiers)
    def move(self, lease: MemoryLease, tier: Tier) -> None:
        if lease not in self.open:
            return
        moved = replace(self.open[lease], tier=tier)
        try:
            lease.move(tier)
        except LeaseRefusedError:
            assert not self.fits(moved, moved.nbytes)
            self.refuse(moved)
        except ClosedError:
            assert lease not in self.open
        else:
            self.open[lease] = moved

    @rule(lease=leases)
    def close(self, lease: MemoryLease) -> None:
        self.forget(lease)

    @rule(lease=consumes(leases))
    def close_and_drop(self, lease: MemoryLease) -> None:
        self.forget(lease)

    @rule(level=st.sampled_from(list(LEVELS)), tier=tiers, limit=st.integers(0, 1200))
    def set_limit(self, level: str, tier: Tier, limit: int) -> None:
        change = self.levels[level].set_limit(tier, limit)
        assert change.previous == self.limits[level, tier]
        self.limits[level, tier] = limit
        assert change.overage == max(0, self.used(level, tier) - limit)

    @rule(nbytes=st.integers(1, 100), is_failing=st.booleans())
    def allocate(self, nbytes: int, is_failing: bool) -> None:
        governor = self.levels["process"]

        def fail() -> None:
            if is_failing:
                raise MemoryError("no pages")

        allocator = LeasedAllocator(ScriptedAllocator(governor, fail), governor)
        held = Held("process", HOST, Role.GRAPH, "allocator", nbytes)
        try:
            allocator.allocate(nbytes, role=held.role, holder=held.holder).close()
        except LeaseRefusedError:
            self.refuse(held)
        except AllocationFailedError:
            assert is_failing

    @invariant()
    def books_match_the_model(self) -> None:
        if not self.open and not self.limits:
            return  # nothing was built yet
        snapshot = self.levels["process"].snapshot()
        for level in LEVELS:
            for tier in TIERS:
                usage = self.levels[level].usage(tier)
                used = self.used(level, tier)
                assert (usage.used, usage.limit) == (used, self.limits[level, tier])
                assert usage.num_refused == self.num_refused[level, tier]
                assert used == sum(usage.by_role().values()) == sum(usage.by_holder().values())
                assert used == 0 or usage == snapshot.tier(tier)
            if not snapshot.children:
                break
            snapshot = snapshot.children[0]

    @invariant()
    def leases_say_what_the_model_says(self) -> None:
        for lease, held in self.open.items():
            assert (lease.nbytes, lease.tier, lease.is_closed) == (held.nbytes, held.tier, False)

    def teardown(self) -> None:
        for lease in tuple(self.open):
            self.forget(lease)
        if not self.limits:
            return
        assert all(usage.used == 0 for usage in self.levels["process"].snapshot())
        for level in reversed(self.levels.values()):
            level.close()


def test_governor_agrees_with_a_model_after_any_sequence_of_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "nxrt.memory")
    run_state_machine_as_test(
        GovernorMachine,
        settings=settings(
            max_examples=500 if IS_LONG else 60,
            stateful_step_count=100 if IS_LONG else 50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
