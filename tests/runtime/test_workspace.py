"""Check scratch memory: it is reused, grows by a transaction, and never moves under a graph."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nxrt.errors import (
    AllocationFailedError,
    CaptureError,
    ClosedError,
    LeaseRefusedError,
)
from nxrt.memory.allocator import HostAllocator, LeasedAllocator
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, Role
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.workspace import Workspace

LIMIT = 10_000


class FakeStream:
    """Count how often somebody waited; fail instead where a test says so."""

    def __init__(
        self, *, is_capturing: bool = False, replayed_on: "FakeStream | None" = None
    ) -> None:
        self.is_capturing = is_capturing
        self.is_closed = False
        self.order = replayed_on or self
        self.num_waits = 0
        self.waited_for: list[FakeStream] = []
        self.fault: Exception | None = None

    def wait_for(self, other: "FakeStream") -> None:
        self.waited_for.append(other)

    def synchronize(self) -> None:
        self.num_waits += 1
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def governor() -> MemoryGovernor:
    return MemoryGovernor(MemoryBudget.of(host=LIMIT))


@pytest.fixture
def workspace(governor: MemoryGovernor) -> Iterator[Workspace]:
    workspace = Workspace(LeasedAllocator(HostAllocator(), governor), holder="select")
    yield workspace
    workspace.close()
    assert governor.usage(HOST).used == 0, "a lease was left behind"


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


def run(workspace: Workspace, nbytes: int, stream: FakeStream) -> int:
    """Borrow the block for launches that succeed; return its address."""
    with workspace.lend(nbytes, stream=stream) as block:
        return block.pointer


def fail(workspace: Workspace, nbytes: int, stream: FakeStream) -> None:
    """Borrow the block for a launch that fails."""
    with pytest.raises(ZeroDivisionError), workspace.lend(nbytes, stream=stream):
        _ = 1 / 0


@contextmanager
def capturing(stream: FakeStream) -> Iterator[None]:
    stream.is_capturing = True
    yield
    stream.is_capturing = False


def used(governor: MemoryGovernor) -> int:
    return governor.usage(HOST).used


def test_workspace_takes_nothing_before_it_is_asked(
    workspace: Workspace, governor: MemoryGovernor
) -> None:
    assert (workspace.block, workspace.num_allocations, used(governor)) == (None, 0, 0)


def test_block_is_charged_as_the_workspace_of_its_holder(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    run(workspace, 100, stream)
    (usage,) = governor.usage(HOST).holders
    assert (usage.role, usage.holder, usage.used) == (Role.WORKSPACE, "select", 100)


@pytest.mark.parametrize("nbytes", [100, 99, 0])
def test_block_that_is_large_enough_is_lent_again(
    workspace: Workspace, stream: FakeStream, nbytes: int
) -> None:
    first = run(workspace, 100, stream)
    assert run(workspace, nbytes, stream) == first
    assert (workspace.num_allocations, stream.num_waits) == (1, 0)


def test_lent_block_is_as_large_as_asked(workspace: Workspace, stream: FakeStream) -> None:
    run(workspace, 100, stream)
    with workspace.lend(101, stream=stream) as block:
        assert block.nbytes >= 101


def test_grown_block_is_published_only_after_the_launches(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    run(workspace, 100, stream)
    old = workspace.block
    with workspace.lend(200, stream=stream) as grown:
        assert workspace.block is old
        assert used(governor) == 300
    assert workspace.block is grown
    assert used(governor) == 200


def test_growth_does_not_wait(workspace: Workspace, stream: FakeStream) -> None:
    """The allocator frees the replaced block once the streams have passed."""
    run(workspace, 100, stream)
    run(workspace, 200, stream)
    assert (workspace.num_allocations, stream.num_waits) == (2, 0)


def test_a_new_block_is_given_back_after_what_was_launched_before_the_error(
    workspace: Workspace, stream: FakeStream
) -> None:
    fail(workspace, 100, stream)
    assert stream.num_waits == 1


def test_error_while_growing_keeps_the_old_block_and_returns_the_new_lease(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    first = run(workspace, 100, stream)
    fail(workspace, 200, stream)
    assert (used(governor), workspace.num_allocations) == (100, 1)
    assert run(workspace, 100, stream) == first


def test_error_in_the_first_use_leaves_nothing(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    fail(workspace, 100, stream)
    assert (workspace.block, used(governor)) == (None, 0)


def test_error_while_reusing_keeps_the_block(workspace: Workspace, stream: FakeStream) -> None:
    first = run(workspace, 100, stream)
    fail(workspace, 100, stream)
    assert run(workspace, 100, stream) == first


def test_growth_past_the_budget_is_refused_and_keeps_the_old_block(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    first = run(workspace, 100, stream)
    with pytest.raises(LeaseRefusedError):
        run(workspace, LIMIT + 1, stream)
    assert used(governor) == 100
    assert run(workspace, 100, stream) == first


def test_growth_that_cannot_be_delivered_keeps_the_old_block(stream: FakeStream) -> None:
    governor = MemoryGovernor()
    workspace = Workspace(LeasedAllocator(HostAllocator(), governor), holder="select")
    first = run(workspace, 100, stream)
    with pytest.raises(AllocationFailedError):
        run(workspace, 2**62, stream)
    assert used(governor) == 100
    assert run(workspace, 100, stream) == first
    workspace.close()


def test_a_recording_takes_over_the_block_of_the_last_run(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    """A replay between two launches of a run must not write to the run's block."""
    first = run(workspace, 100, stream)
    with capturing(stream):
        assert run(workspace, 100, stream) == first
        assert run(workspace, 60, stream) == first
    assert (workspace.block, stream.num_waits) == (None, 0)
    assert run(workspace, 100, stream) != first
    with capturing(stream):
        assert run(workspace, 100, stream) == first
    assert used(governor) == 200


