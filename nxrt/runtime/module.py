"""Loaded code: modules, their functions, and the launch of one.

What is loaded comes checked from the compile cache; sizes and grids come from the kernel's own
launch code.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxrt.errors import ClosedError, DriverError, InvalidInputError
from nxrt.runtime import driver
from nxrt.runtime.device import Device
from nxrt.runtime.driver import Handle
from nxrt.runtime.recording import refuse_recording, this_thread
from nxrt.runtime.stream import Stream

_SLOT_NBYTES = 8
_FORMATS = {"pointer": "Q", "u64": "Q", "i64": "q", "u32": "I4x", "i32": "i4x", "f32": "f4x"}
_NBYTES = {"pointer": 8, "u64": 8, "i64": 8, "u32": 4, "i32": 4, "f32": 4}
_FUNCTION_NOT_FOUND = -1


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Give the shape of one launch, each number named.

    Args:
        grid: blocks along x, y, z.
        block: threads along x, y, z.
        shared_nbytes: dynamic shared memory of a block; see `Function.allow_shared`.
        is_cooperative: the device runs all blocks at once, so that they may wait for each other,
            or refuses the launch.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_nbytes: int = 0
    is_cooperative: bool = False


class KernelArguments:
    """Hold the arguments of one kernel packed as the driver wants them: built once, set often.

    Not locked; the driver has copied the values when a launch returns.

    Args:
        kinds: for each argument in kernel order "pointer", "u64", "i64", "u32", "i32" or "f32".

    Raises:
        InvalidInputError: a kind is none of these.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            if kind not in _FORMATS:
                accepted = ", ".join(_FORMATS)
                raise InvalidInputError("argument kind", found=repr(kind), accepted=accepted)
        self.kinds = tuple(kinds)
        self._pack = struct.Struct("<" + "".join(_FORMATS[kind] for kind in kinds))
        self._values = bytearray(self._pack.size)
        base = np.frombuffer(self._values, np.uint8).__array_interface__["data"][0]
        # The driver reads an array of addresses, one for each value.
        self._addresses = np.arange(len(kinds), dtype=np.uint64) * np.uint64(_SLOT_NBYTES)
        self._addresses += np.uint64(base)
        self.address: int = self._addresses.__array_interface__["data"][0]

    def set(self, *values: float) -> None:
        """Write all values, in kernel order.

        Raises:
            InvalidInputError: there are too many or too few, or one does not fit its kind; what
                was written before stays in part, so set again before a launch.
        """
        try:
            self._pack.pack_into(self._values, 0, *values)
        except (struct.error, OverflowError) as error:
            found, accepted = f"{values!r} ({error})", f"one value for each of {self.kinds}"
            raise InvalidInputError("kernel arguments", found=found, accepted=accepted) from error


