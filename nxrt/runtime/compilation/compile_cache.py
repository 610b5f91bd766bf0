"""Compiled kernels, remembered in memory and on disk under everything that went into them.

The cache may never hurt: whatever it cannot read it compiles again, whatever it cannot write stays
in memory, and nothing reaches the driver before its digest has been checked, because the driver
hangs or crashes on a damaged cubin.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nxrt.locks import new_lock
from nxrt.runtime.compilation.cache_entry import (
    MAX_ENTRY_NBYTES,
    Entry,
    EntryInfo,
    Refusal,
    pack,
    unpack,
)
from nxrt.runtime.compilation.cache_folder import CacheFolder
from nxrt.runtime.compilation.cache_key import KEY_VERSION, cache_key
from nxrt.runtime.compilation.cache_settings import (
    DEFAULT_MAX_NBYTES,
    default_cache_dir,
    default_cache_nbytes,
)
from nxrt.runtime.compilation.cache_upkeep import prune, tidy
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.key_locks import KeyTurns, ProcessLock
from nxrt.runtime.compilation.source import KernelSource

__all__ = [
    "CacheStats",
    "CompileCache",
    "Fetched",
    "cache_key",
    "default_cache_dir",
    "default_cache_nbytes",
]

_log = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CacheStats:
    """Count what a cache did.

    Args:
        memory_hits: answers from memory.
        disk_hits: answers from checked entries on disk.
        compilations: answers from the compiler.
        rejected_entries: entries that were not used: damaged, foreign, or refused by the driver.
        quarantined_entries: those of them that were moved aside.
        evicted_entries: entries removed to stay within the size limit.
        unwritten_entries: compilations that could not be kept on disk.
        lock_timeouts: waits for another process that were given up.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    compilations: int = 0
    rejected_entries: int = 0
    quarantined_entries: int = 0
    evicted_entries: int = 0
    unwritten_entries: int = 0
    lock_timeouts: int = 0


@dataclass(frozen=True)
class Fetched:
    """Hold compiled code and where it came from: "memory", "disk" or "compiler"."""

    code: bytes
    origin: str


