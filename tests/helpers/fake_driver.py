"""The test double of the CUDA driver: build it, load it in the driver's place, control it.

What the double does is in tests/fake_driver; nxrt's kernels run there by fake_kernels.
"""

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

SOURCES = Path(__file__).parents[1] / "fake_driver"
SONAME = "libcuda.so.1"
_FLAGS = (
    "-std=gnu11 -shared -fPIC -O1 -g -Wall -Wextra -Werror -fvisibility=hidden -pthread"
    f" -Wl,-soname,{SONAME}"
).split()

OK = 0
ILLEGAL_ADDRESS = 700
LAUNCH_FAILED = 719

Shape3: TypeAlias = tuple[int, int, int]
StandIn: TypeAlias = Callable[..., int | None]
"""Called with the parameters' values, then grid and block; returns a fault's code or nothing."""

Launcher: TypeAlias = Callable[[Any, Any, Any, int], int]
"""Called with a launch's own parameters, grid, block and shared bytes; returns a CUresult."""

_STAND_IN = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
)


def build(folder: Path) -> Path:
    """Compile the double into a folder named after its sources, unless it is there already.

    Raises:
        RuntimeError: there is no C compiler, or it refuses; with what it says.
    """
    sources = sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources))
    digest.update(" ".join(_FLAGS).encode())
    library = folder / digest.hexdigest()[:16] / SONAME
    if library.is_file():
        return library
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the fake driver needs a C compiler called cc; install one")
    library.parent.mkdir(parents=True, exist_ok=True)
    # Another run may build the same: each writes a file of its own, and the last rename wins.
    unfinished = library.with_suffix(f".{os.getpid()}")
    units = [str(path) for path in sources if path.suffix == ".c"]
    command = [compiler, *_FLAGS, "-o", str(unfinished), *units]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"the fake driver does not compile:\n{finished.stderr}")
    unfinished.replace(library)
    return library


def load(library: Path) -> "FakeDriver":
    """Load the double where the driver's library would be looked for, here and in subprocesses.

    Must come before the first driver call: whoever opens libcuda.so.1 later is given this one, as
    the loader knows a loaded library by that name.
    """
    inherited = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{library.parent}{':' + inherited if inherited else ''}"
    return FakeDriver(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))


@dataclass(frozen=True)
class Snapshot:
    """Count what is live: handles, blocks of memory and their bytes."""

    context: int
    stream: int
    event: int
    module: int
    graph: int
    exec: int
    device_memory: int
    pinned_memory: int
    device_nbytes: int
    pinned_nbytes: int

    def difference(self, before: "Snapshot") -> dict[str, int]:
        """Return by how much each count has grown since, without those that are equal."""
        pairs = {
            field.name: getattr(self, field.name) - getattr(before, field.name)
            for field in fields(self)
        }
        return {name: change for name, change in pairs.items() if change}


_HANDLE_KINDS = ("context", "stream", "event", "module", "graph", "exec")


