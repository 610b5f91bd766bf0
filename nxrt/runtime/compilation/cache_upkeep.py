"""Upkeep of the compile cache's folder: the size limit, what dead writers left, checking, clearing.

Only files of the cache's own are touched, told by their names. Nothing here compiles.
"""

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass

from nxrt.runtime.compilation.cache_entry import Entry, EntryInfo, Refusal, unpack
from nxrt.runtime.compilation.cache_folder import CacheFolder, StoredFile

_PRUNE_TO = 0.9
"""Share of the limit that pruning leaves, so that not every new entry prunes again."""

_MIN_AGE_S = 5.0
"""Younger locks and temporary files are let be: their owner may not have locked them yet."""

_MAX_UNLOCKED_AGE_S = 3600.0
"""Where locks do not work, or from an nxrt that did not lock, age tells dead from alive."""

_ORDER = {"quarantined": 0, "temporary": 3, "lock": 3}
"""What goes first when the limit is passed; then entries of other key versions, then the rest."""


@dataclass(frozen=True)
class CheckedEntry:
    """Report one entry that was read.

    Args:
        file: where it is.
        info: its description, None where it is not usable.
        problem: why it is not usable, empty where it is.
    """

    file: StoredFile
    info: EntryInfo | None
    problem: str = ""


def prune(folder: CacheFolder, max_nbytes: int, *, keep: str = "") -> int:
    """Remove what was used least recently until the folder is within its limit.

    An entry that is being read is not lost to its reader: it holds the file open.

    Args:
        folder: the folder.
        max_nbytes: of all files of the cache's own together.
        keep: the name of an entry that stays whatever its age.

    Returns:
        The number of entries removed.

    Raises:
        OSError: the folder cannot be used.
    """
    files = [file for file in folder.files() if file.is_regular]
    excess = sum(file.nbytes for file in files) - max_nbytes
    if excess <= 0:
        return 0
    excess += int(max_nbytes * (1 - _PRUNE_TO))
    num_removed = 0
    for file in sorted(files, key=_priority):
        if excess <= 0:
            break
        if file.name == keep or file.kind in ("lock", "temporary"):
            continue
        # One that another process has just removed is gone all the same.
        with suppress(FileNotFoundError):
            folder.remove(file.name)
            num_removed += file.kind == "entry"
        excess -= file.nbytes
    return num_removed


def tidy(folder: CacheFolder, *, min_age_s: float = _MIN_AGE_S) -> int:
    """Remove locks and temporary files whose owners are dead; return how many.

    Args:
        folder: the folder.
        min_age_s: younger ones stay.

    Raises:
        OSError: the folder cannot be used.
    """
    now = time.time()
    leftovers = [
        file
        for file in folder.files()
        if file.kind in ("lock", "temporary") and file.is_regular and now - file.used >= min_age_s
    ]
    return sum(_remove_if_dead(folder, file, now) for file in leftovers)


def check_entries(folder: CacheFolder) -> list[CheckedEntry]:
    """Read every entry of this version whole and check its digest; the rest is only listed.

    Raises:
        OSError: the folder cannot be used.
    """
    entries = [file for file in folder.files() if file.kind == "entry"]
    return [_checked(folder, file) for file in sorted(entries, key=lambda file: file.name)]


def clear(folder: CacheFolder) -> tuple[int, int]:
    """Remove every file of the cache's own; return how many, and how many bytes.

    A lock that is held stays.

    Raises:
        OSError: the folder cannot be used.
    """
    num_removed = nbytes = 0
    for file in folder.files():
        if file.kind == "lock":
            is_removed = _remove_if_dead(folder, file, time.time())
        else:
            is_removed = _is_removed(folder, file)
        num_removed += is_removed
        nbytes += file.nbytes if is_removed else 0
    return num_removed, nbytes


def _priority(file: StoredFile) -> tuple[int, float]:
    return _ORDER.get(file.kind, 2 if file.is_current else 1), file.used


def _remove_if_dead(folder: CacheFolder, file: StoredFile, now: float) -> bool:
    with suppress(OSError), folder.opened() as handle:
        opened = os.open(
            file.name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle
        )
        try:
            if _is_dead(opened, file, now):
                # Removed while it is held, so that nobody can take it in between.
                os.unlink(file.name, dir_fd=handle)
                return True
        finally:
            os.close(opened)
    return False


def _is_dead(opened: int, file: StoredFile, now: float) -> bool:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system
        return now - file.used > _MAX_UNLOCKED_AGE_S
    is_locked_while_written = not file.name.endswith(".tmp")
    return is_locked_while_written or now - file.used > _MAX_UNLOCKED_AGE_S


def _is_removed(folder: CacheFolder, file: StoredFile) -> bool:
    try:
        folder.remove(file.name)
    except OSError:
        return False
    return True


def _checked(folder: CacheFolder, file: StoredFile) -> CheckedEntry:
    if not file.is_current:
        return CheckedEntry(file, None)
    data = folder.read(file.name)
    if data is None:
        return CheckedEntry(file, None, "it is gone")
    found = data if isinstance(data, Refusal) else unpack(entry_key(file.name), data)
    if isinstance(found, Entry):
        return CheckedEntry(file, found.info)
    return CheckedEntry(file, None, found.reason)


def entry_key(name: str) -> str:
    """Return the key in the name of an entry."""
    return name.rpartition("-")[2].partition(".")[0]