class CompileCache:
    """Return the code of a source, compiling at most once per key and process.

    Safe to use from any thread, and by several processes on one folder; they normally compile a key
    once together. Threads that want different keys do not wait for each other.

    Args:
        compiler: makes what is not there.
        directory: the folder; None keeps everything in memory.
        max_nbytes: of all files of the cache in the folder; 0 writes none.
        lock_timeout_s: how long to wait for another process that compiles the same.
    """

    def __init__(
        self,
        compiler: Compiler,
        directory: Path | None,
        *,
        max_nbytes: int = DEFAULT_MAX_NBYTES,
        lock_timeout_s: float = _LOCK_TIMEOUT_S,
    ) -> None:
        self._compiler = compiler
        self._directory = directory
        self._folder = None if directory is None else CacheFolder(directory)
        self._max_nbytes = max_nbytes
        self._lock_timeout_s = lock_timeout_s
        self._turns = KeyTurns()
        self._codes: dict[str, bytes] = {}
        self._lock = new_lock()
        self._counts = dict.fromkeys(CacheStats.__dataclass_fields__, 0)
        self._has_warned = False
        self._is_tidied = False

    @property
    def compiler(self) -> Compiler:
        """Return what makes the code that is not there."""
        return self._compiler

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
        """Return the code. Raises CompileError as `fetch` does."""
        return self.fetch(source, options).code

    def fetch(self, source: KernelSource, options: CompileOptions) -> Fetched:
        """Return the code and where it came from.

        Raises:
            CompileError: it had to be compiled and does not compile, NVRTC is missing, or a header
                cannot be used. Nothing is remembered.
        """
        key = cache_key(source, options, self._compiler)
        with self._turns.turn(key):
            return self._fetch(key, source, options)

    def discard(self, source: KernelSource, options: CompileOptions, code: bytes) -> None:
        """Forget code that the driver does not load, in memory and on disk.

        Where the key meanwhile stands for other code, that is kept.
        """
        key = cache_key(source, options, self._compiler)
        with self._turns.turn(key):
            if self._codes.get(key) == code:
                del self._codes[key]
            name = _entry_name(key, options)
            found = self._read(key, name)
            if isinstance(found, Entry) and found.code == code:
                self._reject(name, "the driver does not load it")

    def _fetch(self, key: str, source: KernelSource, options: CompileOptions) -> Fetched:
        code = self._codes.get(key)
        if code is not None:
            self._count("memory_hits")
            return Fetched(code, "memory")
        name = _entry_name(key, options)
        found = self._read(key, name)
        if isinstance(found, Entry):
            return self._kept(key, found)
        lock = self._process_lock(key)
        try:
            if lock is not None:
                self._acquire(lock)
                # Another process may have written or mended it while this one waited.
                found = self._read(key, name)
            if isinstance(found, Entry):
                return self._kept(key, found)
            if isinstance(found, Refusal):
                self._reject(name, found.reason)
            return self._compile(key, name, source, options)
        finally:
            self._release(lock)

    def _kept(self, key: str, entry: Entry) -> Fetched:
        self._count("disk_hits")
        self._codes[key] = entry.code
        return Fetched(entry.code, "disk")

    def _compile(
        self, key: str, name: str, source: KernelSource, options: CompileOptions
    ) -> Fetched:
        code = self._compiler.compile(source, options).cubin
        self._count("compilations")
        # A header on disk that was exchanged meanwhile: the code may be of either.
        is_of_key = not source.system_headers or key == cache_key(source, options, self._compiler)
        if is_of_key:
            self._codes[key] = code
            self._write(name, pack(key, self._describe(source, options), code))
        return Fetched(code, "compiler")

    def _describe(self, source: KernelSource, options: CompileOptions) -> EntryInfo:
        defines = " ".join(f"{name}={value}" for name, value in options.defines)
        version = self._compiler.version
        return EntryInfo(source.name, options.arch, options.artefact, defines, version, time.time())

    def _read(self, key: str, name: str) -> Entry | Refusal | None:
        if self._folder is None:
            return None
        try:
            data = self._folder.read(name, is_use=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("cannot read", error)
            return None
        return unpack(key, data) if isinstance(data, bytes) else data

    def _write(self, name: str, data: bytes) -> None:
        if self._folder is None:
            return
        if len(data) > min(self._max_nbytes, MAX_ENTRY_NBYTES):
            self._count("unwritten_entries")
            return
        try:
            self._folder.publish(name, data)
        except OSError as error:
            self._count("unwritten_entries")
            self._warn("cannot write to", error)
            return
        with suppress(OSError):  # whoever writes next tries again
            self._count("evicted_entries", prune(self._folder, self._max_nbytes, keep=name))
            if not self._is_tidied:
                self._is_tidied = True
                tidy(self._folder)

    def _process_lock(self, key: str) -> ProcessLock | None:
        if self._folder is None:
            return None
        try:
            with self._folder.opened(create=True):
                path = self._folder.path / f"{KEY_VERSION}-{key}.lock"
                return ProcessLock(path, self._lock_timeout_s)
        except OSError as error:
            self._warn("cannot use", error)
            return None

    def _acquire(self, lock: ProcessLock) -> None:
        try:
            if not lock.acquire():
                self._count("lock_timeouts")
        except OSError as error:
            self._warn("cannot lock", error)

    def _release(self, lock: ProcessLock | None) -> None:
        try:
            if lock is not None:
                lock.release()
        except OSError as error:
            self._warn("cannot unlock", error)

    def _reject(self, name: str, reason: str) -> None:
        assert self._folder is not None  # there was something to refuse
        is_aside = self._folder.quarantine(name)
        self._count("rejected_entries")
        self._count("quarantined_entries", int(is_aside))
        _log.warning("compile cache entry %s is not used: %s; compiling again", name, reason)

    def _warn(self, action: str, error: OSError) -> None:
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        _log.warning(
            "%s the compile cache in %s (%s); going on in memory",
            action,
            self._directory,
            error.strerror or error,
        )

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number


def _entry_name(key: str, options: CompileOptions) -> str:
    return f"{KEY_VERSION}-{key}.{options.artefact}"
