"""Raw driver objects for tests of the driver itself, on a card and on its test double alike.

Nothing of nxrt's runtime is used but the function that makes a call and checks its status.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import DriverError
from nxrt.runtime import driver
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from tests.helpers.fake_driver import FakeDriver

api = driver.api
call = driver.call

KERNELS = Path(__file__).parents[1] / "fake_driver" / "contract_kernels.cu"
SPIN_CYCLES = 400_000_000
"""Some 0.2 s: long beside a call, short beside a test."""

NON_BLOCKING = 1
THREAD_LOCAL = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "fake_increment": (ctypes.c_uint64,),
    "fake_add": (ctypes.c_uint64, ctypes.c_uint32),
    "fake_count": (ctypes.c_uint64,),
    "fake_spin": (ctypes.c_uint64,),
}


def code_of(function: Callable[..., Any], *args: Any) -> int:
    """Make a call and return what it answers."""
    try:
        call(function, *args)
    except DriverError as error:
        return error.code
    return 0


def in_thread(action: Callable[[], Any]) -> Any:
    """Return what the action returns on a new thread, which has no current context."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001  (raised again below)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@cache
def contract_cubin() -> bytes:
    """Return the contract's kernels, compiled for device 0."""
    device = call(api.cuDeviceGet, 0)
    kinds = api.CUdevice_attribute
    major, minor = (
        call(api.cuDeviceGetAttribute, kind, device)
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return (
        Compiler().compile(KernelSource.load(KERNELS), CompileOptions(f"sm_{major}{minor}")).cubin
    )


class World:
    """Hold the primary context of device 0, current on this thread, and what is made in it.

    Everything is destroyed at the end, newest first; tests destroy nothing that they made here.

    Args:
        fake: the double's control, None on a card.
    """

    def __init__(self, fake: FakeDriver | None) -> None:
        self.fake = fake
        self._undo = ExitStack()
        self._streams: list[Any] = []
        driver.require()
        self.device = call(api.cuDeviceGet, 0)
        self.context = call(api.cuDevicePrimaryCtxRetain, self.device)
        self._undo.callback(call, api.cuDevicePrimaryCtxRelease, self.device)
        call(api.cuCtxPushCurrent, self.context)
        self._undo.callback(call, api.cuCtxPopCurrent)
        self.module = call(api.cuModuleLoadData, contract_cubin())
        self._undo.callback(call, api.cuModuleUnload, self.module)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams:
            if code_of(api.cuStreamIsCapturing, stream) or self.status(stream):
                code_of(api.cuStreamEndCapture, stream)
        if self.fake is not None:
            self.fake.set_lazy(False)
        self._undo.close()

    def stream(self, flags: int = NON_BLOCKING) -> Any:
        stream = call(api.cuStreamCreate, flags)
        self._streams.append(stream)
        self._undo.callback(call, api.cuStreamDestroy, stream)
        return stream

    def event(self, flags: int = 0) -> Any:
        event = call(api.cuEventCreate, flags)
        self._undo.callback(call, api.cuEventDestroy, event)
        return event

    def memory(self, nbytes: int) -> int:
        pointer = int(call(api.cuMemAlloc, nbytes))
        self._undo.callback(call, api.cuMemFree, pointer)
        return pointer

    def word(self, value: int = 0) -> int:
        """Return the address of a uint32 in device memory."""
        pointer = self.memory(4)
        call(api.cuMemcpyHtoD, pointer, np.uint32(value).tobytes(), 4)
        return pointer

    def pinned(self, nbytes: int) -> int:
        pointer = int(call(api.cuMemAllocHost, nbytes))
        self._undo.callback(call, api.cuMemFreeHost, pointer)
        return pointer

    def pinned_word(self) -> tuple[int, NDArray[np.uint32]]:
        """Return a page-locked uint32: its address, and an array that is it."""
        pointer = self.pinned(4)
        return pointer, np.ctypeslib.as_array((ctypes.c_uint32 * 1).from_address(pointer))

    def read(self, pointer: int, count: int = 1) -> list[int]:
        """Return uint32 words once everything enqueued is done."""
        call(api.cuCtxSynchronize)
        words = np.zeros(count, np.uint32)
        call(api.cuMemcpyDtoH, words.ctypes.data, pointer, words.nbytes)
        return [int(word) for word in words]

    def function(self, name: str) -> Any:
        return call(api.cuModuleGetFunction, self.module, name.encode())

    def launch(
        self,
        stream: Any,
        name: str,
        *values: int,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (1, 1, 1),
        shared_nbytes: int = 0,
    ) -> int:
        """Launch one of the contract's kernels; return the code."""
        arguments = (values, _PARAMETERS[name])
        shape = (*grid, *block, shared_nbytes)
        return code_of(api.cuLaunchKernel, self.function(name), *shape, stream, arguments, 0)

    def keep_busy(self, stream: Any) -> None:
        """Make work of the stream last: the double runs what it is given only when waited for."""
        if self.fake is not None:
            self.fake.set_lazy(True)
        assert self.launch(stream, "fake_spin", SPIN_CYCLES) == 0

    def begin(self, stream: Any) -> None:
        call(api.cuStreamBeginCapture, stream, THREAD_LOCAL)

    def end(self, stream: Any) -> Any:
        """End a capture; return the graph, which the world destroys."""
        graph = call(api.cuStreamEndCapture, stream)
        self._undo.callback(call, api.cuGraphDestroy, graph)
        return graph

    def graph(self, record: Callable[[Any], object] | None = None) -> Any:
        """Return what `record` enqueues on the stream it is given, as a graph; or an empty one."""
        stream = self.stream()
        self.begin(stream)
        if record is not None:
            record(stream)
        return self.end(stream)

    def executable(self, graph: Any) -> Any:
        executable = call(api.cuGraphInstantiate, graph, 0)
        self._undo.callback(call, api.cuGraphExecDestroy, executable)
        return executable

    def status(self, stream: Any) -> int:
        """Return 0 for a stream that is not captured, 1 for one that is, 2 for a lost capture."""
        return int(call(api.cuStreamIsCapturing, stream))
