"""Check leases: their bytes go back exactly once, whoever closes them and however often."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nxrt.errors import LeaseRefusedError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, PINNED, Role

NUM_THREADS = 8
LIMIT = 1000


@pytest.fixture
def governor() -> MemoryGovernor:
    return MemoryGovernor()


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can, so that races show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def reserve(governor: MemoryGovernor, nbytes: int = 100, holder: str = "test") -> MemoryLease:
    return governor.reserve(HOST, nbytes, role=Role.STAGING, holder=holder)


def used(governor: MemoryGovernor) -> int:
    return governor.usage(HOST).used


def at_once(action: Callable[[], object]) -> None:
    """Run an action on several threads that start together; raise what any of them raised."""
    start = threading.Barrier(NUM_THREADS)

    def run() -> None:
        start.wait()
        action()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for future in [pool.submit(run) for _ in range(NUM_THREADS)]:
            future.result()


def test_lease_says_what_it_holds(governor: MemoryGovernor) -> None:
    with governor.reserve(PINNED, 5, role=Role.KV_CACHE, holder="cache") as lease:
        assert (lease.tier, lease.nbytes, lease.role) == (PINNED, 5, Role.KV_CACHE)
        assert (lease.holder, lease.is_closed) == ("cache", False)


def test_open_lease_is_shown_with_everything_about_it(governor: MemoryGovernor) -> None:
    with reserve(governor, 1234, "someone") as lease:
        assert repr(lease) == "<MemoryLease 1,234 B host staging someone open>"


def test_closed_lease_is_shown_as_closed(governor: MemoryGovernor) -> None:
    lease = reserve(governor)
    lease.close()
    assert repr(lease).endswith(" closed>")


def test_closing_twice_gives_the_bytes_back_once(governor: MemoryGovernor) -> None:
    with reserve(governor, 50, "other"):
        lease = reserve(governor, 100)
        lease.close()
        lease.close()
        assert used(governor) == 50


def test_closing_by_hand_inside_the_with_block_gives_the_bytes_back_once(
    governor: MemoryGovernor,
) -> None:
    with reserve(governor, 50, "other"):
        with reserve(governor, 100) as lease:
            lease.close()
        assert used(governor) == 50


@pytest.mark.usefixtures("eager_switching")
def test_closing_from_many_threads_at_once_gives_the_bytes_back_once(
    governor: MemoryGovernor,
) -> None:
    with reserve(governor, 50, "other"):
        for _ in range(50):
            lease = reserve(governor, 100)
            at_once(lease.close)
            assert used(governor) == 50


def test_lease_may_be_closed_by_another_thread(governor: MemoryGovernor) -> None:
    lease = reserve(governor)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lease.close).result()
    assert (lease.is_closed, used(governor)) == (True, 0)


def test_error_inside_the_with_block_gives_the_bytes_back(governor: MemoryGovernor) -> None:
    with pytest.raises(ZeroDivisionError), reserve(governor):
        _ = 1 / 0
    assert used(governor) == 0


def test_lease_of_nothing_is_closed_like_any_other(governor: MemoryGovernor) -> None:
    with reserve(governor, 50, "other"):
        lease = reserve(governor, 0)
        lease.close()
        lease.close()
        assert (lease.is_closed, used(governor)) == (True, 50)


@pytest.mark.parametrize("name", ["nbytes", "tier", "role", "holder", "request"])
def test_what_a_lease_holds_cannot_be_changed_by_its_holder(
    governor: MemoryGovernor, name: str
) -> None:
    with reserve(governor, 100) as lease, pytest.raises(AttributeError):
        setattr(lease, name, 7)


def test_dropped_lease_warns_and_says_whose_it_was(governor: MemoryGovernor) -> None:
    with pytest.warns(ResourceWarning, match=r"1,234 B on host for 'someone forgetful' was never"):
        reserve(governor, 1234, "someone forgetful")


def test_dropped_lease_stays_charged(governor: MemoryGovernor) -> None:
    with pytest.warns(ResourceWarning):
        reserve(governor, 100)
    assert used(governor) == 100


def test_lease_made_where_a_dropped_one_was_gives_back_only_its_own(
    governor: MemoryGovernor,
) -> None:
    """Python reuses the place of a dropped object, and with it its id."""
    for _ in range(20):
        with pytest.warns(ResourceWarning):
            reserve(governor, 100)
    for _ in range(20):
        reserve(governor, 7).close()
    assert used(governor) == 20 * 100


def test_closed_lease_is_dropped_without_a_warning(
    governor: MemoryGovernor, recwarn: pytest.WarningsRecorder
) -> None:
    reserve(governor, holder="tidy").close()
    assert not [warning for warning in recwarn if "'tidy'" in str(warning.message)]


class LeaseMachine(RuleBasedStateMachine):
    """Reserve and close in any order, beside a model: the sizes that are open, by lease."""

    leases: Bundle[MemoryLease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.governor = MemoryGovernor(MemoryBudget.of(host=LIMIT))
        self.open: dict[MemoryLease, tuple[str, int]] = {}
        self.peak = 0
        self.num_refused = 0

    @property
    def used(self) -> int:
        return sum(nbytes for _, nbytes in self.open.values())

    @rule(target=leases, share=st.integers(0, 100), holder=st.sampled_from("abc"))
    def reserve_what_fits(self, share: int, holder: str) -> MemoryLease:
        nbytes = (LIMIT - self.used) * share // 100
        lease = reserve(self.governor, nbytes, holder)
        self.open[lease] = (holder, nbytes)
        self.peak = max(self.peak, self.used)
        return lease

    @rule(excess=st.integers(1, LIMIT))
    def reserve_what_does_not_fit(self, excess: int) -> None:
        with pytest.raises(LeaseRefusedError) as caught:
            reserve(self.governor, LIMIT - self.used + excess)
        assert caught.value.available == LIMIT - self.used
        self.num_refused += 1

    @rule(lease=leases)
    def close(self, lease: MemoryLease) -> None:
        lease.close()
        self.open.pop(lease, None)

    @rule(lease=consumes(leases))
    def close_and_drop(self, lease: MemoryLease) -> None:
        self.close(lease)

    @invariant()
    def books_match_the_model(self) -> None:
        usage = self.governor.usage(HOST)
        found = (usage.used, usage.peak, usage.num_refused, usage.available)
        assert found == (self.used, self.peak, self.num_refused, LIMIT - self.used)
        by_holder: dict[str, int] = {}
        for holder, nbytes in self.open.values():
            by_holder[holder] = by_holder.get(holder, 0) + nbytes
        assert {h.holder: h.used for h in usage.holders} == {
            k: v for k, v in by_holder.items() if v
        }

    def teardown(self) -> None:
        for lease in self.open:
            lease.close()


def test_governor_agrees_with_a_model_after_any_sequence_of_leases() -> None:
    run_state_machine_as_test(
        LeaseMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
