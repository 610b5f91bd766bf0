"""Give driver objects back: once their last use has passed, exactly once, whatever fails.

A release never raises and never waits. One whose fences have not passed, or that the driver
refused, is kept and tried again. On a lost device the driver is not asked: what it held is gone.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from nxrt.errors import ClosedError, NxrtError
from nxrt.locks import new_lock, new_rlock
from nxrt.runtime import driver
from nxrt.runtime.recording import is_recording, when_recorded

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 8


class Fence(Protocol):
    """A point in a stream."""

    def is_reached(self) -> bool:
        """Say, without waiting, whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait for it."""

    def close(self) -> None:
        """Give it up; may be repeated."""


class Fenced(Protocol):
    """A stream, as far as releases know one; a closed one has nothing left to wait for."""

    @property
    def is_closed(self) -> bool:
        """Say whether it was closed, after all its work."""

    def synchronize(self) -> None:
        """Wait for everything enqueued."""

    def fence(self) -> Fence:
        """Mark the point after everything enqueued so far."""


class ReleasingDevice(Protocol):
    """A device, as far as releases know one."""

    @property
    def is_lost(self) -> bool:
        """Say whether the driver must not be asked any more."""

    def create(self, function: Callable[..., Any], *args: Any) -> Any:
        """Make a driver call with the device's context current."""


@dataclass
class _Release:
    """One driver object to give back."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    fences: list[Fence]
    settle: Callable[[], None]
    streams: tuple[int, ...] = ()
    num_attempts: int = 0
    is_called: bool = False
    is_over: bool = False
    is_settled: bool = False
    is_busy: bool = False

    @property
    def is_kept(self) -> bool:
        """Say whether there is something left to do.

        Where an interrupt came while the driver was asked nobody knows its answer: losing track of
        one object is better than releasing it twice.
        """
        is_unknown = self.is_called and not self.is_over
        return not self.is_settled and not is_unknown

    @property
    def call(self) -> Callable[[], Any]:
        """Return the driver's call with its arguments, under the function's own name."""

        def make() -> Any:
            self.is_called = True
            return self.function(*self.args)

        make.__name__ = self.function.__name__
        return make


class ReleaseQueue:
    """Hold what a device's objects still have to give back; safe to use from any thread."""

    def __init__(self, device: ReleasingDevice) -> None:
        self._device = device
        self._lock = new_lock()
        # Held while releases are made, so that a drain returns after those of other threads too.
        self._attempting = new_rlock()
        self._pending: list[_Release] = []

    @property
    def num_pending(self) -> int:
        """Return how many releases are kept."""
        return len(self._pending)

    def submit(
        self,
        function: Callable[..., Any],
        *args: Any,
        after: Sequence[Fenced] = (),
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a releasing driver call, now or as soon as it may be made.

        Args:
            function: the driver's.
            args: its arguments.
            after: the streams that may still use what is released.
            settle: called once the driver has taken it back, or has lost it; must not raise, and
                is called again where an interrupt came between.
        """
        when_recorded(lambda: self._submit(function, args, after, settle))

    def drop(self, references: Sequence[object], *, after: Sequence[Fenced]) -> None:
        """Keep references to what is not ours until the streams have passed their last use."""
        kept = list(references)
        if kept:
            self.submit(_do_nothing, after=after, settle=kept.clear)

    def poll(self) -> int:
        """Make every call that may be made now; return how many were settled."""
        if is_recording():
            return 0
        with self._attempting:
            return self._attempt(tuple(self._pending))

    def drain(self) -> int:
        """Wait for all fences, then as `poll`; return how many of what was kept are settled.

        Raises:
            DriverError: a kernel failed; everything was settled all the same.
            CaptureError: this thread records.
        """
        releases = tuple(self._pending)
        try:
            for release in releases:
                for fence in tuple(release.fences):
                    with suppress(ClosedError):  # by a thread that has settled the release
                        fence.synchronize()
        finally:
            self.poll()
        return sum(release.is_settled for release in releases)

    def _submit(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        after: Sequence[Fenced],
        settle: Callable[[], None],
    ) -> None:
        release = _Release(function, args, [], settle, tuple(map(id, after)))
        try:
            if not self._device.is_lost:
                release.fences += (_fence(stream) for stream in after)
        finally:  # an interrupt must not lose it
            with self._lock:
                self._pending.append(release)
        if after:
            self.poll()
        else:  # nothing to wait for; the others are somebody else's
            with self._attempting:
                self._attempt((release,))

    def _attempt(self, releases: Sequence[_Release]) -> int:
        num_settled = 0
        busy: set[int] = set()  # streams that have not reached an earlier fence, nor later ones
        try:
            for release in releases:
                # One that is being made already has come here again, by giving up a fence.
                if release.is_busy or not busy.isdisjoint(release.streams):
                    continue
                release.is_busy = True
                try:
                    if self._is_done(release):
                        num_settled += 1
                        _settle(release)
                    elif not release.is_called:
                        busy.update(release.streams)
                finally:
                    release.is_busy = False
        finally:
            with self._lock:
                self._pending = [release for release in self._pending if release.is_kept]
        return num_settled

    def _is_done(self, release: _Release) -> bool:
        if release.is_over or self._device.is_lost:
            return True
        try:
            if not all(fence.is_reached() for fence in release.fences):
                return self._device.is_lost
            self._device.create(release.call)
        except NxrtError as error:
            release.is_called = False
            return self._device.is_lost or self._is_given_up(release, error)
        release.is_over = True
        return True

    def _is_given_up(self, release: _Release, error: NxrtError) -> bool:
        release.num_attempts += 1
        if release.num_attempts < _MAX_ATTEMPTS:
            return False
        # What it pays for may still be taken, and must not be offered to anybody else.
        _log.error("gave up releasing after %d attempts: %s", release.num_attempts, error)
        release.settle = lambda: None
        return True


def _do_nothing() -> tuple[Any]:
    """Stand in for a driver call that always works."""
    return (driver.SUCCESS,)


class _WholeStream:
    """Stand in for a fence that could not be set: only waiting for the whole stream is safe."""

    def __init__(self, stream: Fenced) -> None:
        self._stream = stream

    def is_reached(self) -> bool:
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if not self._stream.is_closed:
            self._stream.synchronize()

    def close(self) -> None:
        """Do nothing."""


def _fence(stream: Fenced) -> Fence:
    try:
        return stream.fence()
    except NxrtError:
        return _WholeStream(stream)


def _settle(release: _Release) -> None:
    for fence in release.fences:
        fence.close()
    try:
        release.settle()  # may be repeated, should an interrupt come now
    except Exception:  # noqa: BLE001  (nobody is left who could be told)
        _log.exception("settling a release failed")
    release.is_settled = True
