"""Scratch memory of one kernel object: it grows, never shrinks, and never moves under a graph.

Growth is a transaction: the new block becomes the kernel's only after the launches that asked for
it were accepted. It works over any allocator.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from nxrt.errors import CaptureError, ClosedError
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.tier import Role
from nxrt.runtime.graph_memory import GraphAllocation


class WorkspaceStream(Protocol):
    """What a workspace needs to know of a stream."""

    @property
    def is_capturing(self) -> bool:
        """Say whether the stream is being recorded."""

    def synchronize(self) -> None:
        """Wait for everything enqueued."""


class Workspace:
    """Own the scratch block of one kernel object.

    Not locked: the kernel that owns it serialises its own executions.

    Args:
        allocator: charges and delivers the memory.
        holder: named in reports and refusals.
    """

    def __init__(self, allocator: LeasedAllocator, *, holder: str) -> None:
        self._allocator = allocator
        self._holder = holder
        self._block: GraphAllocation | None = None
        self._last_stream: WorkspaceStream | None = None
        self._is_closed = False
        self.num_allocations = 0

    @property
    def block(self) -> GraphAllocation | None:
        """Return the published block, None before the first success."""
        return self._block

    @contextmanager
    def lend(self, nbytes: int, *, stream: WorkspaceStream) -> Iterator[GraphAllocation]:
        """Lend a block of at least `nbytes` for launches on `stream` made inside the with-block.

        Leaving normally publishes a grown block; leaving by an error drops it and keeps the old.

        Raises:
            CaptureError: the stream is capturing and the block would have to grow, or was last
                used on another stream.
            LeaseRefusedError, AllocationFailedError: as the allocator.
            ClosedError: the workspace is closed.

        Stream: a block that is replaced is given up only after its last stream is idle; graphs
            with a handle of their own keep it alive beyond that.
        """
        if self._is_closed:
            raise ClosedError(f"workspace of {self._holder}")
        self._require_order(stream)
        if self._block is not None and self._block.nbytes >= nbytes:
            self._last_stream = stream
            yield self._block
            return
        if stream.is_capturing:
            raise CaptureError("record", self._growth_refusal(nbytes))
        with ExitStack() as undo:
            role = Role.WORKSPACE
            candidate = undo.enter_context(
                GraphAllocation.allocate(self._allocator, nbytes, role=role, holder=self._holder)
            )
            yield candidate
            undo.pop_all()
        self._publish(candidate, stream)

    def _publish(self, candidate: GraphAllocation, stream: WorkspaceStream) -> None:
        replaced, self._block = self._block, candidate
        self._last_stream = stream
        self.num_allocations += 1
        if replaced is not None:
            try:
                stream.synchronize()
            finally:
                replaced.close()

    def _require_order(self, stream: WorkspaceStream) -> None:
        if self._last_stream in (None, stream):
            return
        if stream.is_capturing:
            raise CaptureError(
                "record",
                f"the workspace of {self._holder} was last used on another stream;"
                " run once on this stream before capture",
            )
        self._last_stream.synchronize()

    def _growth_refusal(self, nbytes: int) -> str:
        held = 0 if self._block is None else self._block.nbytes
        return (
            f"{self._holder} needs a workspace of {nbytes:,} B and has {held:,} B, and nothing may"
            " be allocated while recording; run this shape once before capture"
        )

    def close(self) -> None:
        """Give up the block; graphs that hold it keep it alive. A second call does nothing."""
        self._is_closed = True
        if self._block is not None:
            self._block.close()
            self._block = None