class FakeDriver:
    """Control the double. Counts and faults are of the whole process, whichever thread calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.path = str(library._name)
        self._stand_ins: dict[str, Any] = {}
        self._errors: list[BaseException] = []
        for name in ("fake_trace_name", "fake_violation"):
            getattr(library, name).restype = ctypes.c_char_p
        for name in ("calls", "runs", "faults", "violations"):
            getattr(library, f"fake_num_{name}").restype = ctypes.c_long
        for name in ("fake_trace_length", "fake_live_handles", "fake_live_blocks"):
            getattr(library, name).restype = ctypes.c_long
        library.fake_live_nbytes.restype = ctypes.c_uint64
        library.fake_running_image.restype = ctypes.c_size_t

    def reset(self) -> None:
        """Forget faults, counts, stand-ins and violations; run what is pending; keep handles."""
        self._library.fake_clear_faults()
        self.set_lazy(False)
        self._library.fake_lose_contexts(0)
        self.set_memory_limit(None)
        self._library.fake_forget_kernels()
        self._library.fake_clear_runs()
        self._library.fake_clear_counts()
        self._library.fake_clear_violations()
        self._stand_ins.clear()
        self._errors.clear()

    # Faults.

    def fail(self, call: str | None, *, code: int, nth: int = 1) -> None:
        """Make one call fail: the nth from now of that name, or of any for None.

        Args:
            call: a function's name in cuda.bindings.
            code: any number, also one that is no CUresult. The call does nothing else.
            nth: from 1.
        """
        self._library.fake_fail(_encoded(call), ctypes.c_long(nth), code, 0)

    def fail_always(self, call: str | None, *, code: int, nth: int = 1) -> None:
        """Make every call from the nth on fail, until `clear_faults`."""
        self._library.fake_fail(_encoded(call), ctypes.c_long(nth), code, 1)

    def clear_faults(self) -> None:
        """Take back the faults that are planted."""
        self._library.fake_clear_faults()

    @property
    def num_faults(self) -> int:
        """Return how many planted faults have not struck yet, or strike for ever."""
        return int(self._library.fake_num_faults())

    def lose_contexts(self, code: int) -> None:
        """Lose every live context, as a kernel's fault does: its calls answer `code` from now."""
        self._library.fake_lose_contexts(code)

    def restore_contexts(self) -> None:
        """Make lost contexts usable, which no real driver does."""
        self._library.fake_lose_contexts(0)

    def set_memory_limit(self, nbytes: int | None) -> None:
        """Bound the device memory of each device; None puts the default of 8 GiB back."""
        self._library.fake_set_memory_limit(ctypes.c_uint64(nbytes or 0))

    # What was called.

    def calls(self, name: str | None = None) -> int:
        """Return how often a function was called since the reset, or all of them together."""
        return int(self._library.fake_num_calls(_encoded(name)))

    @contextmanager
    def traced(self) -> Iterator[list[str]]:
        """Lend a list that holds, after the with-block, the functions called inside in order."""
        names: list[str] = []
        start = self._library.fake_trace_length()
        yield names
        for index in range(start, self._library.fake_trace_length()):
            name = self._library.fake_trace_name(ctypes.c_long(index))
            names.append("(forgotten)" if name is None else name.decode())

    def runs(self, kernel: str) -> int:
        """Return how often a kernel ran since the reset, replays included."""
        return int(self._library.fake_num_runs(kernel.encode()))

    # What is live.

    def live(self, kind: str) -> int:
        """Return how many handles or blocks of a kind are live; kinds are Snapshot's fields."""
        return int(getattr(self.snapshot(), kind))

    def snapshot(self) -> Snapshot:
        """Return what is live now."""
        handles = {
            kind: int(self._library.fake_live_handles(number))
            for number, kind in enumerate(_HANDLE_KINDS)
        }
        return Snapshot(
            **handles,
            device_memory=int(self._library.fake_live_blocks(0)),
            pinned_memory=int(self._library.fake_live_blocks(1)),
            device_nbytes=int(self._library.fake_live_nbytes(0)),
            pinned_nbytes=int(self._library.fake_live_nbytes(1)),
        )

    @property
    def stack_depth(self) -> int:
        """Return how many contexts are on this thread's stack."""
        return int(self._library.fake_stack_depth())

    # When work runs.

    def set_lazy(self, is_lazy: bool) -> None:
        """Choose when enqueued work runs: at its call, or only when something waits for it."""
        self._library.fake_set_lazy(int(is_lazy))

    @contextmanager
    def lazy(self) -> Iterator[None]:
        """Be lazy inside the with-block; what is still pending then runs at its end."""
        self.set_lazy(True)
        try:
            yield
        finally:
            self.set_lazy(False)

    def run_pending(self) -> None:
        """Run everything that is enqueued, as a device does in time."""
        self._library.fake_run_pending()

    # Violations.

    @property
    def violations(self) -> list[str]:
        """Return what was done that no driver promises to survive, oldest first; at most 256."""
        self._library.fake_check_guards()
        count = min(256, int(self._library.fake_num_violations()))
        return [
            self._library.fake_violation(ctypes.c_long(index)).decode() for index in range(count)
        ]

    def take_violations(self) -> list[str]:
        """Return the violations and forget them: the test meant them."""
        taken = self.violations
        self._library.fake_clear_violations()
        return taken

    def check(self) -> None:
        """Raise what a stand-in raised, or AssertionError where there are violations."""
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]
        violations = self.take_violations()
        assert not violations, "the driver was misused:\n" + "\n".join(violations)

    # Kernels.

    def register(self, name: str, letters: str, run: StandIn) -> None:
        """Let a Python function stand in for a kernel.

        Args:
            name: the entry point.
            letters: one of `struct`'s for each parameter, such as "QQIf".
            run: called with the parameters' values, then grid and block, without the fake's lock.
                What it raises becomes a fault of the launch, and is raised again by `check`.
        """

        def launch(params: Any, grid: Any, block: Any, _shared_nbytes: int) -> int:
            values = [value_of(params[i], letter) for i, letter in enumerate(letters)]
            return run(*values, (*grid[:3],), (*block[:3],)) or OK

        self.register_launcher(name, letters, launch)

    def register_launcher(self, name: str, letters: str, launch: Launcher) -> None:
        """Let a Python function run a kernel's launches from what the driver was given.

        Args: as of `register`.
        """

        def enter(params: Any, grid: Any, block: Any, shared_nbytes: int) -> int:
            try:
                return launch(params, grid, block, shared_nbytes)
            except IllegalAddressError:
                return ILLEGAL_ADDRESS
            except BaseException as error:  # noqa: BLE001  (nothing may pass through C)
                self._errors.append(error)
                return LAUNCH_FAILED

        stand_in = _STAND_IN(enter)
        if not self._library.fake_register_kernel(name.encode(), letters.encode(), stand_in):
            raise ValueError(f"not a format of parameters: {letters!r}")
        # The library calls it later: it must live as long as it is registered, or longer.
        self._stand_ins[name] = stand_in

    def array(self, pointer: int, dtype: DTypeLike, shape: Sequence[int]) -> NDArray[Any]:
        """Return device memory as an array, for use inside a stand-in.

        Raises:
            IllegalAddressError: the range is not inside one live block; a violation says how.
        """
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = count * kind.itemsize
        if nbytes == 0:
            return np.empty(shape, kind)
        if not self.is_usable(pointer, nbytes):
            raise IllegalAddressError
        buffer = (ctypes.c_uint8 * nbytes).from_address(pointer)
        return np.ctypeslib.as_array(buffer).view(kind).reshape(shape)

    def is_usable(self, pointer: int, nbytes: int) -> bool:
        """Say whether a range is inside one live block; a violation says how it is not."""
        start, size = ctypes.c_uint64(pointer), ctypes.c_size_t(nbytes)
        return bool(self._library.fake_is_range_usable(start, size))

    def running_image(self) -> bytes:
        """Return, inside a stand-in, the cubin its kernel is from."""
        image = ctypes.c_void_p()
        nbytes = self._library.fake_running_image(ctypes.byref(image))
        return ctypes.string_at(image, nbytes) if image.value else b""


class IllegalAddressError(Exception):
    """A stand-in touched memory that is not there."""


def _encoded(name: str | None) -> bytes | None:
    return None if name is None else name.encode()


def value_of(address: int, letter: str) -> Any:
    """Return a parameter of a launch, by one of `struct`'s letters."""
    return struct.unpack("<" + letter, ctypes.string_at(address, struct.calcsize(letter)))[0]
