"""Streams and events: the order in which a device works, and points in it.

A stream made here never synchronises with the legacy default stream.
"""

from collections.abc import Callable
from typing import Any, Self

from nxrt.errors import CaptureError, ClosedError, DriverError, InvalidInputError
from nxrt.runtime import driver
from nxrt.runtime.device import Device
from nxrt.runtime.inside import Inside
from nxrt.runtime.recording import is_recording, refuse_recording
from nxrt.storage import checked_int

_NOT_READY = 600


class Stream:
    """Own a non-blocking stream of a device. Any thread may call.

    Args:
        device: where the stream's work runs.
        replayed_on: for a stream that a graph is recorded from: where the graph will be replayed.
    """

    def __init__(self, device: Device, *, replayed_on: "Stream | None" = None) -> None:
        self.device = device
        self._replayed_on = replayed_on
        flags = driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._native = device.create(driver.api.cuStreamCreate, flags)
        self._handle = int(self._native)
        self.is_closed = False
        self._inside = Inside()

    @property
    def handle(self) -> int:
        """Return the driver's handle as an integer."""
        if self.is_closed:
            raise ClosedError("stream")
        return self._handle

    @property
    def native(self) -> driver.Handle:
        """Return what the driver's functions take fastest; raises ClosedError."""
        if self.is_closed:
            raise ClosedError("stream")
        return self._native

    @property
    def is_capturing(self) -> bool:
        """Say whether what is enqueued here becomes part of a graph instead of running."""
        return self._replayed_on is not None

    @property
    def order(self) -> object:
        """Return what names the order of this stream's work: for a recording, the replays'."""
        return self._replayed_on or self

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Make a driver call that names this stream, which is not destroyed meanwhile.

        Raises: as `Device.call`, and ClosedError.
        """
        return self._inside.run(self._call_open, function, *args)

    def _call_open(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.is_closed:
            raise ClosedError("stream")
        return self.device.call(function, *args)

    def require_usable(self) -> None:
        """Raise where work enqueued here would not go where it should.

        Raises:
            CaptureError: this thread records a graph from another stream: the work would run now
                and be missing in every replay.
            ClosedError: the stream is closed.
        """
        if self.is_closed:
            raise ClosedError("stream")
        if is_recording() and not self.is_capturing:
            refuse_recording("work was enqueued on a stream that is not the recorded one")

    def synchronize(self) -> None:
        """Wait until everything enqueued so far is done; reports faults of earlier kernels.

        Raises:
            DriverError: a kernel failed.
            CaptureError: this thread records a graph. The driver is not asked, as its refusal
                would invalidate the recording.
        """
        refuse_recording("a stream was synchronized")
        self.call(driver.api.cuStreamSynchronize, self.handle)

    def fence(self) -> "Event":
        """Return a new event after everything enqueued so far. Raises DriverError, ClosedError."""
        self.handle  # noqa: B018  (raises where there is no stream to mark)
        event = Event(self.device)
        try:
            event.record(self)
        except BaseException:
            event.close()
            raise
        return event

    def wait_for(self, other: "Stream") -> None:
        """Make what is enqueued here from now on wait for what `other` has so far.

        Raises:
            DriverError, CaptureError, ClosedError: nothing was enqueued here.

        Stream: nothing waits on the host.
        """
        if other is self:
            return
        self.require_usable()
        event = other.fence()
        try:
            self.call(driver.api.cuStreamWaitEvent, self.handle, event.handle, 0)
        finally:
            event.close()

    def close(self) -> None:
        """Give the stream up; the driver destroys it once its work is done. May be repeated.

        Waits for calls of other threads that name the stream.
        """
        if not self.is_closed:
            self.is_closed = True
            if self._inside.wait_until_empty():
                self.device.releases.submit(driver.api.cuStreamDestroy, self._native)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ForeignStream(Stream):
    """Stand for a stream that somebody else owns, who keeps it alive and destroys it.

    Args:
        device: where the stream must be.
        stream: an object with `__cuda_stream__`, as cuda.core, CuPy and PyTorch have, or the
            driver's handle as an integer; 0 is the legacy default stream.

    Raises:
        InvalidInputError: it is no stream, or one of another device.
        CaptureError: its owner is capturing it.
    """

    def __init__(self, device: Device, stream: object) -> None:
        self.device = device
        self._replayed_on = None
        self.is_closed = False
        self._owner = stream  # kept referenced
        self._native = self._handle = _handle_of(stream)
        # Asked first: any other question about the stream would end its owner's capture.
        status = device.create(driver.api.cuStreamIsCapturing, self._handle)
        if int(status) != 0:
            raise CaptureError(
                "record",
                "the stream is being captured by its owner, and such a graph would not keep what"
                " nxrt enqueues alive; capture through a session and replay that graph",
            )
        ordinal = int(device.create(driver.api.cuStreamGetDevice, self._handle))
        if ordinal != device.id.ordinal:
            found, accepted = f"a stream of device {ordinal}", f"a stream of {device.id}"
            raise InvalidInputError("stream", found=found, accepted=accepted)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Make a driver call with the device's context current: handle 0 means that context's."""
        return self.device.create(function, *args)

    def close(self) -> None:
        """Forget the stream; its owner destroys it."""
        self.is_closed = True


