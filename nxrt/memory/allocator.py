"""Charged memory: a raw allocator, wrapped so that the governor is asked before every allocation.

The raw allocators of devices and of pinned memory are in `nxrt.runtime`; here are the protocol,
the wrapper, and plain host memory.
"""

import threading
from contextlib import ExitStack
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import AllocationFailedError, ClosedError, DriverError
from nxrt.memory.deferral import release
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, Role, Tier
from nxrt.storage import CPU_DEVICE, DeviceId

OUT_OF_MEMORY = 2
"""The driver's code for it."""


class Allocator(Protocol):
    """Deliver raw memory of one tier; implementers may block and are called from any thread."""

    @property
    def tier(self) -> Tier:
        """Return the tier to charge."""

    @property
    def device(self) -> DeviceId:
        """Return the device on which the addresses are valid."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` > 0 new bytes, aligned to at least 256.

        Raises:
            MemoryError, DriverError: no memory was taken.
        """

    def deallocate(self, pointer: int, nbytes: int) -> None:
        """Give back what `allocate` returned, after every use that was enqueued before."""

    def anchor(self, pointer: int) -> object:
        """Return what keeps the memory valid beyond `deallocate`, None where nothing can."""


class Buffer:
    """Own allocated bytes together with the lease that pays for them; implements Storage.

    A context manager; `close` frees once, may be repeated, and may be called from any thread. A
    buffer of 0 bytes has address 0 and asks nothing of the allocator.
    """

    def __init__(self, pointer: int, lease: MemoryLease, allocator: Allocator) -> None:
        self._pointer = pointer
        self._lease = lease
        self._allocator = allocator
        self._lock = threading.Lock()
        self._anchor = allocator.anchor(pointer) if lease.nbytes else None
        self._is_closed = False

    @property
    def anchor(self) -> object:
        """Return what keeps host memory valid for arrays over it, None for other memory."""
        return self._anchor

    @property
    def pointer(self) -> int:
        """Return the address; raises ClosedError once the memory has been given back."""
        if self._is_closed:
            raise ClosedError(f"buffer of {self.nbytes:,} B held by {self._lease.holder!r}")
        return self._pointer

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self._lease.nbytes

    @property
    def device(self) -> DeviceId:
        """Return the device on which the address is valid."""
        return self._allocator.device

    def close(self) -> None:
        """Free the memory, then give the lease back; after the recording, if this thread records.

        Should freeing fail, the lease stays charged: bytes that may still be taken are not offered
        to anybody else.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        release(self._give_back)

    def _give_back(self) -> None:
        if self.nbytes:
            self._allocator.deallocate(self._pointer, self.nbytes)
        self._anchor = None
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LeasedAllocator:
    """Wrap a raw allocator so that every byte is leased before it is allocated.

    Args:
        upstream: delivers the memory.
        governor: is asked first.
    """

    def __init__(self, upstream: Allocator, governor: MemoryGovernor) -> None:
        self._upstream = upstream
        self._governor = governor

    def allocate(self, nbytes: int, *, role: Role, holder: str) -> Buffer:
        """Reserve, then allocate; either both happen or neither.

        Raises:
            LeaseRefusedError: the budget says no.
            AllocationFailedError: the budget says yes and the allocator no; the lease is back.
            DriverError: the driver failed for another reason; the lease is back.
            InvalidInputError: `nbytes` is not a size.
        """
        with ExitStack() as undo:
            tier = self._upstream.tier
            lease = undo.enter_context(
                self._governor.reserve(tier, nbytes, role=role, holder=holder)
            )
            buffer = Buffer(self._raw(lease), lease, self._upstream)
            undo.pop_all()
            return buffer

    def _raw(self, lease: MemoryLease) -> int:
        if lease.nbytes == 0:
            return 0
        try:
            return self._upstream.allocate(lease.nbytes)
        except (MemoryError, DriverError) as error:
            if isinstance(error, DriverError) and error.code != OUT_OF_MEMORY:
                raise  # a lost context, say: not a matter of memory
            raise AllocationFailedError(
                str(lease.tier), requested=lease.nbytes, holder=lease.holder, reason=str(error)
            ) from error


class HostAllocator:
    """Deliver plain host memory, aligned to 256 bytes."""

    tier = HOST
    device = CPU_DEVICE
    _ALIGNMENT = 256

    def __init__(self) -> None:
        self._blocks: dict[int, NDArray[Any]] = {}

    def allocate(self, nbytes: int) -> int:
        """Return the address of new, uninitialised bytes. Raises MemoryError."""
        try:
            block = np.empty(nbytes + self._ALIGNMENT - 1, np.uint8)
        except ValueError as error:  # NumPy's answer to a size that no address space has
            raise MemoryError(str(error)) from error
        base: int = block.__array_interface__["data"][0]
        pointer = -(-base // self._ALIGNMENT) * self._ALIGNMENT
        self._blocks[pointer] = block
        return pointer

    def deallocate(self, pointer: int, nbytes: int) -> None:  # noqa: ARG002  (the protocol's)
        """Let the bytes go; they stay as long as an array over them does."""
        del self._blocks[pointer]

    def anchor(self, pointer: int) -> object:
        """Return the block."""
        return self._blocks[pointer]
