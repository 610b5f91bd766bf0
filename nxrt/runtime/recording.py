"""Know whether this thread records a graph, and hold back what would break the recording.

The driver refuses some calls of a recording thread (waiting, allocating, freeing) and then drops
the recording. Here they are refused before the driver sees them, or done afterwards. Threads that
do not record are never held up.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from nxrt.errors import CaptureError

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Thread(threading.local):
    held_back: list[Callable[[], None]] | None = None
    refusal: CaptureError | None = None


_thread = _Thread()


def is_recording() -> bool:
    """Say whether this thread records a graph."""
    return _thread.held_back is not None


def refuse_recording(action: str) -> None:
    """Raise CaptureError where this thread records: `action` would break the recording."""
    if _thread.held_back is not None:
        problem = f"{action} while this thread records a graph; do so outside"
        refusal = CaptureError("record", problem)
        _thread.refusal = _thread.refusal or refusal
        raise refusal


def refused() -> CaptureError | None:
    """Return the first thing that was refused to this thread's recording, if any."""
    return _thread.refusal


def when_recorded(action: Callable[[], None]) -> None:
    """Run an action now, or at the end of the recording that this thread makes."""
    if _thread.held_back is None:
        action()
    else:
        _thread.held_back.append(action)


def while_recording(action: Callable[[], _T]) -> _T:
    """Return what `action` returns, counting this thread as recording meanwhile.

    What was held back runs at the end. Where that fails it is logged, and the rest still runs:
    nobody is left who could be told.

    Raises:
        CaptureError: this thread records already.
    """
    if _thread.held_back is not None:
        problem = "this thread records a graph already; end that recording first"
        raise CaptureError("begin", problem)
    held_back: list[Callable[[], None]] = []
    try:
        _thread.refusal = None
        _thread.held_back = held_back
        return action()
    finally:
        # No call comes before this, so no interrupt can leave the thread marked for ever.
        _thread.held_back = None
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
