"""Know whether this thread records a graph, and hold back what would break the recording.

The driver refuses some calls of a recording thread (waiting, allocating, freeing) and then drops
the recording. Here they are refused before the driver sees them, or done afterwards. Threads that
do not record are never held up.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, TypeVar

from nxrt.errors import CaptureError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Closable(Protocol):
    """A handle."""

    def close(self) -> None:
        """Give it up; must not raise."""


class Shared(Protocol):
    """Memory of which further handles can be had."""

    def share(self) -> Closable:
        """Return one."""


class _Thread(threading.local):
    held_back: list[Callable[[], None]] | None = None
    refusal: CaptureError | None = None
    kept: ExitStack | None = None


this_thread = _Thread()
"""What this thread records: hot paths look at `held_back`, which is None while it does not."""


def is_recording() -> bool:
    """Say whether this thread records a graph."""
    return this_thread.held_back is not None


def refuse_recording(action: str) -> None:
    """Raise CaptureError where this thread records: `action` would break the recording."""
    if this_thread.held_back is not None:
        problem = f"{action} while this thread records a graph; do so outside"
        refusal = CaptureError("record", problem)
        this_thread.refusal = this_thread.refusal or refusal
        raise refusal


def refused() -> CaptureError | None:
    """Return the first thing that was refused to this thread's recording, if any."""
    return this_thread.refusal


def when_recorded(action: Callable[[], None]) -> None:
    """Run an action now, or at the end of the recording that this thread makes."""
    if this_thread.held_back is None:
        action()
    else:
        this_thread.held_back.append(action)


def keep(resource: Shared) -> None:
    """Let the graph that this thread records, if it does, hold a handle of its own on memory."""
    if this_thread.kept is not None:
        this_thread.kept.callback(resource.share().close)


def while_recording(action: Callable[[], _T], *, kept: ExitStack | None = None) -> _T:
    """Return what `action` returns, counting this thread as recording meanwhile.

    What was held back runs at the end. Where that fails it is logged, and the rest still runs:
    nobody is left who could be told.

    Args:
        action: records.
        kept: takes the handles on what `keep` is called with.

    Raises:
        CaptureError: this thread records already.
    """
    if this_thread.held_back is not None:
        problem = "this thread records a graph already; end that recording first"
        raise CaptureError("begin", problem)
    held_back: list[Callable[[], None]] = []
    try:
        this_thread.refusal, this_thread.kept = None, kept
        this_thread.held_back = held_back
        return action()
    finally:
        # No call comes before this, so no interrupt can leave the thread marked for ever.
        this_thread.held_back = this_thread.kept = None
        _run_all(held_back)


def _run_all(actions: list[Callable[[], None]]) -> None:
    interrupt: BaseException | None = None
    for action in actions:
        try:
            action()
        except Exception:  # noqa: BLE001  (whatever it is, the others still have to run)
            _log.exception("an action held back by a recording failed")
        except BaseException as error:  # noqa: BLE001  (raised once everything has run)
            interrupt = error
    if interrupt is not None:
        raise interrupt
