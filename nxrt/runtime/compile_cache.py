"""Compiled kernels, remembered in memory and on disk under everything that went into them.

The cache may never hurt: whatever it cannot read it compiles again, and nothing reaches the driver
before its digest has been checked, because the driver hangs or crashes on a damaged cubin.
"""

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from nxrt.runtime.compiler import CompileOptions, Compiler
from nxrt.runtime.source import KernelSource

_log = logging.getLogger(__name__)

_KEY_VERSION = b"nxrt-compile-cache-2"
_MAGIC = b"NXRTCUB2"
_DIGEST_NBYTES = 32
_LOCK_TIMEOUT_S = 120.0


def default_cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Return where compiled kernels are kept: NXRT_CACHE_DIR, XDG_CACHE_HOME or ~/.cache.

    An empty NXRT_CACHE_DIR, or a user without a home, means memory only.
    """
    if "NXRT_CACHE_DIR" in environ:
        return Path(environ["NXRT_CACHE_DIR"]) if environ["NXRT_CACHE_DIR"] else None
    xdg = environ.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():
        return Path(xdg) / "nxrt"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "nxrt" if Path(home).is_absolute() else None


def cache_key(source: KernelSource, options: CompileOptions, compiler: Compiler) -> str:
    """Return the hex digest of everything that decides the cubin, each field length-prefixed."""
    fields = [_KEY_VERSION, compiler.version.encode(), source.name.encode(), source.text.encode()]
    for name, text in source.headers:
        fields += [name.encode(), text.encode()]
    for name, content in compiler.header_bytes(source):
        fields += [name.encode(), content]
    # Definitions may be listed in any order; flags may not.
    fields += [options.arch.encode(), *sorted(f"{k}={v}".encode() for k, v in options.defines)]
    fields += [b"flags", *(flag.encode() for flag in options.flags)]
    digest = hashlib.sha256()
    for content in fields:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


@dataclass(frozen=True)
class CacheStats:
    """Count what a cache did: answers from memory, from disk, and compilations."""

    memory_hits: int = 0
    disk_hits: int = 0
    compilations: int = 0
    rejected_entries: int = 0


class CompileCache:
    """Return the cubin of a source, compiling at most once per key and process.

    Safe to use from any thread, and by several processes on one folder.

    Args:
        compiler: makes what is not there.
        directory: the folder; None keeps everything in memory.
    """

    def __init__(self, compiler: Compiler, directory: Path | None) -> None:
        self._compiler = compiler
        self._directory = directory
        self._lock = threading.Lock()
        self._key_locks: dict[str, threading.Lock] = {}
        self._cubins: dict[str, bytes] = {}
        self._counts = dict.fromkeys(CacheStats.__dataclass_fields__, 0)
        self._has_warned = False
        self._rejected: set[Path] = set()

    @property
    def directory(self) -> Path | None:
        """Return the folder, None for memory only."""
        return self._directory

    @property
    def stats(self) -> CacheStats:
        """Return the counts so far."""
        with self._lock:
            return CacheStats(**self._counts)

    def get(self, source: KernelSource, options: CompileOptions) -> bytes:
        """Return the cubin.

        Raises:
            CompileError: it had to be compiled and does not compile. Nothing is remembered.
        """
        key = cache_key(source, options, self._compiler)
        with self._lock:
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            if key in self._cubins:
                self._count("memory_hits")
                return self._cubins[key]
            cubin = self._read(key) or self._compile(key, source, options)
            self._cubins[key] = cubin
            return cubin

    def _compile(self, key: str, source: KernelSource, options: CompileOptions) -> bytes:
        with self._across_processes(key) as has_waited:
            cubin = self._read(key) if has_waited else None
            if cubin is None:
                cubin = self._compiler.compile(source, options).cubin
                self._count("compilations")
                self._write(key, cubin)
            return cubin

    @contextmanager
    def _across_processes(self, key: str) -> Iterator[bool]:
        """Hold the key's lock file; yield whether somebody else may have compiled meanwhile.

        A lock that cannot be had in time costs one more compilation, never a dead-lock.
        """
        lock = self._lock_file(key)
        if lock is None:
            yield False
            return
        try:
            lock.acquire()
        except (OSError, Timeout, NotImplementedError) as error:
            self._warn("cannot lock", error)
            yield True
            return
        try:
            yield True
        finally:
            self._unlock(lock)

    def _unlock(self, lock: FileLock) -> None:
        try:
            lock.release()
        except OSError as error:
            self._warn("cannot unlock", error)

    def _lock_file(self, key: str) -> FileLock | None:
        if self._directory is None:
            return None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._warn("cannot create", error)
            return None
        return FileLock(self._directory / f"{key}.lock", timeout=_LOCK_TIMEOUT_S)

    def _path(self, key: str) -> Path | None:
        return None if self._directory is None else self._directory / f"{key}.cubin"

    def _read(self, key: str) -> bytes | None:
        path = self._path(key)
        if path is None:
            return None
        try:
            entry = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._reject(path, str(error))
            return None
        cubin = _unpacked(key, entry)
        if cubin is None:
            self._reject(path, "its digest does not match its content")
            return None
        self._count("disk_hits")
        return cubin

    def _write(self, key: str, cubin: bytes) -> None:
        path = self._path(key)
        if path is None or self._directory is None:
            return
        temporary = ""
        try:
            handle, temporary = tempfile.mkstemp(dir=self._directory, suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                file.write(_packed(key, cubin))
            Path(temporary).replace(path)
        except OSError as error:
            self._warn("cannot write to", error)
            if temporary:
                with suppress(OSError):
                    Path(temporary).unlink()

    def _reject(self, path: Path, reason: str) -> None:
        with self._lock:
            if path in self._rejected:
                return
            self._rejected.add(path)
        self._count("rejected_entries")
        _log.warning("compile cache entry %s is not used (%s); compiling again", path.name, reason)

    def _warn(self, action: str, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s the compile cache (%s); going on in memory", action, error)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _packed(key: str, cubin: bytes) -> bytes:
    # The digest covers the key, so that an entry under another's name is no entry.
    return _MAGIC + hashlib.sha256(key.encode() + cubin).digest() + cubin


def _unpacked(key: str, entry: bytes) -> bytes | None:
    start = len(_MAGIC) + _DIGEST_NBYTES
    cubin = entry[start:]
    return cubin if cubin and entry == _packed(key, cubin) else None
