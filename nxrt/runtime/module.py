"""Loaded code: modules, their functions, and the launch of one.

What is loaded comes checked from the compile cache; sizes and grids come from the kernel's own
launch code.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nxrt.memory.deferral import release
from nxrt.runtime import driver
from nxrt.runtime.device import Device
from nxrt.runtime.driver import Handle
from nxrt.runtime.stream import Stream

_SLOT_NBYTES = 8
_FORMATS = {"pointer": "Q", "u64": "Q", "i64": "q", "u32": "I4x", "i32": "i4x", "f32": "f4x"}


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Give the shape of one launch, each number named.

    Args:
        grid: blocks along x, y, z.
        block: threads along x, y, z.
        shared_nbytes: dynamic shared memory of a block.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_nbytes: int = 0


class KernelArguments:
    """Hold the arguments of one kernel packed as the driver wants them: built once, set often.

    Not locked; the driver has copied the values when a launch returns.

    Args:
        kinds: for each argument in kernel order "pointer", "u64", "i64", "u32", "i32" or "f32".
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._pack = struct.Struct("<" + "".join(_FORMATS[kind] for kind in kinds))
        self._values = bytearray(self._pack.size)
        base = np.frombuffer(self._values, np.uint8).__array_interface__["data"][0]
        # The driver reads an array of addresses, one for each value.
        self._addresses = np.arange(len(kinds), dtype=np.uint64) * np.uint64(_SLOT_NBYTES)
        self._addresses += np.uint64(base)
        self.address: int = self._addresses.__array_interface__["data"][0]

    def set(self, *values: float) -> None:
        """Write all values, in kernel order. Raises struct.error on a wrong count or type."""
        self._pack.pack_into(self._values, 0, *values)


class Module:
    """Own loaded code on one device.

    Args:
        device: where to load.
        cubin: checked bytes for exactly that device's architecture.

    Raises:
        DriverError: the driver does not take the code.
    """

    def __init__(self, device: Device, cubin: bytes) -> None:
        self._device = device
        with device.current():
            self._module: Handle = driver.call(driver.api.cuModuleLoadData, cubin)
        self._is_closed = False

    def function(self, name: str) -> "Function":
        """Return an entry point. Raises DriverError where there is none of that name."""
        with self._device.current():
            handle = driver.call(driver.api.cuModuleGetFunction, self._module, name.encode())
        return Function(name, handle, self)

    def close(self) -> None:
        """Unload; after the capture, if this thread is in one. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        release(self._unload)

    def _unload(self) -> None:
        with self._device.current():
            driver.call(driver.api.cuModuleUnload, self._module)


@dataclass(frozen=True)
class Function:
    """Name one entry point of a module, which it keeps referenced."""

    name: str
    handle: Handle
    module: Module


def launch(
    function: Function, config: LaunchConfig, arguments: KernelArguments, *, stream: Stream
) -> None:
    """Enqueue one kernel.

    The caller has made the stream's device current. Nothing is allocated and nothing waits.

    Raises:
        DriverError: the launch was refused, or an earlier kernel lost the context.

    Stream: the kernel is enqueued; memory behind pointer arguments must stay alive until the
        stream has passed it.
    """
    driver.call(
        driver.api.cuLaunchKernel,
        function.handle,
        *config.grid,
        *config.block,
        config.shared_nbytes,
        stream.handle,
        arguments.address,
        0,
    )
