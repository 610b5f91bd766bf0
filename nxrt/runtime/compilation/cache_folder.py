"""The compile cache's folder: what may be in it, reading without trust, publishing whole files.

It knows names and bytes, not keys or compilers. Every call opens the folder anew and works through
that handle, so that a folder which is deleted or exchanged meanwhile does no harm.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nxrt.runtime.compilation.cache_entry import MAX_ENTRY_NBYTES, Refusal
from nxrt.runtime.compilation.cache_key import KEY_VERSION

QUARANTINE = "quarantine"

_ENTRY = re.compile(r"(?:(\d+)-)?[0-9a-f]{64}\.(?:cubin|ptx)")
_LOCK = re.compile(r"(?:\d+-)?[0-9a-f]{64}\.lock")
_TEMPORARY = re.compile(r"tmp-[0-9a-f]{16}|tmp[a-z0-9_]{8}\.tmp")
_QUARANTINED = re.compile(rf"{_ENTRY.pattern}-[0-9a-f]{{8}}")
_MAX_QUARANTINED = 16
_MAX_QUARANTINED_NBYTES = 16 * 1024**2
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_TOUCH_AFTER_S = 3600.0


@dataclass(frozen=True)
class StoredFile:
    """Report one file of the cache's own.

    Args:
        name: within the folder.
        kind: "entry", "lock", "temporary" or "quarantined".
        version: of the key, for an entry; 0 where it is older than such names.
        nbytes: its size.
        used: when it was last used, in seconds since 1970; writing counts, and reading roughly.
        is_regular: it is a file and no folder, link or pipe.
    """

    name: str
    kind: str
    version: int
    nbytes: int
    used: float
    is_regular: bool

    @property
    def is_current(self) -> bool:
        """Say whether this nxrt might read it."""
        return self.version == KEY_VERSION


class CacheFolder:
    """Give access to one folder, which need not exist yet.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def opened(self, *, create: bool = False) -> Iterator[int]:
        """Yield the folder's descriptor.

        Raises:
            OSError: there is none or it cannot be made, or it is not safe to use: another user owns
                it or can write to it.
        """
        if create:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_folder(folder, self.path)
            yield folder
        finally:
            os.close(folder)

    def read(self, name: str, *, is_use: bool = False) -> bytes | Refusal | None:
        """Return a file's bytes, None where there is none.

        Args:
            name: the file.
            is_use: mark it as used, where that is an hour ago or more.

        Raises:
            OSError: the folder cannot be used.
        """
        with self.opened() as folder:
            try:
                file = os.open(
                    name,
                    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
                    dir_fd=folder,
                )
            except FileNotFoundError:
                return None
            except OSError as error:
                is_link = error.errno == errno.ELOOP
                return Refusal("it is a symbolic link" if is_link else f"{error.strerror}")
            try:
                return _content(file, is_use=is_use)
            except OSError as error:
                return Refusal(f"{error.strerror}")
            finally:
                os.close(file)

    def publish(self, name: str, data: bytes) -> None:
        """Write a file so that readers see all of it or none; replace one of that name.

        Raises:
            OSError: it was not written; nothing is left.
        """
        temporary = f"tmp-{secrets.token_hex(8)}"
        with self.opened(create=True) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                handle = os.open(temporary, flags, 0o600, dir_fd=folder)
                with os.fdopen(handle, "wb") as file:
                    with suppress(OSError):  # says that the writer lives, where locks work
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.write(data)
                    file.flush()
                    # Or a power cut could leave the name with nothing behind it.
                    os.fsync(file.fileno())
                    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def remove(self, name: str) -> None:
        """Remove a file or an empty folder. Raises OSError."""
        with self.opened() as folder:
            _remove(folder, name)

    def quarantine(self, name: str) -> bool:
        """Move something aside, whatever it is; say whether it is gone from its name.

        The oldest in quarantine give way. What is too large for it is removed.
        """
        try:
            with self.opened() as folder:
                return _move_aside(folder, name, self.path)
        except FileNotFoundError:
            return True  # somebody else was faster
        except OSError:
            return False

    def files(self) -> list[StoredFile]:
        """Return the files of the cache's own, nothing else's. Raises OSError."""
        with self.opened() as folder:
            found = list(_files(folder, ""))
            with suppress(OSError), _quarantine(folder, self.path) as aside:
                found += _files(aside, f"{QUARANTINE}/")
        return found


