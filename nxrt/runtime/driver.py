"""The seam to CUDA: the only importer of cuda.bindings, and the one place that checks a status.

It wraps calls, not concepts. Importing it loads no library: that happens at the first call.
"""

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import cuda.bindings.driver as cuda_driver
import cuda.bindings.nvrtc as cuda_nvrtc
from cuda import pathfinder

from nxrt.errors import DriverError, DriverUnavailableError, ForkedProcessError

Handle: TypeAlias = Any
"""A driver handle. cuda.bindings has no type information; only this folder holds such objects."""

api: Any = cuda_driver
"""The driver's functions and constants, for use with `call`."""

nvrtc: Any = cuda_nvrtc
"""NVRTC's functions; the compiler checks their status itself, as the log explains it."""

SUCCESS: Any = cuda_driver.CUresult.CUDA_SUCCESS
"""The status of a call that worked; hot paths compare with it by identity first."""

LOST_CODES = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})
"""Codes after which a context never works again: faults of kernels and of the hardware, and 4,
which every call answers once the driver shuts down.
Source: CUDA driver API, CUresult: "leaves the process in an inconsistent state"."""

MIN_VERSION = 13000
"""The oldest driver whose CUDA has everything that is called here: 13.0, release 580."""

REMEDY = "install the NVIDIA driver (580 or newer), or use the CPU provider"
"""What to do where there is no driver, or one that is too old."""

_NO_DEVICE_CODES = (100, 101)
_NO_DEVICE_REMEDY = (
    "check CUDA_VISIBLE_DEVICES and which devices the container has, or use the CPU provider"
)

