"""Locks that a forked child finds free, whoever held them in the parent.

A child has one thread; a lock that another thread of the parent held would stay held in it for
ever. What that thread was doing is the parent's business: a child uses no CUDA, and counts from
what it was left with.
"""

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.Lock:
    """Return a plain lock."""
    made = threading.Lock()
    _locks.add(made)
    return made


def new_rlock() -> Any:
    """Return a lock that its holder may take again."""
    made = threading.RLock()
    _locks.add(made)
    return made


def _free_all() -> None:
    for lock in _locks:
        is_owned = getattr(lock, "_is_owned", None)
        if is_owned is None or not is_owned():  # the forking thread lives on, and gives it back
            lock._at_fork_reinit()  # noqa: SLF001  (what the standard library does for its own)


os.register_at_fork(after_in_child=_free_all)
