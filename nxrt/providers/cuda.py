"""The CUDA provider: one device, its compile cache, and its table of kernels.

Claiming and compiling ahead of time need no driver; everything else does, and says so at once.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from nxrt.errors import ClosedError
from nxrt.graph import Node
from nxrt.kernels.api import CaptureSupport, GraphResource, Kernel
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelectFactory
from nxrt.kernels.dsa_index_select.spec import KEY as DSA_INDEX_SELECT
from nxrt.kernels.registry import Claim, KernelPlugin, KernelRegistry
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import Role, device_tier
from nxrt.providers.base import ExecutionProvider, ProviderSession
from nxrt.providers.create import created
from nxrt.runtime.capture import CapturedGraph, Closable, capture
from nxrt.runtime.compile_cache import CacheStats, CompileCache, default_cache_dir
from nxrt.runtime.compiler import Compiler
from nxrt.runtime.device import Capabilities, Device
from nxrt.runtime.device_memory import DeviceAllocator, PinnedAllocator
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.kernel_context import KernelContext
from nxrt.runtime.staging import StagingRing
from nxrt.runtime.stream import Stream
from nxrt.tensor import TensorSpec, TensorView

KERNELS = KernelPlugin(
    "nxrt.cuda",
    ((DSA_INDEX_SELECT, DsaIndexSelectFactory()),),
    origin="nxrt",
)

GRAPH_NBYTES = 96 * 1024
"""Charged for each executable graph: what the driver was seen to take for one of 8 kernels.
Measured on an H200 with driver 580.159, 2026-11-30: 64 graphs took 6 MiB."""


class CudaProvider(ExecutionProvider):
    """Run CUDA kernels on one device.

    Args:
        ordinal: the device.
        cache_dir: where compiled kernels are kept; from the environment when left out.

    Raises:
        DriverUnavailableError: there is no driver or no device; at once, never a hang.
        InvalidInputError: there is no device of that number.
    """

    def __init__(self, ordinal: int = 0, *, cache_dir: Path | None = None) -> None:
        self.name = "cuda"
        self.registry = KernelRegistry()
        self.registry.register(KERNELS)
        self._device = Device(ordinal)
        self.device = self._device.id
        self._is_closed = False
        self._cache = CompileCache(Compiler(), cache_dir or default_cache_dir(os.environ))

    @property
    def capabilities(self) -> Capabilities:
        """Return what the device can do."""
        return self._device.capabilities

    @property
    def cache_stats(self) -> CacheStats:
        """Return what the compile cache did for this provider."""
        return self._cache.stats

    def open(self, governor: MemoryGovernor) -> "CudaProviderSession":
        """Return a session's stream, memory and staging.

        Raises:
            ClosedError: the provider is closed.
            LeaseRefusedError, AllocationFailedError, DriverError: nothing is kept.
        """
        if self._is_closed:
            raise ClosedError("CUDA provider")
        return CudaProviderSession(self._device, self._cache, governor)

    def close(self) -> None:
        """Give up the device; sessions that are open keep it. May be repeated."""
        if not self._is_closed:
            self._is_closed = True
            self._device.close()


class CudaProviderSession(ProviderSession):
    """Serve one session with a stream of its own; every byte is leased before it is allocated."""

    stream: Stream

    def __init__(self, device: Device, cache: CompileCache, governor: MemoryGovernor) -> None:
        self._governor = governor
        self._tier = device_tier(device.id.ordinal)
        self._allocator = LeasedAllocator(DeviceAllocator(device), governor)
        self._context = KernelContext(device, cache, self._allocator)
        with ExitStack() as undo:
            device.retain()
            undo.callback(device.close)
            self.stream = undo.enter_context(Stream(device))
            self._staging = StagingRing(device, LeasedAllocator(PinnedAllocator(device), governor))
            undo.callback(self._staging.close)
            self._undo = undo.pop_all()

    def create_kernel(
        self, claim: Claim, node: Node, inputs: Sequence[TensorSpec | None]
    ) -> Kernel[Any]:
        """Create the kernel of a claimed node; see the base class."""
        return created(claim, node, inputs, self._context)

    def allocate(self, nbytes: int, *, role: Role, holder: str) -> GraphAllocation:
        """Return charged device memory that graphs can hold on to."""
        return GraphAllocation.allocate(self._allocator, nbytes, role=role, holder=holder)

    def upload(self, view: TensorView, offset: int, source: NDArray[Any]) -> None:
        """Copy through page-locked memory, in stream order."""
        pointer = view.pointer + offset * view.dtype.itemsize
        self._staging.upload(pointer, source, stream=self.stream)

    def download(self, target: NDArray[Any], view: TensorView) -> None:
        """Copy through page-locked memory; returns when the bytes are there."""
        self._staging.download(target, view.pointer, stream=self.stream)

    def synchronize(self) -> None:
        """Wait for the session's stream."""
        self.stream.synchronize()

    def capture_support(self) -> CaptureSupport:
        """Say yes."""
        return CaptureSupport(True)

    def capture(
        self,
        record: Callable[[], None],
        *,
        resources: Sequence[GraphResource],
        kept: Sequence[object],
    ) -> CapturedGraph:
        """Record on the session's stream; see the base class."""
        owned: list[Closable] = []
        with ExitStack() as undo:
            lease = self._governor.reserve(
                self._tier, GRAPH_NBYTES, role=Role.GRAPH, holder="captured graph"
            )
            owned.append(undo.enter_context(lease))
            for resource in resources:
                owned.append(resource.share())
                undo.callback(owned[-1].close)
            undo.pop_all()
        with self._staging.held_back():
            return capture(self.stream, record, owned=owned, kept=kept)

    def close(self) -> None:
        """Wait for the stream, then give up staging and stream; may be repeated."""
        self._undo.close()
