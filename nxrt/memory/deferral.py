"""Hold releases back on a thread that must not make them now.

A thread that records a CUDA graph may not free: the driver refuses, and the recording is lost. This
is a queue for that thread and nothing else; whoever releases memory or code goes through it.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nxrt.errors import NxrtError

_log = logging.getLogger(__name__)
_thread = threading.local()


@contextmanager
def releases_deferred() -> Iterator[None]:
    """Hold back, inside the with-block, what this thread releases; run it at the end.

    Blocks may be nested; the outermost runs everything, in order. A release that fails then is
    logged, and the rest still runs: nobody is left who could be told.
    """
    if getattr(_thread, "queue", None) is not None:
        yield
        return
    queue: list[Callable[[], None]] = []
    _thread.queue = queue
    try:
        yield
    finally:
        _thread.queue = None
        for action in queue:
            _run(action)


def release(action: Callable[[], None]) -> None:
    """Run a release now, or at the end of this thread's outermost `releases_deferred`."""
    queue = getattr(_thread, "queue", None)
    if queue is None:
        action()
    else:
        queue.append(action)


def _run(action: Callable[[], None]) -> None:
    try:
        action()
    except NxrtError:
        _log.exception("a deferred release failed; what it held stays charged")
