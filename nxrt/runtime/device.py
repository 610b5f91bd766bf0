"""One CUDA device: its primary context, its capabilities, and who is current.

Streams, memory and modules are made from a Device by the other modules of this folder.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nxrt.errors import ClosedError, InvalidInputError
from nxrt.runtime import driver
from nxrt.storage import DeviceId, DeviceType


@dataclass(frozen=True)
class Capabilities:
    """Report what a device can do.

    Args:
        name: the product's name.
        compute_capability: (major, minor).
        num_multiprocessors: how many.
        max_grid_x: blocks along x in one launch.
        total_memory: bytes.
        l2_nbytes: bytes of L2 cache.
        clock_hz: the highest clock of the multiprocessors.
    """

    name: str
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    max_grid_x: int
    total_memory: int
    l2_nbytes: int
    clock_hz: int

    @property
    def arch(self) -> str:
        """Return the compile target of exactly this device, such as "sm_90a".

        From 9.0 on, the architecture-specific instructions need the "a" suffix; such code runs on
        no other architecture, which is what a cubin for this device is anyway.
        """
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    @property
    def lanes_per_multiprocessor(self) -> int:
        """Return how many float32 operations a multiprocessor starts in one cycle.

        Source: CUDA C++ Programming Guide, table of arithmetic throughputs.
        """
        return 64 if self.compute_capability in ((7, 5), (8, 0)) else 128


class Device:
    """Hold the primary context of one device, shared with every other library in the process.

    Args:
        ordinal: as the driver counts.

    Raises:
        DriverUnavailableError: there is no driver or no device.
        InvalidInputError: there is no device of that number.
    """

    def __init__(self, ordinal: int = 0) -> None:
        driver.require()
        count = driver.call(driver.api.cuDeviceGetCount)
        if isinstance(ordinal, bool) or not isinstance(ordinal, int) or not 0 <= ordinal < count:
            raise InvalidInputError("device", found=repr(ordinal), accepted=f"0 to {count - 1}")
        self.id = DeviceId(DeviceType.CUDA, ordinal)
        self._handle = driver.call(driver.api.cuDeviceGet, ordinal)
        self.capabilities = _read_capabilities(self._handle)
        self._context = driver.call(driver.api.cuDevicePrimaryCtxRetain, self._handle)
        self._num_users = 1
        self._lock = threading.Lock()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device's context current on this thread, and put back what was before."""
        if self._num_users == 0:
            raise ClosedError(f"device {self.id}")
        driver.call(driver.api.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            driver.call(driver.api.cuCtxPopCurrent)

    def retain(self) -> None:
        """Add a user, who closes the device as well. Raises ClosedError on a closed device."""
        with self._lock:
            if self._num_users == 0:
                raise ClosedError(f"device {self.id}")
            self._num_users += 1

    def close(self) -> None:
        """Give up one use; the last releases the primary context. More closes do nothing."""
        with self._lock:
            is_last = self._num_users == 1
            self._num_users = max(0, self._num_users - 1)
        if is_last:
            driver.call(driver.api.cuDevicePrimaryCtxRelease, self._handle)


def _read_capabilities(handle: driver.Handle) -> Capabilities:
    attributes = driver.api.CUdevice_attribute

    def attribute(name: str) -> int:
        key = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.call(driver.api.cuDeviceGetAttribute, key, handle))

    name = driver.call(driver.api.cuDeviceGetName, 256, handle)
    return Capabilities(
        name=name.split(b"\0", maxsplit=1)[0].decode(),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        num_multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        max_grid_x=attribute("MAX_GRID_DIM_X"),
        total_memory=int(driver.call(driver.api.cuDeviceTotalMem, handle)),
        l2_nbytes=attribute("L2_CACHE_SIZE"),
        clock_hz=attribute("CLOCK_RATE") * 1000,
    )