@contextmanager
def _quarantine(folder: int, path: Path) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    aside = os.open(QUARANTINE, flags, dir_fd=folder)
    try:
        _check_folder(aside, path / QUARANTINE)
        yield aside
    finally:
        os.close(aside)


def _move_aside(folder: int, name: str, path: Path) -> bool:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISREG(status.st_mode) and status.st_size > _MAX_QUARANTINED_NBYTES:
        os.unlink(name, dir_fd=folder)
        return True
    with suppress(FileExistsError):
        os.mkdir(QUARANTINE, 0o700, dir_fd=folder)
    with _quarantine(folder, path) as aside:
        if not _make_room(aside, status.st_size):
            return False
        new_name = f"{name}-{secrets.token_hex(4)}"
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=aside)
    return True


def _check_folder(folder: int, path: Path) -> None:
    status = os.fstat(folder)
    reason = _foreign(status)
    if reason:
        remedy = "chmod go-w it, or set NXRT_CACHE_DIR to a folder of your own"
        raise PermissionError(errno.EPERM, f"{path} is not used: {reason}; {remedy}")


def _foreign(status: os.stat_result) -> str:
    """Return why others may have written something, empty where only this user can have."""
    if status.st_uid != os.geteuid():
        return f"owned by user {status.st_uid}"
    return "others can write to it" if status.st_mode & _OTHERS_MAY_WRITE else ""


def _content(file: int, *, is_use: bool) -> bytes | Refusal:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        return Refusal("it is not a regular file")
    reason = _foreign(status)
    if reason:
        return Refusal(f"it is not to be trusted: {reason}")
    if status.st_size > MAX_ENTRY_NBYTES:
        return Refusal(f"it is too large: {status.st_size:,} B")
    with os.fdopen(file, "rb", closefd=False) as stream:
        content = stream.read(status.st_size)
    if is_use and time.time() - status.st_mtime > _TOUCH_AFTER_S:
        with suppress(OSError):
            os.utime(file)
    return content


def _files(folder: int, prefix: str) -> Iterator[StoredFile]:
    for name in os.listdir(folder):
        kind = _kind(name, is_aside=bool(prefix))
        if not kind:
            continue
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        version = _ENTRY.match(name)
        yield StoredFile(
            f"{prefix}{name}",
            kind,
            int(version[1] or 0) if version else 0,
            status.st_size,
            status.st_mtime,
            stat.S_ISREG(status.st_mode),
        )


def _kind(name: str, *, is_aside: bool) -> str:
    if is_aside:
        return "quarantined" if _QUARANTINED.fullmatch(name) else ""
    for kind, pattern in (("entry", _ENTRY), ("lock", _LOCK), ("temporary", _TEMPORARY)):
        if pattern.fullmatch(name):
            return kind
    return ""


def _make_room(aside: int, nbytes: int) -> bool:
    """Remove the oldest from quarantine until one more has its place there."""
    kept = sorted(_files(aside, f"{QUARANTINE}/"), key=lambda file: file.used)
    while kept and (
        len(kept) >= _MAX_QUARANTINED
        or sum(file.nbytes for file in kept) + nbytes > _MAX_QUARANTINED_NBYTES
    ):
        try:
            _remove(aside, kept.pop(0).name.removeprefix(f"{QUARANTINE}/"))
        except OSError:  # a folder that somebody filled: not ours to empty
            return False
    return True


def _remove(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=folder)
