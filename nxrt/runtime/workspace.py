"""Scratch memory of one kernel object: it grows, never shrinks, and never moves under a graph.

Growth is a transaction: the new block becomes the kernel's only after the launches that asked for
it were accepted. It works over any allocator.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

from nxrt.errors import CaptureError, ClosedError, NxrtError
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.tier import Role
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.recording import keep


class WorkspaceStream(Protocol):
    """What a workspace needs to know of a stream."""

    @property
    def is_capturing(self) -> bool:
        """Say whether the stream is being recorded."""

    @property
    def order(self) -> object:
        """Return what names the order of the stream's work."""

    @property
    def is_closed(self) -> bool:
        """Say whether it was closed, after all its work."""

    def wait_for(self, other: Any) -> None:
        """Make later work here wait for what another such stream has so far."""

    def synchronize(self) -> None:
        """Wait for everything enqueued."""


class Workspace:
    """Own the scratch memory of one kernel object: a block for running, and one for graphs.

    A replay may be enqueued by another thread between two launches of an execution, so the two
    never share a block. A recording takes over the block of the last execution where it needs a
    larger one than earlier recordings; an execution after that gets a new block.

    Not locked: the kernel that owns it serialises its own executions.

    Args:
        allocator: charges and delivers the memory.
        holder: named in reports and refusals.
    """

    def __init__(self, allocator: LeasedAllocator, *, holder: str) -> None:
        self._allocator = allocator
        self._holder = holder
        self._block: GraphAllocation | None = None
        self._graph_block: GraphAllocation | None = None
        self._last_stream: WorkspaceStream | None = None
        self._is_closed = False
        self.num_allocations = 0

    @property
    def block(self) -> GraphAllocation | None:
        """Return the block for running, None before the first success and after a recording."""
        return self._block

    @property
    def graph_block(self) -> GraphAllocation | None:
        """Return the block that the next recording bakes in if it is large enough."""
        return self._graph_block

    @property
    def recordable_nbytes(self) -> int:
        """Return the size of the largest block that a recording can have without allocating."""
        return max(block.nbytes if block else 0 for block in (self._block, self._graph_block))

    @contextmanager
    def lend(self, nbytes: int, *, stream: WorkspaceStream) -> Iterator[GraphAllocation]:
        """Lend a block of at least `nbytes` for launches on `stream` made inside the with-block.

        Leaving normally publishes a grown block; leaving by an error drops it and keeps the old.

        Raises:
            CaptureError: the stream is capturing and the block would have to grow, or was last
                used on another stream.
            LeaseRefusedError, AllocationFailedError: as the allocator.
            ClosedError: the workspace is closed.

        Stream: work on another stream than the last one waits for that on the device. A block that
            is replaced is freed once its streams have passed; graphs with a handle of their own
            keep it alive beyond that.
        """
        if self._is_closed:
            raise ClosedError(f"workspace of {self._holder}")
        self._order_after_last(stream)
        if stream.is_capturing:
            block = self._for_recording(nbytes)
            keep(block)  # whether or not the kernel names it among its graph resources
            yield block
            return
        self._last_stream = stream
        if self._block is not None and self._block.nbytes >= nbytes:
            yield self._block
            return
        with ExitStack() as undo:
            role = Role.WORKSPACE
            candidate = undo.enter_context(
                GraphAllocation.allocate(self._allocator, nbytes, role=role, holder=self._holder)
            )
            undo.callback(_wait_quietly, stream)  # what was launched before the error uses it
            yield candidate
            undo.pop_all()
        replaced, self._block = self._block, candidate
        self.num_allocations += 1
        if replaced is not None:
            replaced.close()

    def _for_recording(self, nbytes: int) -> GraphAllocation:
        if self._graph_block is not None and self._graph_block.nbytes >= nbytes:
            return self._graph_block
        if self._block is None or self._block.nbytes < nbytes:
            raise CaptureError("record", self._growth_refusal(nbytes))
        replaced, self._graph_block, self._block = self._graph_block, self._block, None
        if replaced is not None:
            replaced.close()
        return self._graph_block

    def _order_after_last(self, stream: WorkspaceStream) -> None:
        last = self._last_stream
        if last is None or last is stream or last.is_closed or stream.order is last:
            return
        if stream.is_capturing:
            raise CaptureError(
                "record",
                f"the workspace of {self._holder} was last used on another stream;"
                " run once on this stream before capture",
            )
        stream.wait_for(last)

    def _growth_refusal(self, nbytes: int) -> str:
        return (
            f"{self._holder} needs a workspace of {nbytes:,} B and has"
            f" {self.recordable_nbytes:,} B, and nothing may be allocated while recording; run this"
            " shape once before capture"
        )

    def close(self) -> None:
        """Give up the blocks; graphs that hold one keep it alive. A second call does nothing."""
        self._is_closed = True
        blocks, self._block, self._graph_block = (self._block, self._graph_block), None, None
        for block in blocks:
            if block is not None:
                block.close()


def _wait_quietly(stream: WorkspaceStream) -> None:
    with suppress(NxrtError):
        stream.synchronize()
