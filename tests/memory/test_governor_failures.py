"""Check every failure in turn: of each allocation, and of each reservation; nothing ever stays."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from nxrt.errors import AllocationFailedError, LeaseRefusedError
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, PINNED, Role
from tests.helpers.reserving import OUT_OF_MEMORY, Upstream, close_all, reserve, used

LIMIT = 1000


@pytest.fixture
def governor() -> Iterator[MemoryGovernor]:
    governor = MemoryGovernor(MemoryBudget.of(host=LIMIT, pinned=LIMIT))
    yield governor
    assert governor.outstanding() == ()
    assert [usage for usage in governor.snapshot() if usage.used or usage.holders] == []


def scenario(governor: MemoryGovernor, upstream: Upstream) -> list[int]:
    """Do a bit of everything at two levels; return what is held in between."""
    with ExitStack() as stack:
        engine = stack.enter_context(governor.child("engine", MemoryBudget.of(host=900)))
        allocator = LeasedAllocator(upstream, engine)
        for n, nbytes in enumerate((100, 200, 300)):
            buffer = allocator.allocate(nbytes, role=Role.KV_CACHE, holder=f"cache {n}")
            stack.enter_context(buffer)
        lease = stack.enter_context(reserve(engine, 50))
        lease.grow(50)
        part = stack.enter_context(lease.split(30))
        part.move(PINNED)
        stack.enter_context(allocator.allocate(70, role=Role.WORKSPACE, holder="scratch"))
        return [used(governor), used(engine), used(governor, PINNED)]


@pytest.mark.parametrize("failing_call", range(1, 6))
@pytest.mark.parametrize("has_reclaimers", [False, True], ids=["alone", "with reclaimers"])
def test_every_allocation_fails_in_turn_and_nothing_stays(
    governor: MemoryGovernor, failing_call: int, has_reclaimers: bool
) -> None:
    upstream = Upstream(fail=lambda call: call == failing_call)
    cached = [reserve(governor, 50, "cache") for _ in range(2)]
    asked: list[int] = []

    def give_back(nbytes: int) -> None:
        asked.append(nbytes)
        if cached:
            cached.pop().close()

    if has_reclaimers:
        governor.register_reclaimer(HOST, give_back, name="cache")
    if has_reclaimers or failing_call > 4:
        assert scenario(governor, upstream)[1:] == [740, 30]
    else:
        with pytest.raises(AllocationFailedError) as caught:
            scenario(governor, upstream)
        assert caught.value.__cause__ is OUT_OF_MEMORY
    assert bool(asked) == (has_reclaimers and failing_call <= 4)
    assert (upstream.used, used(governor)) == (0, 50 * len(cached))
    close_all(*cached)


@pytest.mark.parametrize("limit", range(0, 800, 90))
@pytest.mark.parametrize("has_reclaimers", [False, True], ids=["alone", "with reclaimers"])
def test_every_reservation_is_refused_in_turn_and_nothing_stays(
    limit: int, has_reclaimers: bool
) -> None:
    governor = MemoryGovernor(MemoryBudget.of(host=limit, pinned=LIMIT))
    cached = [reserve(governor, limit // 3, "cache") for _ in range(3)]
    if has_reclaimers:
        governor.register_reclaimer(HOST, lambda _: close_all(*cached), name="cache")
    else:
        close_all(*cached)
    if limit >= 740:
        scenario(governor, Upstream())
    else:
        with pytest.raises(LeaseRefusedError):
            scenario(governor, Upstream())
    close_all(*cached)
    assert [usage for usage in governor.snapshot() if usage.used or usage.holders] == []
    assert governor.snapshot().children == ()


def test_a_device_that_has_less_than_the_budget_admits_asks_the_reclaimers(
    governor: MemoryGovernor,
) -> None:
    upstream = Upstream(capacity=500)
    allocator = LeasedAllocator(upstream, governor)
    cached = [allocator.allocate(100, role=Role.KV_CACHE, holder="cache") for _ in range(5)]

    def evict(nbytes: int) -> None:
        while cached and nbytes > 0:
            nbytes -= cached[-1].nbytes
            cached.pop().close()

    governor.register_reclaimer(HOST, evict, name="cache")
    with allocator.allocate(250, role=Role.WORKSPACE, holder="scratch"):
        assert (upstream.used, len(cached)) == (450, 2)
    for buffer in cached:
        buffer.close()
