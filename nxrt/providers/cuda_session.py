"""What one session gets from the CUDA provider: a stream, charged memory, copies, graphs.

Kernels and what they compute are the operators' business; who may be captured is the session's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from numpy.typing import NDArray

from nxrt.errors import NxrtError
from nxrt.graph import Node
from nxrt.kernels.api import CaptureSupport, GraphResource, Kernel
from nxrt.kernels.registry import Claim
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import Role, device_tier
from nxrt.providers.base import ProviderSession, Replayable
from nxrt.providers.create import created
from nxrt.runtime.capture import CapturedGraph, capture, require_recording
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.device import Device
from nxrt.runtime.device_memory import DeviceAllocator, PinnedAllocator
from nxrt.runtime.error_latch import SOURCE, ErrorLatch
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.kernel_context import KernelContext
from nxrt.runtime.recording import refuse_recording
from nxrt.runtime.staging import StagingRing
from nxrt.runtime.stream import ForeignStream, Stream
from nxrt.tensor import TensorSpec, TensorView

GRAPH_NBYTES = 96 * 1024
"""Charged for each executable graph: what the driver was seen to take for one of 8 kernels.
Measured on an H200 with driver 580.159, 2026-11-30: 64 graphs took 6 MiB."""


class CudaProviderSession(ProviderSession):
    """Serve one session with a stream of its own; every byte is leased before it is allocated."""

    stream: Stream

    def __init__(self, device: Device, cache: CompileCache, governor: MemoryGovernor) -> None:
        self._device = device
        self._governor = governor
        self._tier = device_tier(device.id.ordinal)
        self._latch: ErrorLatch | None = None
        with ExitStack() as undo:
            undo.callback(device.retain().close)
            self.stream = undo.enter_context(Stream(device))
            self._memory = DeviceAllocator(device, [self.stream])
            self._allocator = LeasedAllocator(self._memory, governor)
            pinned = PinnedAllocator(device, [self.stream])
            self._staging = StagingRing(device, LeasedAllocator(pinned, governor))
            undo.callback(self._staging.close)
            self._undo = undo.pop_all()
        self._context = KernelContext(device, cache, self._allocator, self._opened_latch)

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
        """Copy through page-locked memory; returns when the bytes are there and are valid."""
        self._staging.download(target, view.pointer, stream=self.stream)
        if self._latch is not None:
            self._latch.check()

    @contextmanager
    def ordered_with(self, stream: object | None) -> Iterator[None]:
        """Make the session's stream wait for the other before, and the other way round after."""
        if stream is None:
            yield
            return
        refuse_recording("another stream was used")
        other = ForeignStream(self._device, stream)
        self.stream.wait_for(other)
        try:
            yield
        except BaseException:
            with suppress(NxrtError):  # the error inside is the one to tell
                other.wait_for(self.stream)
            raise
        other.wait_for(self.stream)

    def synchronize(self) -> None:
        """Wait for the session's stream, and free what was waiting for it."""
        self.stream.synchronize()
        self._device.releases.poll()
        if self._latch is not None:
            self._latch.check()

    def drop(self, references: Sequence[object]) -> None:
        """Keep the references until the stream has passed what it has now."""
        self._device.releases.drop(references, after=[self.stream])

    def begin_step(self, stream: Stream) -> None:
        """Count the step, where kernels report faults."""
        if self._latch is not None:
            self._latch.advance(stream)

    def capture_support(self) -> CaptureSupport:
        """Say yes; raises what broke the device where it is lost."""
        if self._device.fault is not None:
            raise self._device.fault()
        return CaptureSupport(True)

    def capture(
        self,
        record: Callable[[Stream], None],
        *,
        resources: Callable[[], Sequence[GraphResource]],
        kept: Sequence[object],
        reuse: Replayable | None = None,
    ) -> CapturedGraph:
        """Record from a stream of the recording's own; see the base class."""
        words = [] if self._latch is None else [self._latch.words]
        retired = reuse.retire() if isinstance(reuse, CapturedGraph) else None
        return capture(
            self.stream,
            record,
            lease=self._graph_lease,
            resources=lambda: [*resources(), *words],
            kept=kept,
            reuse=retired,
        )

    def require_recording(self, stream: Stream) -> None:
        """Raise CaptureError where something invalidated the recording."""
        require_recording(stream)

    def close(self) -> None:
        """Wait for the stream, then give up everything; may be repeated.

        Raises:
            DriverError, DeviceFaultError: an earlier kernel failed or met bad data, and nobody was
                told yet; everything is given up.
            CaptureError: this thread records a graph; the session stays open.
        """
        refuse_recording("a session was closed")
        with ExitStack() as closing:
            closing.callback(self._settle)
            closing.push(self._undo.pop_all())
            if self._latch is not None:
                closing.callback(self._latch.close)
            if not (self.stream.is_closed or self._device.is_lost):
                self.synchronize()  # faults that nobody was told of are told here

    def _settle(self) -> None:
        with suppress(NxrtError):
            self._device.releases.drain()

    def _graph_lease(self) -> MemoryLease:
        return self._governor.reserve(
            self._tier,
            GRAPH_NBYTES,
            role=Role.GRAPH,
            holder="captured graph",
            settle=self._memory.reclaim,
        )

    def _opened_latch(self) -> ErrorLatch:
        if self._latch is None:
            module = self._context.load(SOURCE)
            self._latch = ErrorLatch(self._allocator, self._staging, self.stream, module)
        return self._latch
