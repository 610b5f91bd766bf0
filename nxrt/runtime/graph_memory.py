"""Memory that captured graphs may hold on to: an address fixed for life, owned by several.

A graph bakes addresses in. Each owner has a handle of its own on the allocation, and the bytes and
their lease go back when the last handle is closed. It works over any allocator.
"""

import itertools
from typing import Self

from nxrt.errors import ClosedError
from nxrt.locks import new_lock
from nxrt.memory.allocator import Buffer, LeasedAllocator
from nxrt.memory.tier import Role
from nxrt.storage import DeviceId

_identities = itertools.count(1)


class _SharedBuffer:
    """The one buffer behind all handles, and how many of them are open."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.identity = next(_identities)
        self.num_handles = 1
        self.streams: dict[object, None] = {}
        self.lock = new_lock()


class GraphAllocation:
    """Hold one handle on stable-address memory; implements Storage and GraphResource.

    A context manager; `close` gives up this handle exactly once. Any thread may share or close.
    """

    def __init__(self, shared: _SharedBuffer) -> None:
        self._shared = shared
        self._is_closed = False

    @classmethod
    def allocate(
        cls, allocator: LeasedAllocator, nbytes: int, *, role: Role, holder: str
    ) -> "GraphAllocation":
        """Allocate charged memory and return its first handle. Raises as LeasedAllocator does."""
        return cls(_SharedBuffer(allocator.allocate(nbytes, role=role, holder=holder)))

    @property
    def identity(self) -> int:
        """Return a number that no other allocation of this process has or will have."""
        return self._shared.identity

    @property
    def num_handles(self) -> int:
        """Return how many handles are open on the same memory."""
        return self._shared.num_handles

    @property
    def pointer(self) -> int:
        """Return the address; raises ClosedError on a closed handle."""
        if self._is_closed:
            raise ClosedError(f"graph allocation {self.identity}")
        return self._shared.buffer.pointer

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self._shared.buffer.nbytes

    @property
    def device(self) -> DeviceId:
        """Return the device on which the address is valid."""
        return self._shared.buffer.device

    @property
    def anchor(self) -> object:
        """Return the buffer's anchor."""
        return self._shared.buffer.anchor

    def share(self) -> "GraphAllocation":
        """Return another handle on the same memory. Raises ClosedError on a closed handle."""
        with self._shared.lock:
            if self._is_closed:
                raise ClosedError(f"graph allocation {self.identity}")
            self._shared.num_handles += 1
        return GraphAllocation(self._shared)

    def used_on(self, stream: object) -> None:
        """Note that a stream uses the memory, beside those its allocator knows; not for once."""
        with self._shared.lock:
            self._shared.streams[stream] = None

    def close(self) -> None:
        """Give up this handle; the last one frees the memory."""
        with self._shared.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._shared.num_handles -= 1
            is_last = self._shared.num_handles == 0
        if is_last:
            self._shared.buffer.close(after=tuple(self._shared.streams))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
