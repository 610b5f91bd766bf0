"""Who may compile a key: one thread of this process, and normally one process of this machine.

Locks save work and nothing else: whoever cannot have one compiles all the same.
"""

import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from filelock import FileLock, Timeout

from nxrt.locks import new_lock

_POLL_S = 0.02


class KeyTurns:
    """Give each key a lock, which lives for as long as a with-block holds on to it."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def turn(self, key: str) -> threading.Lock:
        """Return the key's lock, the same one for everybody who has it now."""
        with self._lock:
            turn = self._turns.get(key)
            if turn is None:
                turn = self._turns[key] = new_lock()
            return turn

    def __len__(self) -> int:
        """Return how many locks there are."""
        return len(self._turns)


class ProcessLock:
    """Lock one key against other processes, by a file that its release removes.

    The kernel gives a lock back when its holder dies, however it dies.

    Args:
        path: the lock file.
        timeout_s: how long to wait for another holder.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._lock = FileLock(path, mode=0o600)
        self._timeout_s = timeout_s

    def acquire(self) -> bool:
        """Say whether the lock was had in time.

        Raises:
            OSError: there can be no lock here.
        """
        try:
            self._lock.acquire(timeout=self._timeout_s, poll_interval=_POLL_S)
        except Timeout:
            return False
        except NotImplementedError as error:
            raise OSError(0, "this file system has no locks") from error
        return True

    def release(self) -> None:
        """Give the lock up; nothing happens where it is not held. Raises OSError."""
        if self._lock.is_locked:
            # While it is held, so that nobody can have taken the file in between.
            with suppress(OSError):
                self._path.unlink()
            self._lock.release()