def test_a_larger_recording_takes_over_the_larger_block(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    run(workspace, 100, stream)
    with capturing(stream):
        run(workspace, 100, stream)
    assert workspace.graph_block is not None
    kept_by_a_graph = workspace.graph_block.share()
    larger = run(workspace, 200, stream)
    assert workspace.recordable_nbytes == 200
    with capturing(stream):
        assert run(workspace, 150, stream) == larger
    assert used(governor) == 300
    kept_by_a_graph.close()
    assert used(governor) == 200


def test_growth_while_capturing_is_refused_with_both_sizes(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    first = run(workspace, 1000, stream)
    with (
        capturing(stream),
        pytest.raises(CaptureError, match=r"select needs a workspace of 2,000 B and has 1,000 B"),
    ):
        run(workspace, 2000, stream)
    assert used(governor) == 1000
    assert run(workspace, 1000, stream) == first


def test_first_use_while_capturing_is_refused(workspace: Workspace) -> None:
    with pytest.raises(CaptureError, match=r"100 B and has 0 B.*run this shape once before"):
        run(workspace, 100, FakeStream(is_capturing=True))


def test_block_shared_with_a_graph_survives_growth_and_stays_charged(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    first = run(workspace, 100, stream)
    assert workspace.block is not None
    kept = workspace.block.share()
    run(workspace, 200, stream)
    assert (kept.pointer, used(governor)) == (first, 300)
    kept.close()
    assert used(governor) == 200


def test_block_shared_with_a_graph_survives_the_workspace(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    first = run(workspace, 100, stream)
    assert workspace.block is not None
    with workspace.block.share() as kept:
        workspace.close()
        assert (kept.pointer, used(governor)) == (first, 100)
    assert used(governor) == 0


def test_another_stream_waits_on_the_device_for_the_last_one(workspace: Workspace) -> None:
    one, two = FakeStream(), FakeStream()
    run(workspace, 100, one)
    with workspace.lend(100, stream=two):
        assert two.waited_for == [one]
    assert (one.num_waits, two.num_waits) == (0, 0)


def test_stream_that_is_used_again_waits_for_nothing(workspace: Workspace) -> None:
    one, two = FakeStream(), FakeStream()
    for stream in (one, one, two, two):
        run(workspace, 100, stream)
    assert (one.waited_for, two.waited_for) == ([], [one])


def test_stream_whose_launches_failed_is_waited_for_as_well(workspace: Workspace) -> None:
    """A node may enqueue one kernel and fail at the next: the first still uses the block."""
    one, two = FakeStream(), FakeStream()
    run(workspace, 100, one)
    fail(workspace, 100, two)
    run(workspace, 100, one)
    assert one.waited_for == [two]


def test_a_closed_stream_is_not_waited_for(workspace: Workspace) -> None:
    one, two = FakeStream(), FakeStream()
    run(workspace, 100, one)
    one.is_closed = True
    run(workspace, 100, two)
    assert two.waited_for == []


def test_a_recording_for_the_last_stream_uses_its_block(workspace: Workspace) -> None:
    one = FakeStream()
    first = run(workspace, 100, one)
    source = FakeStream(is_capturing=True, replayed_on=one)
    assert run(workspace, 100, source) == first
    run(workspace, 100, one)
    assert (source.waited_for, one.waited_for) == ([], [])


def test_a_recording_for_another_stream_is_refused(workspace: Workspace) -> None:
    one, two = FakeStream(), FakeStream(is_capturing=True)
    run(workspace, 100, one)
    with pytest.raises(CaptureError, match=r"workspace of select was last used on another stream"):
        run(workspace, 100, two)
    assert (one.num_waits, two.waited_for) == (0, [])


def test_closing_twice_gives_the_block_up_once(
    workspace: Workspace, governor: MemoryGovernor, stream: FakeStream
) -> None:
    run(workspace, 100, stream)
    workspace.close()
    workspace.close()
    assert (workspace.block, used(governor)) == (None, 0)


def test_workspaces_do_not_share_blocks(governor: MemoryGovernor, stream: FakeStream) -> None:
    blocks: list[GraphAllocation] = []
    allocator = LeasedAllocator(HostAllocator(), governor)
    workspaces = [Workspace(allocator, holder=name) for name in "ab"]
    for workspace in workspaces:
        run(workspace, 100, stream)
        assert workspace.block is not None
        blocks.append(workspace.block)
    assert blocks[0].identity != blocks[1].identity
    for workspace in workspaces:
        workspace.close()


def test_closed_workspace_lends_nothing(workspace: Workspace, stream: FakeStream) -> None:
    run(workspace, 100, stream)
    workspace.close()
    with pytest.raises(ClosedError, match="workspace of select"):
        run(workspace, 100, stream)
