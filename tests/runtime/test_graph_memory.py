"""Check stable-address memory: one block, several handles, freed with the last of them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from nxrt.errors import ClosedError, LeaseRefusedError
from nxrt.memory.allocator import HostAllocator, LeasedAllocator
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, Role
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.storage import CPU_DEVICE
from nxrt.tensor import DType, TensorView

LIMIT = 1 << 20
NUM_THREADS = 16


@pytest.fixture
def governor() -> MemoryGovernor:
    return MemoryGovernor(MemoryBudget.of(host=LIMIT))


@pytest.fixture
def allocator(governor: MemoryGovernor) -> LeasedAllocator:
    return LeasedAllocator(HostAllocator(), governor)


def allocate(allocator: LeasedAllocator, nbytes: int = 100) -> GraphAllocation:
    return GraphAllocation.allocate(allocator, nbytes, role=Role.GRAPH, holder="test")


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


def close_at_once(handles: list[GraphAllocation]) -> None:
    at_once(lambda: handles.pop().close())


def test_allocation_is_charged_as_asked(
    allocator: LeasedAllocator, governor: MemoryGovernor
) -> None:
    with allocate(allocator):
        (usage,) = governor.usage(HOST).holders
    assert (usage.role, usage.holder, usage.used) == (Role.GRAPH, "test", 100)


def test_refused_allocation_leaves_no_handle(allocator: LeasedAllocator) -> None:
    with pytest.raises(LeaseRefusedError):
        allocate(allocator, LIMIT + 1)
    allocate(allocator, LIMIT).close()


def test_handles_share_address_size_device_and_identity(allocator: LeasedAllocator) -> None:
    with allocate(allocator) as first, first.share() as second:
        assert second.pointer == first.pointer > 0
        assert (second.nbytes, second.device) == (100, CPU_DEVICE)
        assert second.identity == first.identity


def test_sharing_charges_nothing_more(allocator: LeasedAllocator, governor: MemoryGovernor) -> None:
    with allocate(allocator) as first, first.share(), first.share():
        assert first.num_handles == 3
        assert used(governor) == 100


def test_memory_lives_until_the_last_handle_is_closed(
    allocator: LeasedAllocator, governor: MemoryGovernor
) -> None:
    first = allocate(allocator)
    second = first.share()
    first.close()
    assert (second.num_handles, used(governor)) == (1, 100)
    second.close()
    assert (second.num_handles, used(governor)) == (0, 0)


def test_bytes_are_kept_while_a_handle_is_open(allocator: LeasedAllocator) -> None:
    first = allocate(allocator)
    TensorView(first, DType.U8, (100,)).to_array()[:] = 7
    with first.share() as second:
        first.close()
        assert TensorView(second, DType.U8, (100,)).to_array().tolist() == [7] * 100


def test_closing_a_handle_twice_counts_once(
    allocator: LeasedAllocator, governor: MemoryGovernor
) -> None:
    with allocate(allocator) as first:
        with first.share() as second:
            second.close()
        assert (first.num_handles, used(governor)) == (1, 100)


def test_closed_handle_has_no_address_though_others_are_open(allocator: LeasedAllocator) -> None:
    with allocate(allocator) as first:
        second = first.share()
        second.close()
        with pytest.raises(ClosedError, match=f"graph allocation {first.identity} is closed"):
            _ = second.pointer


def test_closed_handle_cannot_be_shared_though_others_are_open(allocator: LeasedAllocator) -> None:
    with allocate(allocator) as first:
        second = first.share()
        second.close()
        with pytest.raises(ClosedError):
            second.share()
        assert first.num_handles == 1


def test_identity_is_never_given_out_again(allocator: LeasedAllocator) -> None:
    """Addresses are reused; a graph that remembers an identity must not meet it again."""
    identities = []
    for _ in range(50):
        with allocate(allocator) as allocation:
            identities.append(allocation.identity)
    assert len(set(identities)) == 50


def test_identities_differ_between_threads(allocator: LeasedAllocator) -> None:
    identities: list[int] = []

    def allocate_some() -> None:
        for _ in range(50):
            with allocate(allocator, 1) as allocation:
                identities.append(allocation.identity)

    at_once(allocate_some)
    assert len(set(identities)) == 50 * NUM_THREADS


def test_allocation_of_nothing_has_handles_too(
    allocator: LeasedAllocator, governor: MemoryGovernor
) -> None:
    with allocate(allocator, 0) as first, first.share() as second:
        assert (second.pointer, second.nbytes, used(governor)) == (0, 0, 0)


def test_many_threads_may_share_and_close(
    allocator: LeasedAllocator, governor: MemoryGovernor
) -> None:
    first = allocate(allocator)

    def share_and_close() -> None:
        for _ in range(100):
            with first.share() as other, other.share():
                assert used(governor) == 100

    at_once(share_and_close)
    assert (first.num_handles, used(governor)) == (1, 100)
    first.close()
    assert used(governor) == 0


def test_one_handle_closed_by_many_threads_counts_once(
    allocator: LeasedAllocator, governor: MemoryGovernor
) -> None:
    with allocate(allocator) as first:
        for _ in range(20):
            at_once(first.share().close)
            assert (first.num_handles, used(governor)) == (1, 100)


def test_last_handles_closed_at_once_free_once(
    allocator: LeasedAllocator, governor: MemoryGovernor
) -> None:
    """A second free would raise in the host allocator, which forgets a block it gave back."""
    for _ in range(20):
        first = allocate(allocator)
        handles = [first, *(first.share() for _ in range(NUM_THREADS - 1))]
        close_at_once(handles)
        assert used(governor) == 0
