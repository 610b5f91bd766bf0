"""Streams and events: the order in which a device works, and points in it.

A stream here never synchronises with the legacy default stream.
"""

from typing import Self

from nxrt.errors import CaptureError, ClosedError
from nxrt.runtime import driver
from nxrt.runtime.device import Device


class Stream:
    """Own a non-blocking stream of a device.

    `is_capturing` is kept by GraphCapture, so that kernels can ask without a driver call.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_capturing = False
        flags = driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        with device.current():
            self._stream = driver.call(driver.api.cuStreamCreate, flags)
        self._is_closed = False

    @property
    def handle(self) -> int:
        """Return the driver's handle as an integer."""
        if self._is_closed:
            raise ClosedError("stream")
        return int(self._stream)

    def synchronize(self) -> None:
        """Wait until everything enqueued so far is done; reports faults of earlier kernels.

        Raises:
            DriverError: a kernel failed.
            CaptureError: the stream is being recorded. The driver is not asked, as its refusal
                would invalidate the recording.
        """
        self.refuse_capture("the stream was synchronized")
        with self.device.current():
            driver.call(driver.api.cuStreamSynchronize, self.handle)

    def refuse_capture(self, action: str) -> None:
        """Raise CaptureError where the stream is being recorded, which `action` would break."""
        if self.is_capturing:
            raise CaptureError("record", f"{action} while it is being recorded; do so outside")

    def close(self) -> None:
        """Destroy the stream once its work is done; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            with self.device.current():
                driver.call(driver.api.cuStreamDestroy, self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Event:
    """Own a point in a stream that can be waited for, and timed against another."""

    def __init__(self, device: Device, *, is_timed: bool = False) -> None:
        self.device = device
        kinds = driver.api.CUevent_flags
        flags = kinds.CU_EVENT_DEFAULT if is_timed else kinds.CU_EVENT_DISABLE_TIMING
        with device.current():
            self._event = driver.call(driver.api.cuEventCreate, flags)
        self._is_closed = False

    def record(self, stream: Stream) -> None:
        """Mark the point after everything enqueued on the stream so far."""
        with self.device.current():
            driver.call(driver.api.cuEventRecord, self._event, stream.handle)

    def synchronize(self) -> None:
        """Wait until the marked point is reached; returns at once if never recorded."""
        with self.device.current():
            driver.call(driver.api.cuEventSynchronize, self._event)

    def elapsed_us(self, since: "Event") -> float:
        """Return the microseconds of device time between two timed, reached events."""
        function = getattr(driver.api, "cuEventElapsedTime_v2", driver.api.cuEventElapsedTime)
        return float(driver.call(function, since._event, self._event)) * 1e3  # noqa: SLF001

    def close(self) -> None:
        """Destroy the event; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            with self.device.current():
                driver.call(driver.api.cuEventDestroy, self._event)