def _handle_of(stream: object) -> int:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        handle = checked_int("stream", stream)
    else:
        handle = _answered(protocol() if callable(protocol) else protocol)
    if not 0 <= handle < 2**64:
        raise InvalidInputError("stream", found=repr(handle), accepted="a driver handle")
    return handle


def _answered(answer: Any) -> int:
    try:
        return int(answer[1])
    except (TypeError, IndexError, KeyError, ValueError) as error:
        accepted = "(version, handle) from __cuda_stream__"
        raise InvalidInputError("stream", found=repr(answer), accepted=accepted) from error


class Event:
    """Own a point in a stream that can be waited for, and timed against another."""

    def __init__(self, device: Device, *, is_timed: bool = False) -> None:
        self.device = device
        kinds = driver.api.CUevent_flags
        flags = kinds.CU_EVENT_DEFAULT if is_timed else kinds.CU_EVENT_DISABLE_TIMING
        self._event = device.create(driver.api.cuEventCreate, flags)
        self._is_closed = False
        self._inside = Inside()

    @property
    def handle(self) -> driver.Handle:
        """Return the driver's handle; raises ClosedError."""
        if self._is_closed:
            raise ClosedError("event")
        return self._event

    def record(self, stream: Stream) -> None:
        """Mark the point after everything enqueued on the stream so far."""
        self._inside.run(self._record, stream)

    def _record(self, stream: Stream) -> None:
        stream.call(driver.api.cuEventRecord, self.handle, stream.handle)

    def is_reached(self) -> bool:
        """Say, without waiting, whether the stream has passed the marked point.

        Raises:
            DriverError: a kernel failed.
            CaptureError: this thread records a graph.
        """
        refuse_recording("an event was queried")
        try:
            self._inside.run(self._call_open, driver.api.cuEventQuery)
        except DriverError as error:
            if error.code == _NOT_READY:
                return False
            raise
        return True

    def synchronize(self) -> None:
        """Wait until the marked point is reached; returns at once if never recorded.

        Raises:
            DriverError: a kernel failed.
            CaptureError: this thread records a graph.
        """
        refuse_recording("an event was waited for")
        self._inside.run(self._call_open, driver.api.cuEventSynchronize)

    def _call_open(self, function: Callable[..., Any]) -> None:
        self.device.call(function, self.handle)

    def elapsed_us(self, since: "Event") -> float:
        """Return the microseconds of device time between two timed, reached events."""
        function = getattr(driver.api, "cuEventElapsedTime_v2", driver.api.cuEventElapsedTime)
        return float(self.device.call(function, since.handle, self.handle)) * 1e3

    def close(self) -> None:
        """Destroy the event; a second call does nothing. Waits for calls of other threads."""
        if not self._is_closed:
            self._is_closed = True
            if self._inside.wait_until_empty():
                self.device.releases.submit(driver.api.cuEventDestroy, self._event)
