"""Check charged memory: the lease comes first, and every failure gives back what was taken."""

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from nxrt.errors import (
    AllocationFailedError,
    ClosedError,
    DriverError,
    InvalidInputError,
    LeaseRefusedError,
    SizeOverflowError,
)
from nxrt.memory.allocator import Buffer, HostAllocator, LeasedAllocator
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, PINNED, Role, Tier
from nxrt.storage import CPU_DEVICE
from nxrt.tensor import MAX_SIZE, DType, TensorView

LIMIT = 1000
OUT_OF_MEMORY = DriverError(code=2, name="OUT", call="cuMemAlloc", explanation="no free block")


@dataclass
class ScriptedAllocator:
    """Deliver numbers instead of memory, note every call, and run what a test puts in between.

    Args:
        governor: asked at every call what is charged at that moment.
        before_allocate: runs first in `allocate`; may raise.
        is_slow: what is given back is back only once it is reclaimed.
    """

    governor: MemoryGovernor
    before_allocate: Callable[[], object] = lambda: None
    is_slow: bool = False
    tier: Tier = HOST
    device = CPU_DEVICE
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    pending: list[Callable[[], None]] = field(default_factory=list)

    def allocate(self, nbytes: int) -> int:
        self.calls.append(("allocate", nbytes, self.governor.usage(self.tier).used))
        self.before_allocate()
        return 4096

    def anchor(self, pointer: int) -> object:  # noqa: ARG002  (the protocol's)
        return None

    def deallocate(
        self,
        pointer: int,
        nbytes: int,
        settle: Callable[[], None],
        *,
        after: Sequence[object] = (),  # noqa: ARG002
    ) -> None:
        self.calls.append(("deallocate", pointer, nbytes, self.governor.usage(self.tier).used))
        if self.is_slow:
            self.pending.append(settle)
        else:
            settle()

    def reclaim(self) -> bool:
        pending, self.pending = self.pending, []
        for settle in pending:
            settle()
        return bool(pending)


@pytest.fixture
def governor() -> MemoryGovernor:
    return MemoryGovernor(MemoryBudget.of(host=LIMIT))


@pytest.fixture
def upstream(governor: MemoryGovernor) -> Iterator[ScriptedAllocator]:
    scripted = ScriptedAllocator(governor)
    yield scripted
    scripted.reclaim()


def raising(error: BaseException) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


def allocate(upstream: ScriptedAllocator, nbytes: Any, holder: str = "test") -> Buffer:
    allocator = LeasedAllocator(upstream, upstream.governor)
    return allocator.allocate(nbytes, role=Role.WORKSPACE, holder=holder)


def used(upstream: ScriptedAllocator) -> int:
    return upstream.governor.usage(upstream.tier).used


def test_lease_is_taken_before_the_memory(upstream: ScriptedAllocator) -> None:
    with allocate(upstream, 100):
        assert upstream.calls == [("allocate", 100, 100)]


def test_lease_is_given_back_after_the_memory(upstream: ScriptedAllocator) -> None:
    allocate(upstream, 100).close()
    assert upstream.calls[1:] == [("deallocate", 4096, 100, 100)]
    assert used(upstream) == 0


def test_buffer_is_charged_to_the_tier_role_and_holder_it_was_asked_for(
    governor: MemoryGovernor,
) -> None:
    upstream = ScriptedAllocator(governor, tier=PINNED)
    with allocate(upstream, 100, holder="ring"):
        (usage,) = governor.usage(PINNED).holders
    assert (usage.role, usage.holder, usage.used) == (Role.WORKSPACE, "ring", 100)


def test_buffer_says_where_it_is(upstream: ScriptedAllocator) -> None:
    with allocate(upstream, 100) as buffer:
        assert (buffer.pointer, buffer.nbytes, buffer.device) == (4096, 100, CPU_DEVICE)


def test_refused_request_never_reaches_the_allocator(upstream: ScriptedAllocator) -> None:
    with pytest.raises(LeaseRefusedError):
        allocate(upstream, LIMIT + 1)
    assert upstream.calls == []


@pytest.mark.parametrize("nbytes", [-1, True, 1.5])
def test_what_is_no_size_never_reaches_the_allocator(
    upstream: ScriptedAllocator, nbytes: Any
) -> None:
    with pytest.raises(InvalidInputError):
        allocate(upstream, nbytes)
    assert upstream.calls == []


def test_size_past_63_bits_never_reaches_the_allocator(upstream: ScriptedAllocator) -> None:
    with pytest.raises(SizeOverflowError):
        allocate(upstream, 2**63)
    assert upstream.calls == []


def test_nothing_never_reaches_the_allocator(upstream: ScriptedAllocator) -> None:
    with allocate(upstream, 0) as buffer:
        assert (buffer.pointer, buffer.nbytes) == (0, 0)
    assert upstream.calls == []


FAILURES = [MemoryError("no pages"), OUT_OF_MEMORY]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_failing_allocator_gives_the_lease_back(
    upstream: ScriptedAllocator, error: Exception
) -> None:
    upstream.before_allocate = raising(error)
    with pytest.raises(AllocationFailedError):
        allocate(upstream, 100)
    assert used(upstream) == 0


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_failing_allocator_is_the_cause_of_what_is_raised(
    upstream: ScriptedAllocator, error: Exception
) -> None:
    upstream.before_allocate = raising(error)
    with pytest.raises(AllocationFailedError) as caught:
        allocate(upstream, 100, holder="ring")
    failed = caught.value
    assert failed.__cause__ is error
    assert (failed.tier, failed.requested, failed.holder) == ("host", 100, "ring")
    assert failed.reason == str(error)


