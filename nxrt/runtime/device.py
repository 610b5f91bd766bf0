"""One CUDA device: its primary context, its capabilities, and who is current.

Streams, memory and modules are made from a Device by the other modules of this folder.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from nxrt.errors import (
    ClosedError,
    DeviceLostError,
    DriverError,
    ForkedProcessError,
    InvalidInputError,
    NxrtError,
)
from nxrt.locks import new_lock
from nxrt.runtime import driver
from nxrt.runtime.recording import refuse_recording
from nxrt.runtime.release import ReleaseQueue
from nxrt.storage import DeviceId, DeviceType

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 8


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
        max_shared_nbytes: the most shared memory that a block can ask for.
    """

    name: str
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    max_grid_x: int
    total_memory: int
    l2_nbytes: int
    clock_hz: int
    max_shared_nbytes: int

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

    The context lives until the last `DeviceUse` is closed; the first belongs to whoever made the
    Device, who closes it with `close`. Any thread may call.

    A failure that destroys the context makes the device lost: from then on every call raises
    DeviceLostError without asking the driver, and releases do nothing.

    Args:
        ordinal: as the driver counts.

    Raises:
        DriverUnavailableError: there is no driver or no device.
        ForkedProcessError: the process is the forked child of one that used CUDA.
        InvalidInputError: there is no device of that number.
    """

    def __init__(self, ordinal: int = 0) -> None:
        driver.require()
        count = driver.call(driver.api.cuDeviceGetCount)
        if isinstance(ordinal, bool) or not isinstance(ordinal, int) or not 0 <= ordinal < count:
            raise InvalidInputError("device", found=repr(ordinal), accepted=f"0 to {count - 1}")
        self.id = DeviceId(DeviceType.CUDA, ordinal)
        self.fault: Callable[[], NxrtError] | None = None
        """Makes the error that every call raises; None while the device works."""
        self._handle = driver.call(driver.api.cuDeviceGet, ordinal)
        self.capabilities = _read_capabilities(self._handle)
        self._lock = new_lock()
        self._num_users = 0
        self.releases = ReleaseQueue(self)
        self._context = driver.call(driver.api.cuDevicePrimaryCtxRetain, self._handle)
        self._own_use = self.retain()
        driver.tell_when_forked(self)

    @property
    def is_lost(self) -> bool:
        """Say whether the driver is not asked any more: a fault, a fork, or everything closed."""
        return self.fault is not None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Make a driver call that needs no current context; see `driver.call`.

        Raises:
            DriverError: the call failed.
            DeviceLostError: an earlier one destroyed the context.
            ClosedError, ForkedProcessError: nobody uses the device any more, or it is the parent's.
        """
        if self.fault is not None:
            raise self.fault()
        try:
            return driver.call(function, *args)
        except DriverError as error:
            self.note(error)
            raise

    def create(self, function: Callable[..., Any], *args: Any) -> Any:
        """Make a driver call with this device's context current; raises as `call` does.

        What was current on this thread before is current again afterwards.
        """
        self.call(driver.api.cuCtxPushCurrent, self._context)
        try:
            return self.call(function, *args)
        finally:
            self._pop()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device's context current on this thread, and put back what was before.

        nxrt's own launches and copies need no current context; other libraries' may.
        """
        self.call(driver.api.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            self._pop()

    def note(self, error: DriverError) -> None:
        """Remember a failure after which the context never works again; the first one counts."""
        if error.code in driver.LOST_CODES and self.fault is None:
            self.fault = lambda: DeviceLostError(str(self.id), error)

    def failed(self, function: Callable[..., Any], outcome: Any) -> None:
        """Raise the typed error of a call made without `call`; nothing where it was a success.

        Args:
            function: the driver's.
            outcome: its status, or what the bindings raised.
        """
        error = driver.failure_of(function, outcome)
        if isinstance(error, DriverError):
            self.note(error)
        if error is not None:
            raise error
        if isinstance(outcome, BaseException):
            raise outcome

    def forked(self) -> None:
        """Take note of being the parent's; called in a forked child."""
        self.fault = ForkedProcessError

    def retain(self) -> "DeviceUse":
        """Add a user. Raises ClosedError on a device that nobody uses any more."""
        with self._lock:
            if self._num_users == 0 and hasattr(self, "_own_use"):
                raise ClosedError(f"device {self.id}")
            self._num_users += 1
        return DeviceUse(self)

    def close(self) -> None:
        """Wait for what is still given back, then give up the maker's use; may be repeated.

        Raises nothing, but CaptureError where this thread records a graph.
        """
        refuse_recording("a device was closed")
        with suppress(NxrtError):
            self.releases.drain()
        self._own_use.close()

    def _give_up(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
        try:
            with suppress(NxrtError):
                self.releases.drain()
            if not self.is_lost:
                self._insist(driver.api.cuDevicePrimaryCtxRelease, self._handle)
        finally:
            if self.fault is None:
                self.fault = lambda: ClosedError(f"device {self.id}")

    def _pop(self) -> None:
        # The result of the call in between must not be lost because of this one.
        self._insist(driver.api.cuCtxPopCurrent)

    def _insist(self, function: Callable[..., Any], *args: Any) -> None:
        """Make a call that gives something back: nobody could do better than to try again."""
        for _ in range(_MAX_ATTEMPTS):
            try:
                driver.call(function, *args)
            except DriverError as error:
                self.note(error)
                if self.is_lost:
                    return
                failure = error
            except NxrtError:  # a forked child
                return
            else:
                return
        _log.error("%s: gave up after %d attempts: %s", self.id, _MAX_ATTEMPTS, failure)


class DeviceUse:
    """Keep a device's context alive until closed; `close` counts once and raises nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = new_lock()
        self._is_closed = False

    def close(self) -> None:
        """Give up the use; the last one releases the context. May be repeated."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._device._give_up()  # noqa: SLF001  (a use is part of its device)


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
        max_shared_nbytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )
