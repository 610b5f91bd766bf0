"""Raw device and page-locked memory, and stream-ordered copies.

Nothing here is charged: `nxrt.memory.LeasedAllocator` wraps these allocators, and only the wrapped
form is handed to anybody.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from numpy.typing import NDArray

from nxrt.errors import NxrtError
from nxrt.memory.tier import PINNED, Tier, device_tier
from nxrt.runtime import driver
from nxrt.runtime.device import Device, DeviceUse
from nxrt.runtime.recording import refuse_recording
from nxrt.runtime.stream import Stream
from nxrt.storage import CPU_DEVICE, DeviceId


class _DriverAllocator:
    """Allocate through the driver; each allocation keeps the device's context alive.

    Args:
        device: where.
        streams: whose work may use the memory; it is freed once they have passed what they had
            when it was given back.
    """

    tier: Tier
    device: DeviceId
    _allocate: Any
    _free: Any

    def __init__(self, device: Device, streams: Sequence[Stream] = ()) -> None:
        self._device = device
        self._streams = tuple(streams)
        self._uses: dict[int, DeviceUse] = {}

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` > 0 new bytes. Raises DriverError, CaptureError."""
        refuse_recording("memory was allocated")
        self._device.releases.poll()
        with ExitStack() as undo:
            use = self._device.retain()
            undo.callback(use.close)
            pointer = int(self._device.create(self._allocate, nbytes))
            self._uses[pointer] = use
            undo.pop_all()
            return pointer

    def deallocate(
        self,
        pointer: int,
        nbytes: int,  # noqa: ARG002  (the protocol's)
        settle: Callable[[], None],
        *,
        after: Sequence[Stream] = (),
    ) -> None:
        """Free once the streams have passed what they have now."""
        use = self._uses.pop(pointer)

        def settled() -> None:
            settle()
            use.close()

        streams = dict.fromkeys((*self._streams, *after))
        self._device.releases.submit(self._free, pointer, after=tuple(streams), settle=settled)

    def reclaim(self) -> bool:
        """Wait for what was given back; say whether anything was."""
        try:
            return self._device.releases.drain() > 0
        except NxrtError:  # the allocation that follows reports it
            return False

    def anchor(self, pointer: int) -> object:  # noqa: ARG002  (the protocol's)
        """Return None: what is freed is gone."""
        return None


class DeviceAllocator(_DriverAllocator):
    """Deliver device memory; the driver aligns it to 512 bytes."""

    _allocate = staticmethod(driver.api.cuMemAlloc)
    _free = staticmethod(driver.api.cuMemFree)

    def __init__(self, device: Device, streams: Sequence[Stream] = ()) -> None:
        super().__init__(device, streams)
        self.tier = device_tier(device.id.ordinal)
        self.device = device.id


class PinnedAllocator(_DriverAllocator):
    """Deliver page-locked host memory, which copies reach without a detour."""

    tier: Tier = PINNED
    device: DeviceId = CPU_DEVICE
    _allocate = staticmethod(driver.api.cuMemAllocHost)
    _free = staticmethod(driver.api.cuMemFreeHost)


def copy_to_device(pointer: int, source: NDArray[Any], *, stream: Stream) -> None:
    """Enqueue a copy of a C-contiguous host array.

    Raises:
        DriverError, CaptureError, ClosedError: nothing was enqueued; see `Stream.require_usable`.
        CaptureError: the stream is being recorded, and nothing would keep the array for replays.

    Stream: the source must stay alive and unchanged until the stream has passed the copy.
    """
    if source.nbytes:
        _require_running(stream)
        address = source.__array_interface__["data"][0]
        copy = driver.api.cuMemcpyHtoDAsync
        stream.device.call(copy, pointer, address, source.nbytes, stream.handle)


def copy_to_host(target: NDArray[Any], pointer: int, *, stream: Stream) -> None:
    """Enqueue a copy into a C-contiguous host array; raises as `copy_to_device`.

    Stream: the target holds the bytes once the stream has passed the copy.
    """
    if target.nbytes:
        _require_running(stream)
        address = target.__array_interface__["data"][0]
        copy = driver.api.cuMemcpyDtoHAsync
        stream.device.call(copy, address, pointer, target.nbytes, stream.handle)


def copy_on_device(target: int, source: int, nbytes: int, *, stream: Stream) -> None:
    """Enqueue a copy between two places of the same device; raises as `copy_to_device`."""
    if nbytes:
        stream.require_usable()
        copy = driver.api.cuMemcpyDtoDAsync
        stream.device.call(copy, target, source, nbytes, stream.handle)


def fill_bytes(pointer: int, value: int, nbytes: int, *, stream: Stream) -> None:
    """Enqueue setting every byte to `value`; raises as `copy_to_device`."""
    if nbytes:
        stream.require_usable()
        stream.device.call(driver.api.cuMemsetD8Async, pointer, value, nbytes, stream.handle)


def _require_running(stream: Stream) -> None:
    stream.require_usable()
    if stream.is_capturing:
        refuse_recording("a host array was copied")