def test_stray_error_of_the_allocator_passes_and_gives_the_lease_back(
    upstream: ScriptedAllocator,
) -> None:
    upstream.before_allocate = raising(KeyError("bug"))
    with pytest.raises(KeyError):
        allocate(upstream, 100)
    assert used(upstream) == 0


def test_what_an_interrupt_may_have_taken_stays_charged(upstream: ScriptedAllocator) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt  # a new one each time: its traceback holds the lease

    upstream.before_allocate = interrupt
    with pytest.warns(ResourceWarning, match="never closed"):  # noqa: PT031
        with suppress(KeyboardInterrupt):
            allocate(upstream, 100)
            pytest.fail("it was not interrupted")
        gc.collect()
    assert used(upstream) == 100


def test_memory_that_is_still_in_use_stays_charged_until_it_is_back(
    upstream: ScriptedAllocator,
) -> None:
    """Bytes that may still be taken are not offered to anybody else."""
    upstream.is_slow = True
    allocate(upstream, 100).close()
    assert used(upstream) == 100
    assert upstream.reclaim()
    assert used(upstream) == 0


def test_a_request_that_does_not_fit_waits_for_what_was_given_back(
    upstream: ScriptedAllocator,
) -> None:
    upstream.is_slow = True
    allocate(upstream, LIMIT).close()
    with allocate(upstream, LIMIT):
        assert used(upstream) == LIMIT


def test_a_request_that_does_not_fit_even_then_is_refused(upstream: ScriptedAllocator) -> None:
    upstream.is_slow = True
    with allocate(upstream, 1):
        allocate(upstream, 100).close()
        with pytest.raises(LeaseRefusedError):
            allocate(upstream, LIMIT)
        assert used(upstream) == 1


def test_an_allocator_that_is_full_is_asked_again_once_something_is_back(
    upstream: ScriptedAllocator,
) -> None:
    upstream.is_slow = True
    allocate(upstream, 100).close()
    failures = [OUT_OF_MEMORY]

    def fail_once() -> None:
        if failures:
            raise failures.pop()

    upstream.before_allocate = fail_once
    with allocate(upstream, 50):
        assert used(upstream) == 50


def test_closing_twice_frees_once(upstream: ScriptedAllocator) -> None:
    with allocate(upstream, 100) as buffer:
        buffer.close()
    assert len(upstream.calls) == 2


def test_closing_from_many_threads_at_once_frees_once(upstream: ScriptedAllocator) -> None:
    buffers = [allocate(upstream, 1) for _ in range(100)]
    with ThreadPoolExecutor(8) as pool:
        for closed in [pool.submit(buffer.close) for buffer in buffers for _ in range(8)]:
            closed.result()
    assert len(upstream.calls) == 200
    assert used(upstream) == 0


def test_closed_buffer_has_no_address(upstream: ScriptedAllocator) -> None:
    buffer = allocate(upstream, 123, holder="ring")
    buffer.close()
    with pytest.raises(ClosedError, match=r"buffer of 123 B held by 'ring' is closed"):
        _ = buffer.pointer


def test_closed_buffer_of_nothing_has_no_address(upstream: ScriptedAllocator) -> None:
    buffer = allocate(upstream, 0)
    buffer.close()
    with pytest.raises(ClosedError):
        _ = buffer.pointer


def test_view_of_a_closed_buffer_cannot_be_read(governor: MemoryGovernor) -> None:
    allocator = LeasedAllocator(HostAllocator(), governor)
    buffer = allocator.allocate(16, role=Role.ACTIVATION, holder="test")
    view = TensorView(buffer, DType.F32, (4,))
    buffer.close()
    with pytest.raises(ClosedError):
        view.to_array()


@pytest.mark.parametrize("nbytes", [1, 255, 256, 257, 4096, 10**6])
def test_host_memory_is_aligned_to_256_bytes(nbytes: int) -> None:
    allocator = HostAllocator()
    pointers = [allocator.allocate(nbytes) for _ in range(20)]
    assert [pointer % 256 for pointer in pointers] == [0] * 20


def test_host_memory_can_be_used_to_its_last_byte(governor: MemoryGovernor) -> None:
    allocator = LeasedAllocator(HostAllocator(), governor)
    with allocator.allocate(257, role=Role.ACTIVATION, holder="test") as buffer:
        array = TensorView(buffer, DType.U8, (257,)).to_array()
        array[:] = np.arange(257).astype(np.uint8)
        assert array.tolist() == [n % 256 for n in range(257)]


@pytest.mark.parametrize("nbytes", [2**62, MAX_SIZE])
def test_host_memory_that_nobody_has_is_a_failed_allocation(nbytes: int) -> None:
    governor = MemoryGovernor()
    with pytest.raises(AllocationFailedError):
        LeasedAllocator(HostAllocator(), governor).allocate(
            nbytes, role=Role.ACTIVATION, holder="test"
        )
    assert governor.usage(HOST).used == 0
