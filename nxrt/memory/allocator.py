"""Charged memory: a raw allocator, wrapped so that the governor is asked before every allocation.

The raw allocators of devices and of pinned memory are in `nxrt.runtime`; here are the protocol,
the wrapper, and plain host memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import AllocationFailedError, ClosedError, DriverError
from nxrt.locks import new_lock
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

    def deallocate(
        self,
        pointer: int,
        nbytes: int,
        settle: Callable[[], None],
        *,
        after: Sequence[Any] = (),
    ) -> None:
        """Give back what `allocate` returned, after every use that was enqueued before.

        `after` names streams that may use it, beside those that the allocator knows.

        Does not wait and does not raise: `settle` is called, from any thread, once the memory
        really is back. Bytes that may still be taken are not offered to anybody else before that.
        """

    def reclaim(self) -> bool:
        """Wait for what was given back and is still in use; say whether that freed anything."""

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
        self._lock = new_lock()
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

    def close(self, *, after: Sequence[Any] = ()) -> None:
        """Free the memory, then give the lease back: at once, or when the device has passed it.

        Args:
            after: streams that may use it, beside those that the allocator knows.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._anchor = None
        if self.nbytes:
            self._allocator.deallocate(self._pointer, self.nbytes, self._lease.close, after=after)
        else:
            self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LeasedAllocator:
    """Wrap a raw allocator so that every byte is leased before it is allocated.

    Where the budget or the memory does not suffice, what was given back and is still in use is
    waited for; then the governor's reclaimers are asked, and what they gave back is waited for.

    Args:
        upstream: delivers the memory.
        governor: is asked first.
    """

    def __init__(self, upstream: Allocator, governor: MemoryGovernor) -> None:
        self._upstream = upstream
        self._governor = governor

    def allocate(self, nbytes: int, *, role: Role, holder: str, request: str = "") -> Buffer:
        """Reserve, then allocate; either both happen or neither.

        Args:
            nbytes: how many bytes.
            role: what for.
            holder: who.
            request: for which request, empty for none.

        Raises:
            LeaseRefusedError: the budget says no.
            AllocationFailedError: the budget says yes and the allocator no; the lease is back.
            DriverError: the driver failed for another reason; the lease is back.
            InvalidInputError: `nbytes` is not a size.
        """
        lease = self._governor.reserve(
            self._upstream.tier,
            nbytes,
            role=role,
            holder=holder,
            request=request,
            # What was closed while the device still used it is charged until it passed.
            settle=self._upstream.reclaim,
        )
        try:
            return Buffer(self._raw(lease), lease, self._upstream)
        except Exception:
            # After an interrupt nobody knows whether memory was taken, so that stays charged.
            lease.close()
            raise

    def _raw(self, lease: MemoryLease) -> int:
        if lease.nbytes == 0:
            return 0
        try:
            return self._allocated(lease.nbytes)
        except (MemoryError, DriverError) as error:
            if isinstance(error, DriverError) and error.code != OUT_OF_MEMORY:
                raise  # a lost context, say: not a matter of memory
            raise AllocationFailedError(
                str(lease.tier), requested=lease.nbytes, holder=lease.holder, reason=str(error)
            ) from error

    def _allocated(self, nbytes: int) -> int:
        asked: tuple[Callable[[], int], ...] = (
            self._upstream.reclaim,
            partial(self._relieve, nbytes),
        )
        remedies = iter(asked)
        while True:
            try:
                return self._upstream.allocate(nbytes)
            except (MemoryError, DriverError) as error:
                is_full = not isinstance(error, DriverError) or error.code == OUT_OF_MEMORY
                if not (is_full and any(remedy() for remedy in remedies)):
                    raise

    def _relieve(self, nbytes: int) -> int:
        """Ask others for memory that the budget admits and the device does not have."""
        upstream = self._upstream
        return self._governor.relieve(upstream.tier, nbytes, settle=upstream.reclaim)


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

    def deallocate(
        self,
        pointer: int,
        nbytes: int,  # noqa: ARG002  (the protocol's)
        settle: Callable[[], None],
        *,
        after: Sequence[Any] = (),  # noqa: ARG002
    ) -> None:
        """Let the bytes go; they stay as long as an array over them does."""
        del self._blocks[pointer]
        settle()

    def reclaim(self) -> bool:
        """Say no: nothing is ever given back late."""
        return False

    def anchor(self, pointer: int) -> object:
        """Return the block."""
        return self._blocks[pointer]
