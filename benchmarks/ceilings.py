"""What this device can do, measured in the same run as everything that is compared with it.

Bytes read in a second by a kernel that only reads, bytes copied, and the matrix unit's rate. No
figure is taken from a data sheet.
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.cases import IndexSelectShape
from nxrt import CudaProvider, MemoryGovernor, Role
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.device_memory import copy_on_device, fill_bytes
from nxrt.runtime.module import BoundLaunch, LaunchConfig, Module
from nxrt.runtime.stream import Event, Stream

SOURCE = Path(__file__).with_name("read_bandwidth.cu")
BUFFER_NBYTES = 2 * 2**30
FILL = 0x3C
_REPEATS = 9
_WARM_UP = 2
_THREADS = 512
_BLOCKS_PER_MULTIPROCESSOR = 2
_VECTOR_NBYTES = 16
_ARGUMENTS = ("pointer", "pointer", "u64")


@dataclass(frozen=True)
class Ceilings:
    """Hold what this device can do, in this run.

    Args:
        read_bytes_per_s: of a kernel that only reads.
        copy_bytes_per_s: of a copy, bytes read and written counted.
        matrix_flops_per_s: of a large bf16 product; None where PyTorch is not installed.
    """

    read_bytes_per_s: float
    copy_bytes_per_s: float
    matrix_flops_per_s: float | None = None

    def floor(self, shape: IndexSelectShape) -> tuple[float, str]:
        """Return the floor in microseconds and what it comes from: bytes or FLOPs, the larger."""
        by_bytes = shape.nbytes / self.read_bytes_per_s * 1e6
        if self.matrix_flops_per_s is None:
            return by_bytes, "bytes only"
        return max(
            (by_bytes, "bytes"), (shape.operations / self.matrix_flops_per_s * 1e6, "matrix")
        )

    def __str__(self) -> str:
        rates = f"read {self.read_bytes_per_s / 1e12:.2f} TB/s"
        rates += f", copy {self.copy_bytes_per_s / 1e12:.2f} TB/s (read and written)"
        if self.matrix_flops_per_s is None:
            return f"{rates}; no PyTorch, no matrix rate: floors are from bytes only"
        return f"{rates}, bf16 matrix {self.matrix_flops_per_s / 1e12:,.0f} TFLOP/s"


def measure_ceilings(provider: CudaProvider, *, nbytes: int = BUFFER_NBYTES) -> Ceilings:
    """Read a buffer, copy half of it to the other, multiply matrices; medians.

    Args:
        provider: of the device.
        nbytes: of the buffer, a multiple of 32; far more than the L2 cache holds.
    """
    with ExitStack() as stack:
        backend = stack.enter_context(closing(provider.open(MemoryGovernor())))
        stream = backend.stream
        buffer = backend.allocate(nbytes, role=Role.WORKSPACE, holder="what is read")
        stack.callback(buffer.close)
        checksum = backend.allocate(4, role=Role.WORKSPACE, holder="checksum")
        stack.callback(checksum.close)
        fill_bytes(buffer.pointer, FILL, nbytes, stream=stream)
        fill_bytes(checksum.pointer, 0, 4, stream=stream)
        module = stack.enter_context(closing(loaded(stream)))
        read = bound_read(module, buffer.pointer, checksum.pointer, nbytes)
        half = nbytes // 2

        def copy() -> None:
            copy_on_device(buffer.pointer + half, buffer.pointer, half, stream=stream)

        read_us = _median_us(lambda: read.enqueue(stream), stream)
        copy_us = _median_us(copy, stream)
    matrix = peers.matrix_flops_per_s() if peers.has_torch() else None
    return Ceilings(nbytes / read_us * 1e6, 2 * half / copy_us * 1e6, matrix)


def bound_read(module: Module, values: int, checksum: int, nbytes: int) -> BoundLaunch:
    """Return the launch that reads all of a buffer once.

    Args:
        module: of read_bandwidth.cu.
        values: address of the buffer.
        checksum: address of the word that the sum is added to.
        nbytes: of the buffer, a multiple of 16.
    """
    function = module.function("read_bandwidth")
    arguments = function.arguments(_ARGUMENTS)
    arguments.set(values, checksum, nbytes // _VECTOR_NBYTES)
    num_blocks = module.device.capabilities.num_multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
    return BoundLaunch(function, LaunchConfig((num_blocks, 1, 1), (_THREADS, 1, 1)), arguments)


def loaded(stream: Stream) -> Module:
    """Return read_bandwidth.cu compiled for the device and loaded; the caller closes it."""
    options = CompileOptions(stream.device.capabilities.arch)
    cache = CompileCache(Compiler(), None)
    return Module(stream.device, cache.fetch(KernelSource.load(SOURCE), options).code)


def _median_us(action: Callable[[], object], stream: Stream) -> float:
    """Return the median device time of an action that enqueues."""
    elapsed = []
    with ExitStack() as stack:
        first, last = (
            stack.enter_context(closing(Event(stream.device, is_timed=True))) for _ in range(2)
        )
        for _ in range(_WARM_UP + _REPEATS):
            first.record(stream)
            action()
            last.record(stream)
            last.synchronize()
            elapsed.append(last.elapsed_us(first))
    return statistics.median(elapsed[_WARM_UP:])
