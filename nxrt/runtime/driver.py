"""The seam to CUDA: the only importer of cuda.bindings, and the one place that checks a status.

It wraps calls, not concepts. Importing it loads no library: that happens at the first call.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import cuda.bindings.driver as cuda_driver
import cuda.bindings.nvrtc as cuda_nvrtc
from cuda import pathfinder

from nxrt.errors import DriverError, DriverUnavailableError

Handle: TypeAlias = Any
"""A driver handle. cuda.bindings has no type information; only this folder holds such objects."""

api: Any = cuda_driver
"""The driver's functions and constants, for use with `call`."""

nvrtc: Any = cuda_nvrtc
"""NVRTC's functions; the compiler checks their status itself, as the log explains it."""

REMEDY = "install the NVIDIA driver (580 or newer), or use the CPU provider"
"""What to do where there is no driver or no device."""

_EXPLANATIONS = {
    1: "an argument is out of range; for a launch: an empty grid, too many threads or too much"
    " shared memory",
    2: "the device has no free block of that size; other processes count too",
    3: "the driver is not initialised in this process; a forked child cannot use its parent's",
    4: "the driver is shutting down; nothing can be released any more",
    100: "the driver sees no device; check CUDA_VISIBLE_DEVICES and the container's devices",
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
    """
    try:
        status, *outputs = function(*args)
    except (KeyError, ValueError) as error:
        unknown = _unknown_code(function, error)
        if unknown is None:
            raise
        raise unknown from error
    except RuntimeError as error:
        missing = _missing(function, error)
        if missing is None:
            raise
        raise missing from error
    if int(status) != 0:
        raise _failed(function, int(status), status.name)
    if len(outputs) == 1:
        return outputs[0]
    return tuple(outputs) or None


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
    """

    is_available: bool
    reason: str
    version: str = ""
    num_devices: int = 0


def probe() -> DriverStatus:
    """Find out whether CUDA can be used, without raising; initialises the driver if it is there."""
    try:
        pathfinder.load_nvidia_dynamic_lib("cuda")
    except (RuntimeError, OSError):
        return DriverStatus(False, "no CUDA driver library (libcuda.so.1) on this machine")
    try:
        call(api.cuInit, 0)
        number = call(api.cuDriverGetVersion)
        num_devices = call(api.cuDeviceGetCount)
    except (DriverError, DriverUnavailableError) as error:
        return DriverStatus(False, str(error))
    version = f"{number // 1000}.{number % 1000 // 10}"
    if num_devices == 0:
        return DriverStatus(False, f"the driver (CUDA {version}) shows no device", version)
    reason = f"driver for CUDA {version}, {num_devices} device(s)"
    return DriverStatus(True, reason, version, num_devices)


def require() -> None:
    """Initialise the driver.

    Raises:
        DriverUnavailableError: at once, where there is no driver or no device.
    """
    status = probe()
    if not status.is_available:
        raise DriverUnavailableError(status.reason, REMEDY)