class Module:
    """Own loaded code on one device.

    Args:
        device: where to load.
        image: checked bytes, for exactly that device's architecture or as PTX.

    Raises:
        DriverError: the driver does not take the code.
        CaptureError: this thread records a graph; loading waits for the device.
    """

    def __init__(self, device: Device, image: bytes) -> None:
        refuse_recording("a module was loaded")
        self.device = device
        self._module: Handle = device.create(driver.api.cuModuleLoadData, image)
        self.is_closed = False

    def function(self, name: str) -> "Function":
        """Return an entry point. Raises DriverError where it is not there, ClosedError."""
        if self.is_closed:
            raise ClosedError("module")
        find = driver.api.cuModuleGetFunction
        return Function(name, self.device.create(find, self._module, name.encode()), self)

    def close(self) -> None:
        """Unload; after the recording, if this thread makes one. A second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            self.device.releases.submit(driver.api.cuModuleUnload, self._module)


@dataclass(frozen=True)
class Function:
    """Name one entry point of a module, which it keeps referenced."""

    name: str
    handle: Handle
    module: Module

    def arguments(self, kinds: Sequence[str]) -> KernelArguments:
        """Return arguments of these kinds, checked against the code's own parameters.

        Raises:
            InvalidInputError: their number or a size differs, so that a launch would read past
                them.
            DriverError: the driver cannot say.
        """
        arguments = KernelArguments(kinds)
        sizes = self._parameter_sizes(len(kinds) + 1)
        given = [_NBYTES[kind] for kind in kinds]
        if sizes is not None and sizes != given:
            raise InvalidInputError(
                f"arguments of {self.name}",
                found=f"sizes {given} of {list(kinds)}",
                accepted=f"the kernel's parameters, {sizes} B",
            )
        return arguments

    def allow_shared(self, nbytes: int) -> None:
        """Let launches ask for so much dynamic shared memory, where 48 KiB are the limit otherwise.

        Raises:
            DriverError: no block of this device can have so much.
        """
        limit = driver.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.module.device.call(driver.api.cuFuncSetAttribute, self.handle, limit, nbytes)

    def _parameter_sizes(self, limit: int) -> list[int] | None:
        """Return the sizes of up to `limit` parameters, None where the driver cannot tell."""
        sizes: list[int] = []
        device = self.module.device
        try:
            while len(sizes) < limit:
                info = device.create(driver.api.cuFuncGetParamInfo, self.handle, len(sizes))
                sizes.append(int(info[1]))
        except DriverError as error:
            if error.code == _FUNCTION_NOT_FOUND:
                return None
            if (error.call, error.code) != ("cuFuncGetParamInfo", 1):  # past the last parameter
                raise
        return sizes


_launch_kernel = driver.api.cuLaunchKernel
_launch_cooperatively = driver.api.cuLaunchCooperativeKernel


class BoundLaunch:
    """Hold one launch whose function, shape and arguments are fixed; enqueue it often.

    Args:
        function: what to launch; its module must stay open.
        config: the grid and the blocks.
        arguments: packed; their values are read at each enqueue.
    """

    __slots__ = ("_address", "_arguments", "_bound", "_device", "_launch", "_module", "_shape")

    def __init__(
        self, function: Function, config: LaunchConfig, arguments: KernelArguments
    ) -> None:
        self._module = function.module
        self._device = function.module.device
        self._shape = (function.handle, *config.grid, *config.block, config.shared_nbytes)
        self._arguments = arguments
        self._address = arguments.address
        self._launch = _launch_cooperatively if config.is_cooperative else _launch_kernel
        # The stream of the last launch and the whole call for it; exchanged as one.
        self._bound: tuple[Stream | None, tuple[Any, ...]] = (None, ())

    @property
    def driver_function(self) -> str:
        """Return the name of the driver's function that is called."""
        is_cooperative = self._launch is _launch_cooperatively
        return "cuLaunchCooperativeKernel" if is_cooperative else "cuLaunchKernel"

    def driver_arguments(self, stream: Stream) -> tuple[Any, ...]:
        """Return what the driver's function is given, for comparing with the bare call."""
        if self._launch is _launch_cooperatively:
            return (*self._shape, stream.native, self._address)
        return (*self._shape, stream.native, self._address, 0)

    def enqueue(self, stream: Stream) -> None:
        """Launch: one driver call, no allocation, no lock, nothing waits.

        Raises:
            DriverError: the launch was refused, or an earlier kernel lost the context.
            CaptureError, ClosedError: see `Stream.require_usable`.

        Stream: the kernel is enqueued; memory behind pointer arguments must stay alive until the
            stream has passed it.
        """
        last, call = self._bound
        if (
            stream is not last
            or stream.is_closed
            or self._module.is_closed
            or this_thread.held_back is not None
            or self._device.fault is not None
        ):
            call = self._checked(stream)
        try:
            (outcome,) = self._launch(*call)
        except (KeyError, ValueError, RuntimeError) as error:
            outcome = error
        if outcome is not driver.SUCCESS:
            self._device.failed(self._launch, outcome)

    def _checked(self, stream: Stream) -> tuple[Any, ...]:
        """Return the call for a stream, or raise what forbids it."""
        if self._module.is_closed:
            raise ClosedError("module")
        if self._device.fault is not None:
            raise self._device.fault()
        stream.require_usable()
        call = self.driver_arguments(stream)
        self._bound = (stream, call)
        return call


def launch(
    function: Function, config: LaunchConfig, arguments: KernelArguments, *, stream: Stream
) -> None:
    """Enqueue one kernel; as `BoundLaunch.enqueue`, for a shape that changes each time."""
    BoundLaunch(function, config, arguments).enqueue(stream)
