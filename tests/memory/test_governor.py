"""Check the accountant: limits to the byte, refusals without a trace, counts that always add up."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import pytest

from nxrt.errors import (
    AllocationFailedError,
    BudgetError,
    InvalidInputError,
    LeaseRefusedError,
    SizeOverflowError,
)
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor, TierUsage
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, PINNED, Role, Tier, device_tier
from nxrt.storage import CPU_DEVICE
from nxrt.tensor import MAX_SIZE

LIMIT = 1000
DEVICE = device_tier(0)


@pytest.fixture
def governor() -> MemoryGovernor:
    return MemoryGovernor(MemoryBudget.of(host=LIMIT))


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can, so that races show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def reserve(
    governor: MemoryGovernor,
    nbytes: Any,
    *,
    tier: Tier = HOST,
    role: Role = Role.WORKSPACE,
    holder: str = "test",
) -> MemoryLease:
    return governor.reserve(tier, nbytes, role=role, holder=holder)


def refused(governor: MemoryGovernor, nbytes: int, holder: str = "test") -> LeaseRefusedError:
    with pytest.raises(LeaseRefusedError) as caught:
        reserve(governor, nbytes, holder=holder)
    return caught.value


def holdings(usage: TierUsage) -> dict[tuple[Role, str], tuple[int, int]]:
    return {(h.role, h.holder): (h.used, h.peak) for h in usage.holders}


def test_governor_grants_exactly_the_limit(governor: MemoryGovernor) -> None:
    with reserve(governor, LIMIT):
        assert governor.usage(HOST).available == 0


def test_governor_refuses_one_byte_more_than_the_limit(governor: MemoryGovernor) -> None:
    assert refused(governor, LIMIT + 1).available == LIMIT


def test_governor_refuses_when_the_limit_would_be_passed(governor: MemoryGovernor) -> None:
    with reserve(governor, 600):
        assert refused(governor, 401).available == 400
        reserve(governor, 400).close()


def test_returned_bytes_can_be_granted_again(governor: MemoryGovernor) -> None:
    for _ in range(3):
        reserve(governor, LIMIT).close()


def test_nothing_is_granted_even_where_everything_is_taken(governor: MemoryGovernor) -> None:
    with reserve(governor, LIMIT), reserve(governor, 0, holder="nobody") as lease:
        assert lease.nbytes == 0
        assert [h.holder for h in governor.usage(HOST).holders] == ["test"]


def test_budget_of_zero_admits_only_nothing() -> None:
    governor = MemoryGovernor(MemoryBudget.of(host=0))
    reserve(governor, 0).close()
    assert refused(governor, 1).limit == 0


def test_limit_of_one_tier_leaves_the_others_alone(governor: MemoryGovernor) -> None:
    with reserve(governor, 2 * LIMIT, tier=PINNED), reserve(governor, LIMIT):
        assert governor.usage(PINNED).used == 2 * LIMIT


def test_devices_are_counted_apart() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device=10))
    with reserve(governor, 10, tier=device_tier(0)), reserve(governor, 10, tier=device_tier(1)):
        assert [governor.usage(device_tier(n)).used for n in (0, 1)] == [10, 10]


def test_refusal_changes_nothing_but_the_count_of_refusals(governor: MemoryGovernor) -> None:
    with reserve(governor, 600):
        before = governor.usage(HOST)
        refused(governor, 401, holder="newcomer")
        after = governor.usage(HOST)
    assert (after.used, after.peak, after.holders) == (before.used, before.peak, before.holders)
    assert (before.num_refused, after.num_refused) == (0, 1)


def test_refusal_says_what_was_asked_and_what_was_there(governor: MemoryGovernor) -> None:
    with reserve(governor, 600):
        refusal = refused(governor, 401, holder="newcomer")
    assert (refusal.tier, refusal.holder) == ("host", "newcomer")
    assert (refusal.requested, refusal.available, refusal.limit) == (401, 400, LIMIT)


def test_refusal_names_the_three_largest_holders_largest_first(governor: MemoryGovernor) -> None:
    sizes = {"c": 30, "a": 10, "e": 50, "b": 20, "d": 40}
    leases = [reserve(governor, size, holder=name) for name, size in sizes.items()]
    assert refused(governor, LIMIT).largest_holders == (("e", 50), ("d", 40), ("c", 30))
    for lease in leases:
        lease.close()


def test_refusal_names_equal_holders_in_a_fixed_order(governor: MemoryGovernor) -> None:
    with reserve(governor, 5, holder="b"), reserve(governor, 5, holder="a"):
        assert refused(governor, LIMIT).largest_holders == (("a", 5), ("b", 5))


def test_refusal_adds_up_the_leases_of_one_holder(governor: MemoryGovernor) -> None:
    with (
        reserve(governor, 30, holder="twice"),
        reserve(governor, 50, holder="once"),
        reserve(governor, 30, holder="twice"),
    ):
        assert refused(governor, LIMIT).largest_holders == (("twice", 60), ("once", 50))


def test_refusal_adds_up_the_roles_of_one_holder(governor: MemoryGovernor) -> None:
    with (
        reserve(governor, 30, holder="twice", role=Role.WEIGHTS),
        reserve(governor, 50, holder="once"),
        reserve(governor, 30, holder="twice", role=Role.KV_CACHE),
    ):
        assert refused(governor, LIMIT).largest_holders == (("twice", 60), ("once", 50))


@pytest.mark.parametrize("nbytes", [-1, True, False, 1.5, 0.0, "8", None, np.int64(-4), np.True_])
def test_what_is_no_size_is_refused(governor: MemoryGovernor, nbytes: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"nbytes: got .* accepted: an integer from 0"):
        reserve(governor, nbytes)
    assert governor.snapshot() == ()


@pytest.mark.parametrize("nbytes", [2**63, 2**64, np.uint64(2**63)])
def test_size_past_63_bits_is_refused_as_an_overflow(governor: MemoryGovernor, nbytes: Any) -> None:
    with pytest.raises(SizeOverflowError, match="nbytes"):
        reserve(governor, nbytes)
    assert governor.snapshot() == ()


def test_numpy_size_becomes_a_plain_integer(governor: MemoryGovernor) -> None:
    nbytes: Any = np.uint8(200)
    with reserve(governor, nbytes) as lease:
        assert type(lease.nbytes) is int


def test_without_a_limit_63_bits_are_granted_and_no_byte_more() -> None:
    governor = MemoryGovernor()
    with reserve(governor, MAX_SIZE):
        refusal = refused(governor, 1)
    assert (refusal.available, refusal.limit) == (0, MAX_SIZE)


def test_share_is_taken_of_the_capacity_that_is_passed() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device="50%"), capacities={DEVICE: 1000})
    assert governor.usage(DEVICE).limit == 500


def test_share_of_an_unmeasured_device_is_an_error_and_leaves_no_trace() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device="50%"))
    with pytest.raises(BudgetError, match="budget of device:0"):
        reserve(governor, 1, tier=DEVICE)
    assert governor.snapshot() == ()


def test_host_capacity_is_measured_when_it_is_not_passed() -> None:
    limit = MemoryGovernor(MemoryBudget.of(host="100%")).usage(HOST).limit
    assert limit is not None
    assert limit > 0


def test_peak_of_a_tier_is_the_most_it_ever_held(governor: MemoryGovernor) -> None:
    with reserve(governor, 300, holder="a"):
        reserve(governor, 200, holder="b").close()
    reserve(governor, 400).close()
    usage = governor.usage(HOST)
    assert (usage.used, usage.peak) == (0, 500)


def test_peak_of_a_holder_is_its_own_in_that_role(governor: MemoryGovernor) -> None:
    with reserve(governor, 100, holder="a"), reserve(governor, 70, holder="b"):
        reserve(governor, 50, holder="a").close()
        with reserve(governor, 30, holder="a", role=Role.WEIGHTS):
            assert holdings(governor.usage(HOST)) == {
                (Role.WORKSPACE, "a"): (100, 150),
                (Role.WORKSPACE, "b"): (70, 70),
                (Role.WEIGHTS, "a"): (30, 30),
            }


def test_holder_that_holds_nothing_is_forgotten(governor: MemoryGovernor) -> None:
    reserve(governor, 100, holder="gone").close()
    assert governor.usage(HOST).holders == ()


@pytest.mark.parametrize(
    ("tier", "role", "holder"),
    [("host", Role.GRAPH, "x"), (HOST, "graph", "x"), (HOST, Role.GRAPH, None)],
    ids=["tier", "role", "holder"],
)
def test_labels_that_are_none_are_refused_and_break_no_report(
    tier: Any, role: Any, holder: Any
) -> None:
    governor = MemoryGovernor()
    with pytest.raises(InvalidInputError, match="accepted: a "):
        governor.reserve(tier, 1, role=role, holder=holder)
    assert governor.snapshot() == ()


def test_snapshot_lists_the_tiers_that_were_used(governor: MemoryGovernor) -> None:
    with reserve(governor, 1, tier=PINNED), reserve(governor, 1):
        governor.usage(DEVICE)
        assert [usage.tier for usage in governor.snapshot()] == [HOST, PINNED]


def test_snapshot_does_not_follow_what_happens_later(governor: MemoryGovernor) -> None:
    with reserve(governor, 100):
        (usage,) = governor.snapshot()
    assert (usage.used, len(usage.holders)) == (100, 1)


def test_snapshot_cannot_be_changed(governor: MemoryGovernor) -> None:
    with reserve(governor, 100):
        (usage,) = governor.snapshot()
    with pytest.raises(FrozenInstanceError):
        usage.used = 0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        usage.holders[0].used = 0  # type: ignore[misc]


def at_once(actions: list[Callable[[], object]]) -> None:
    """Run each action on a thread of its own, all starting together; raise what any raised."""
    start = threading.Barrier(len(actions))

    def run(action: Callable[[], object]) -> None:
        start.wait()
        action()

    with ThreadPoolExecutor(len(actions)) as pool:
        for future in [pool.submit(run, action) for action in actions]:
            future.result()


@pytest.mark.usefixtures("eager_switching")
def test_snapshot_is_of_one_moment() -> None:
    """One thread takes a byte of each tier in order and gives them back the other way round."""
    governor = MemoryGovernor()
    tiers = [*map(device_tier, range(8)), HOST, PINNED]
    is_done = threading.Event()
    torn: list[list[int]] = []

    def take_turns() -> None:
        for _ in range(200):
            with ExitStack() as held:
                for tier in tiers:
                    held.enter_context(reserve(governor, 1, tier=tier))
        is_done.set()

    def watch() -> None:
        while not is_done.is_set():
            used = [usage.used for usage in governor.snapshot()]
            if used != sorted(used, reverse=True):
                torn.append(used)

    at_once([take_turns, watch, watch])
    assert not torn


@dataclass
class UnreliableAllocator:
    """Deliver numbers instead of memory, fail every third time, and watch what is outstanding."""

    tier: Tier = HOST
    device = CPU_DEVICE
    used: int = 0
    most_used: int = 0
    num_calls: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> int:
        with self._lock:
            self.num_calls += 1
            if self.num_calls % 3 == 0:
                raise MemoryError("every third time")
            self.used += nbytes
            self.most_used = max(self.most_used, self.used)
            return 256 * self.num_calls

    def anchor(self, pointer: int) -> object:  # noqa: ARG002  (the protocol's)
        return None

    def deallocate(
        self,
        pointer: int,  # noqa: ARG002  (the protocol's)
        nbytes: int,
        settle: Callable[[], None],
        *,
        after: Sequence[object] = (),  # noqa: ARG002
    ) -> None:
        with self._lock:
            self.used -= nbytes
        settle()

    def reclaim(self) -> bool:
        return False


@pytest.mark.usefixtures("eager_switching")
def test_many_threads_never_pass_the_limit_and_leave_nothing_behind(
    governor: MemoryGovernor,
) -> None:
    upstream = UnreliableAllocator()
    allocator = LeasedAllocator(upstream, governor)
    outcomes: list[type] = []

    def take_until_refused() -> None:
        with ExitStack() as held:
            for _ in range(200):
                try:
                    held.enter_context(allocator.allocate(100, role=Role.GRAPH, holder="all"))
                except AllocationFailedError as error:
                    outcomes.append(type(error))
                except LeaseRefusedError as error:
                    outcomes.append(type(error))
                    held.close()

    at_once([take_until_refused] * 32)
    usage = governor.usage(HOST)
    assert outcomes.count(AllocationFailedError) == upstream.num_calls // 3 > 0
    assert outcomes.count(LeaseRefusedError) == usage.num_refused > 0
    assert upstream.num_calls + usage.num_refused == 32 * 200
    assert (usage.used, usage.holders, upstream.used) == (0, (), 0)
    assert max(usage.peak, upstream.most_used) <= LIMIT
