"""Known ways in which accountants of memory went wrong elsewhere.

NXRT_LONG_TESTS=1 runs the long forms.
"""

import gc
import os
import random
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from nxrt.errors import (
    AllocationFailedError,
    ClosedError,
    InvalidInputError,
    LeaseRefusedError,
    LeasesOutstandingError,
    SizeOverflowError,
)
from nxrt.memory.allocator import Buffer, HostAllocator, LeasedAllocator
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, PINNED, Role, device_tier
from nxrt.tensor import DType, TensorSpec
from tests.helpers.reserving import Upstream, at_once, close_all, eager_switching, reserve, used

IS_LONG = os.environ.get("NXRT_LONG_TESTS") == "1"
LIMIT = 1000
DEVICE = device_tier(0)


@pytest.fixture
def governor() -> Iterator[MemoryGovernor]:
    governor = MemoryGovernor(MemoryBudget.of(host=LIMIT, pinned=LIMIT))
    yield governor
    assert governor.outstanding() == ()
    assert [usage for usage in governor.snapshot() if usage.used or usage.holders] == []


def test_concurrent_requests_never_pass_the_limit_and_leave_nothing(
    governor: MemoryGovernor,
) -> None:
    """The limit is 1,000; 32 threads ask for 100 at once; a third of what is granted fails."""
    upstream = Upstream(fail=lambda call: call % 3 == 0)
    allocator = LeasedAllocator(upstream, governor)
    samples: list[int] = []
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            samples.append(used(governor))

    def take() -> None:
        try:
            buffer = allocator.allocate(
                100, role=Role.GRAPH, holder=threading.current_thread().name
            )
        except (LeaseRefusedError, AllocationFailedError):
            return
        buffer.close()

    watcher = threading.Thread(target=watch)
    with eager_switching():
        watcher.start()
        for _ in range(2000 if IS_LONG else 20):
            at_once([take] * 32)
        is_done.set()
        watcher.join()
    assert 0 <= min(samples) <= max(samples) <= LIMIT
    assert governor.usage(HOST).peak <= LIMIT
    assert upstream.used == 0


def fill(governor: MemoryGovernor) -> None:
    """Take exactly what there is, byte by byte at the end, and give it back."""
    with ExitStack() as held:
        free = governor.usage(HOST).available
        held.enter_context(reserve(governor, free - 2))
        held.enter_context(reserve(governor, 1))
        held.enter_context(reserve(governor, 1))
        with pytest.raises(LeaseRefusedError):
            reserve(governor, 1)


def close_twice(lease: MemoryLease) -> None:
    lease.close()
    lease.close()


def close_inside_its_block(lease: MemoryLease) -> None:
    with lease:
        lease.close()


def close_and_collect(lease: MemoryLease) -> None:
    lease.close()
    del lease
    gc.collect()


def close_in_one_list_twice(lease: MemoryLease) -> None:
    close_all(lease, lease)


def abort_after_preemption(lease: MemoryLease) -> None:
    lease.move(PINNED)
    part = lease.split(10)
    close_all(part, lease, part, lease)


RELEASES = (
    close_twice,
    close_inside_its_block,
    close_and_collect,
    close_in_one_list_twice,
    abort_after_preemption,
)


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_released_twice_is_counted_once(
    governor: MemoryGovernor, release: Callable[[MemoryLease], None]
) -> None:
    with reserve(governor, 300, "other"):
        for _ in range(3):
            release(reserve(governor, 100))
            assert (used(governor), used(governor, PINNED)) == (300, 0)
            fill(governor)


def test_a_stale_release_does_not_touch_the_new_owner(governor: MemoryGovernor) -> None:
    stale = [reserve(governor, 100) for _ in range(10)]
    close_all(*stale)
    fresh = [reserve(governor, 100, "new") for _ in range(10)]
    close_all(*stale)
    assert governor.usage(HOST).by_holder() == {"new": 1000}
    close_all(*fresh)


def test_a_lease_of_another_governor_is_that_governor_s(governor: MemoryGovernor) -> None:
    other = MemoryGovernor(MemoryBudget.of(host=LIMIT))
    with reserve(governor, 100):
        reserve(other, 200).close()
        assert (used(governor), used(other)) == (100, 0)


def test_a_smaller_request_fits_after_a_failure_whose_error_is_kept() -> None:
    """The error's frames must not keep what the failed call had taken."""
    megabyte = 10**6
    governor = MemoryGovernor(MemoryBudget.of(device=256 * megabyte))
    allocator = LeasedAllocator(Upstream(tier=DEVICE), governor)

    def operation(nbytes: int) -> None:
        with ExitStack() as taken:
            buffers: list[Buffer] = []
            for n in range(5):
                buffer = allocator.allocate(nbytes, role=Role.WORKSPACE, holder=f"buffer {n}")
                buffers.append(taken.enter_context(buffer))

    kept: list[LeaseRefusedError] = []
    for _ in range(100):
        with pytest.raises(LeaseRefusedError) as caught:
            operation(80 * megabyte)
        kept.append(caught.value)
        assert used(governor, DEVICE) == 0
        operation(40 * megabyte)
    assert {(e.requested, e.available, e.limit, e.tier) for e in kept} == {
        (80 * megabyte, 16 * megabyte, 256 * megabyte, "device:0")
    }


