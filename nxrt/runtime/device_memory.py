"""Raw device and page-locked memory, and stream-ordered copies.

Nothing here is charged: `nxrt.memory.LeasedAllocator` wraps these allocators, and only the wrapped
form is handed to anybody.
"""

from typing import Any

from numpy.typing import NDArray

from nxrt.memory.tier import PINNED, Tier, device_tier
from nxrt.runtime import driver
from nxrt.runtime.device import Device
from nxrt.runtime.stream import Stream
from nxrt.storage import CPU_DEVICE, DeviceId


class DeviceAllocator:
    """Deliver device memory; the driver aligns it to 512 bytes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.tier: Tier = device_tier(device.id.ordinal)
        self.device: DeviceId = device.id

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` > 0 new bytes. Raises DriverError."""
        with self._device.current():
            return int(driver.call(driver.api.cuMemAlloc, nbytes))

    def deallocate(self, pointer: int, nbytes: int) -> None:  # noqa: ARG002  (the protocol's)
        """Free; the driver waits for every kernel that was enqueued before."""
        with self._device.current():
            driver.call(driver.api.cuMemFree, pointer)

    def anchor(self, pointer: int) -> object:  # noqa: ARG002  (the protocol's)
        """Return None: what is freed is gone."""
        return None


class PinnedAllocator:
    """Deliver page-locked host memory, which copies reach without a detour."""

    tier: Tier = PINNED
    device: DeviceId = CPU_DEVICE

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocate(self, nbytes: int) -> int:
        """Return the address of `nbytes` > 0 new bytes. Raises DriverError."""
        with self._device.current():
            return int(driver.call(driver.api.cuMemAllocHost, nbytes))

    def deallocate(self, pointer: int, nbytes: int) -> None:  # noqa: ARG002  (the protocol's)
        """Free; the driver waits as for device memory."""
        with self._device.current():
            driver.call(driver.api.cuMemFreeHost, pointer)

    def anchor(self, pointer: int) -> object:  # noqa: ARG002  (the protocol's)
        """Return None: what is freed is gone."""
        return None


def copy_to_device(pointer: int, source: NDArray[Any], *, stream: Stream) -> None:
    """Enqueue a copy of a C-contiguous host array.

    Stream: the source must stay alive and unchanged until the stream has passed the copy.
    """
    if source.nbytes:
        address = source.__array_interface__["data"][0]
        driver.call(driver.api.cuMemcpyHtoDAsync, pointer, address, source.nbytes, stream.handle)


def copy_to_host(target: NDArray[Any], pointer: int, *, stream: Stream) -> None:
    """Enqueue a copy into a C-contiguous host array.

    Stream: the target holds the bytes once the stream has passed the copy.
    """
    if target.nbytes:
        address = target.__array_interface__["data"][0]
        driver.call(driver.api.cuMemcpyDtoHAsync, address, pointer, target.nbytes, stream.handle)


def copy_on_device(target: int, source: int, nbytes: int, *, stream: Stream) -> None:
    """Enqueue a copy between two places of the same device."""
    if nbytes:
        driver.call(driver.api.cuMemcpyDtoDAsync, target, source, nbytes, stream.handle)


def fill_bytes(pointer: int, value: int, nbytes: int, *, stream: Stream) -> None:
    """Enqueue setting every byte to `value`."""
    if nbytes:
        driver.call(driver.api.cuMemsetD8Async, pointer, value, nbytes, stream.handle)