_EXPLANATIONS = {
    1: "an argument is out of range; for a launch: an empty grid, too many threads or too much"
    " shared memory",
    2: "the device has no free block of that size; other processes count too",
    3: "the driver is not initialised in this process; a forked child cannot use its parent's",
    4: "the driver is shutting down; nothing can be released any more",
    100: "the driver sees no device",
    101: "there is no device of that number",
    200: "the bytes are no loadable module",
    201: "no context is current on this thread, or it was destroyed",
    209: "the module has no code for this device's architecture",
    218: "the PTX does not compile for this device",
    222: "the PTX is newer than the driver; compile to a cubin or update the driver",
    400: "the handle is not valid: destroyed, or of another kind",
    500: "the module has no such symbol",
    700: "a kernel touched memory outside its allocations; the context is lost: restart",
    701: "the launch needs more registers or shared memory than the device has",
    702: "a kernel ran past the display watchdog's limit; the context is lost",
    716: "a kernel used an address that is not aligned to its element; the context is lost",
    719: "a kernel failed; the context is lost: restart the process",
    900: "not permitted while a stream is capturing; the capture is now invalid",
    901: "the capture was invalidated by an earlier call; end it before using the stream",
    906: "the legacy default stream was used while another stream was capturing",
    908: "the capture must be ended by the thread that began it",
    999: "the driver does not say why; its log (dmesg) may",
}
_UNKNOWN_CODE = re.compile(r"(\d+)(?: is not a valid \w+)?")
_UNEXPLAINED = "see the CUDA driver API reference for this code"


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Make one driver call; return its outputs: nothing, one value, or a tuple.

    Raises:
        DriverError: the driver answered with an error, or does not have the function.
        DriverUnavailableError: there is no driver library.
        ForkedProcessError: the process is the forked child of one that used CUDA.
    """
    if _process.is_forked:
        raise ForkedProcessError
    try:
        status, *outputs = function(*args)
    except (KeyError, ValueError, RuntimeError) as error:
        failure = failure_of(function, error)
        if failure is None:
            raise
        raise failure from error
    if status is not SUCCESS:
        failure = failure_of(function, status)
        if failure is not None:
            raise failure
    if len(outputs) == 1:
        return outputs[0]
    return tuple(outputs) or None


def failure_of(function: Callable[..., Any], outcome: Any) -> Exception | None:
    """Return the typed error of one call: of its status, or of what the bindings raised.

    None for success, and for an exception that is not about the driver.
    """
    if isinstance(outcome, (KeyError, ValueError)):
        return _unknown_code(function, outcome)
    if isinstance(outcome, RuntimeError):
        return _missing(function, outcome)
    return _failed(function, int(outcome), outcome.name) if int(outcome) else None


def _failed(function: Callable[..., Any], code: int, name: str) -> DriverError:
    explanation = _EXPLANATIONS.get(code, _UNEXPLAINED)
    return DriverError(code=code, name=name, call=function.__name__, explanation=explanation)


def _unknown_code(function: Callable[..., Any], error: Exception) -> Exception | None:
    # The bindings turn a status into an enum and raise when the enum has no such member: KeyError
    # of the number, or ValueError "N is not a valid CUresult". Anything else is the caller's.
    code = _UNKNOWN_CODE.fullmatch(str(error))
    if code is None:
        return None
    return _failed(function, int(code[1]), "UNKNOWN")


def _missing(function: Callable[..., Any], error: RuntimeError) -> Exception | None:
    text = str(error)
    if "is not found" in text:
        return DriverError(
            code=-1,
            name="FUNCTION_NOT_FOUND",
            call=function.__name__,
            explanation="this driver is too old to have the function; update it",
        )
    if "libcuda" in text or '"cuda"' in text:
        return DriverUnavailableError(text.splitlines()[0], REMEDY)
    return None


@dataclass(frozen=True)
class DriverStatus:
    """Say whether CUDA can be used here, and why not where it cannot.

    Args:
        is_available: there is a driver and at least one device.
        reason: for a person; names what was found either way.
        version: the driver's CUDA version, such as "13.0"; empty without a driver.
        num_devices: how many devices the driver shows this process.
        remedy: what to do where CUDA cannot be used.
    """

    is_available: bool
    reason: str
    version: str = ""
    num_devices: int = 0
    remedy: str = REMEDY


class ForkListener(Protocol):
    """Something that must know that it lives on in a forked child."""

    def forked(self) -> None:
        """Take note; called in the child, before anything else runs there."""


class _Process:
    """What this process has done with the driver."""

    def __init__(self) -> None:
        self.is_started = False
        self.is_forked = False
        self.listeners: weakref.WeakSet[ForkListener] = weakref.WeakSet()

    def forked(self) -> None:
        self.is_forked = True
        for listener in self.listeners:
            listener.forked()


_process = _Process()


def tell_when_forked(listener: ForkListener) -> None:
    """Call `listener.forked()` in every child that is forked from now on; held weakly."""
    _process.listeners.add(listener)


def probe() -> DriverStatus:
    """Find out whether CUDA can be used, without raising and without initialising the driver here.

    The driver does not survive a fork, so another process is asked (a few hundred milliseconds),
    unless this one uses CUDA already.
    """
    if _process.is_started or _process.is_forked:
        return start()
    if not _has_library():
        return _no_library()
    return _probe_elsewhere()


def start() -> DriverStatus:
    """Initialise the driver and say, without raising, whether it can be used."""
    if _process.is_forked:
        return DriverStatus(False, str(ForkedProcessError()))
    if not _has_library():
        return _no_library()
    try:
        call(api.cuInit, 0)
        if not _process.is_started:
            _process.is_started = True
            os.register_at_fork(after_in_child=_process.forked)
        number, num_devices = call(api.cuDriverGetVersion), call(api.cuDeviceGetCount)
    except (DriverError, DriverUnavailableError) as error:
        return _refused(error)
    return _status(number, num_devices)


def require() -> None:
    """Initialise the driver.

    Raises:
        DriverUnavailableError: at once, where there is no driver or no device.
        ForkedProcessError: the process is the forked child of one that used CUDA.
    """
    if _process.is_forked:
        raise ForkedProcessError
    status = start()
    if not status.is_available:
        raise DriverUnavailableError(status.reason, status.remedy)


def _has_library() -> bool:
    # Before any call: without the library the bindings answer slowly, and some not at all.
    try:
        pathfinder.load_nvidia_dynamic_lib("cuda")
    except (RuntimeError, OSError):
        return False
    return True


def _no_library() -> DriverStatus:
    return DriverStatus(False, "no CUDA driver library (libcuda.so.1) on this machine")


def _refused(error: Exception) -> DriverStatus:
    has_no_device = isinstance(error, DriverError) and error.code in _NO_DEVICE_CODES
    return DriverStatus(False, str(error), remedy=_NO_DEVICE_REMEDY if has_no_device else REMEDY)


def _status(number: int, num_devices: int) -> DriverStatus:
    version = f"{number // 1000}.{number % 1000 // 10}"
    if number < MIN_VERSION:
        needed = f"{MIN_VERSION // 1000}.{MIN_VERSION % 1000 // 10}"
        reason = f"the driver is for CUDA {version}, and nxrt needs one for {needed} or newer"
        return DriverStatus(False, reason, version, num_devices)
    if num_devices == 0:
        reason = f"the driver (CUDA {version}) shows no device"
        return DriverStatus(False, reason, version, remedy=_NO_DEVICE_REMEDY)
    reason = f"driver for CUDA {version}, {num_devices} device(s)"
    return DriverStatus(True, reason, version, num_devices)


_PROBE = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
version, count = ctypes.c_int(), ctypes.c_int()
code = (cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version))
        or cuda.cuDeviceGetCount(ctypes.byref(count)))
print(json.dumps([code, version.value, count.value]))
"""
_PROBE_TIMEOUT_S = 60


def _probe_elsewhere() -> DriverStatus:
    if not sys.executable or getattr(sys, "frozen", False):
        return start()  # an embedded interpreter cannot start another
    command = [sys.executable, "-I", "-S", "-c", _PROBE]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True, text=True
        )
        code, number, num_devices = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return DriverStatus(False, f"the driver did not answer within {_PROBE_TIMEOUT_S} s")
    except (OSError, subprocess.CalledProcessError, ValueError):
        return start()  # no other process can be started: ask here
    if code:
        return _refused(_failed(api.cuInit, code, _code_name(code)))
    return _status(number, num_devices)


def _code_name(code: int) -> str:
    try:
        return str(api.CUresult(code).name)
    except (KeyError, ValueError):
        return "UNKNOWN"