GOOD_SIZES = (0, 1, 255, 2**31 - 1, 2**31, 2**63 - 1)
BAD_SIZES = (2**64 - 4, 2**64, -1, True, 1.5, np.int64(-4), "1", None, np.float32(1))


@pytest.mark.parametrize("nbytes", GOOD_SIZES)
def test_an_odd_size_is_charged_exactly(nbytes: int) -> None:
    governor = MemoryGovernor()
    for size in (nbytes, np.uint64(nbytes)):
        lease = reserve(governor, size)
        assert (lease.nbytes, type(lease.nbytes), used(governor)) == (nbytes, int, nbytes)
        close_twice(lease)
    allocator = LeasedAllocator(Upstream(), governor)
    buffer = allocator.allocate(nbytes, role=Role.STAGING, holder="test")
    buffer.close()
    buffer.close()
    assert used(governor) == 0


@pytest.mark.parametrize("nbytes", BAD_SIZES, ids=repr)
def test_what_is_no_size_reaches_neither_the_books_nor_the_allocator(nbytes: Any) -> None:
    governor, upstream = MemoryGovernor(), Upstream()
    allocator = LeasedAllocator(upstream, governor)
    with reserve(governor, 7) as lease:
        before = governor.snapshot()
        calls: list[Callable[[], object]] = [
            lambda: reserve(governor, nbytes),
            lambda: governor.record_committed(HOST, nbytes, role=Role.GRAPH, holder="x"),
            lambda: allocator.allocate(nbytes, role=Role.GRAPH, holder="x"),
            lambda: governor.relieve(HOST, nbytes),
            lambda: lease.grow(nbytes),
            lambda: lease.shrink(nbytes),
            lambda: lease.split(nbytes),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError, match="nbytes"):
                call()
        assert (governor.snapshot(), upstream.num_calls) == (before, 0)


@pytest.mark.parametrize(
    ("shape", "expected"), [((0, 2**40), 0), ((3, 0), 0), ((2**33, 2**33), -1)]
)
def test_odd_shapes_have_exact_sizes_or_none(shape: tuple[int, ...], expected: int) -> None:
    if expected < 0:
        with pytest.raises(SizeOverflowError):
            TensorSpec(DType.F32, shape).nbytes()
        return
    nbytes = TensorSpec(DType.F32, shape).nbytes()
    governor = MemoryGovernor(MemoryBudget.of(host=0))
    with LeasedAllocator(HostAllocator(), governor).allocate(
        nbytes, role=Role.ACTIVATION, holder="empty"
    ) as buffer:
        assert (buffer.nbytes, used(governor)) == (expected, 0)


def test_a_limit_is_exact_to_the_byte_after_many_random_exchanges(governor: MemoryGovernor) -> None:
    choose = random.Random(8)
    leases: list[MemoryLease] = []
    for _ in range(10**6 if IS_LONG else 10_000):
        action = choose.randrange(6)
        lease = choose.choice(leases) if leases else None
        try:
            if action == 0 or lease is None:
                leases.append(reserve(governor, choose.randrange(300), choose.choice("abc")))
            elif action == 1:
                leases.remove(lease)
                lease.close()
            elif action == 2:
                lease.grow(choose.randrange(100))
            elif action == 3:
                lease.shrink(choose.randint(0, lease.nbytes))
            elif action == 4 and len(leases) < 50:
                leases.append(lease.split(choose.randint(0, lease.nbytes)))
            else:
                lease.move(choose.choice((HOST, PINNED)))
        except LeaseRefusedError:
            assert leases
    for tier in (HOST, PINNED):
        assert used(governor, tier) == sum(x.nbytes for x in leases if x.tier == tier)
    close_all(*leases)
    fill(governor)


def drop(governor: MemoryGovernor, nbytes: int) -> None:
    reserve(governor, nbytes, "forgetful")  # this is where it was made


def test_a_dropped_lease_is_reported_and_can_be_written_off(governor: MemoryGovernor) -> None:
    """Its memory may well be there still, so its bytes come back when somebody says so."""
    tracemalloc.start(8)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            drop(governor, 96)
        (warning,) = (w for w in caught if "'forgetful'" in str(w.message))
        traceback = tracemalloc.get_object_traceback(warning.source)
    finally:
        tracemalloc.stop()
    assert warning.category is ResourceWarning
    assert traceback is not None
    assert any("drop" in line or "this is where" in line for line in traceback.format())
    (open_lease,) = governor.outstanding()
    assert (open_lease.holder, open_lease.nbytes, open_lease.is_dropped) == ("forgetful", 96, True)
    with pytest.raises(LeasesOutstandingError, match="'forgetful', 96 B"):
        governor.close()
    with reserve(governor, 4):
        assert governor.write_off_dropped() == 96
        assert (used(governor), governor.write_off_dropped()) == (4, 0)


def test_closing_below_a_graph_names_the_graph(governor: MemoryGovernor) -> None:
    with governor.child("engine") as engine:
        graph = reserve(engine, 96, "decode graph", role=Role.GRAPH)
        for level in (engine, governor):
            with pytest.raises(LeasesOutstandingError, match="graph of 'decode graph', 96 B"):
                level.close()
        close_twice(graph)
        with pytest.raises(ClosedError):
            graph.grow(1)
