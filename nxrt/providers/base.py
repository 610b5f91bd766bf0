"""What a provider is, and what one session gets from it.

A provider claims nodes and holds nothing that is charged; all memory belongs to the session that
opened it, under that session's governor.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from nxrt.graph import Node
from nxrt.kernels.api import CaptureSupport, GraphResource, Kernel
from nxrt.kernels.registry import Claim, KernelRegistry
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import Role
from nxrt.storage import DeviceId, Storage
from nxrt.tensor import TensorSpec, TensorView


class Allocation(Storage, Protocol):
    """Charged memory at an address fixed for life, and a handle on it that can be given up."""

    def close(self) -> None:
        """Give up this handle; may be repeated."""


class Replayable(Protocol):
    """A captured graph."""

    @property
    def num_nodes(self) -> int:
        """Return how many nodes were recorded."""

    @property
    def num_replays(self) -> int:
        """Return how often it was replayed."""

    @property
    def is_closed(self) -> bool:
        """Say whether it was closed."""

    @property
    def is_update(self) -> bool:
        """Say whether the executable of another graph was updated, and not a new one made."""

    def release_memory(self) -> None:
        """End all replaying and give up everything but what `reuse` takes over."""

    def replay(self) -> None:
        """Enqueue the graph; as `CapturedGraph.replay`, for what it raises too."""

    def close(self) -> None:
        """Give everything up once the last replay has passed; may be repeated."""


class ProviderSession(ABC):
    """Serve one session: kernels, charged memory, copies, capture; closed by the session."""

    stream: Any
    """What is passed to `Kernel.execute`."""

    @abstractmethod
    def create_kernel(
        self, claim: Claim, node: Node, inputs: Sequence[TensorSpec | None]
    ) -> Kernel[Any]:
        """Create the kernel of a claimed node.

        Raises:
            PluginError: a plug-in raised something that is not nxrt's own.
            NxrtError: the kernel could not be made, for the reason it says.
        """

    @abstractmethod
    def allocate(self, nbytes: int, *, role: Role, holder: str) -> Allocation:
        """Return charged memory. Raises LeaseRefusedError, AllocationFailedError."""

    @abstractmethod
    def upload(self, view: TensorView, offset: int, source: NDArray[Any]) -> None:
        """Copy a C-contiguous array into a view's elements from `offset` on, in stream order.

        Stream: the source may be changed as soon as this returns.
        """

    @abstractmethod
    def download(self, target: NDArray[Any], view: TensorView) -> None:
        """Copy a whole contiguous view into an array, after everything enqueued before.

        Raises: as `synchronize`.
        """

    def drop(self, references: Sequence[object]) -> None:  # noqa: B027
        """Drop references to memory that is not the session's once its last use has passed."""

    def begin_step(self, stream: Any) -> None:  # noqa: B027
        """Note that a run of the graph begins on a stream; enqueued, so that graphs repeat it."""

    def require_recording(self, stream: Any) -> None:  # noqa: B027
        """Raise CaptureError where something has invalidated a recording that is going on."""

    @abstractmethod
    def ordered_with(self, stream: object | None) -> AbstractContextManager[None]:
        """Order what is enqueued inside the with-block after, and before, another stream's work.

        Args:
            stream: an object with `__cuda_stream__`, or the driver's handle as an integer; what it
                has so far is waited for, and what it gets later waits. None orders nothing.

        Raises:
            InvalidInputError: it is no stream of this provider's device.
            CaptureError: its owner is capturing it.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything enqueued; faults that kernels met are raised here.

        Raises:
            DriverError: an earlier kernel failed.
            DeviceFaultError: an earlier kernel met bad data.
            CaptureError: this thread records a graph.
        """

    @abstractmethod
    def capture_support(self) -> CaptureSupport:
        """Say whether this provider can capture at all."""

    @abstractmethod
    def capture(
        self,
        record: Callable[[Any], None],
        *,
        resources: Callable[[], Sequence[GraphResource]],
        kept: Sequence[object],
        reuse: Replayable | None = None,
    ) -> Replayable:
        """Record what `record` enqueues.

        Args:
            record: enqueues the work on the stream that it is given; runs once.
            resources: asked after the recording; the graph takes a handle of its own on each.
            kept: kept referenced by the graph.
            reuse: a graph of this session's that is closed by this call, whatever comes of it; its
                executable is updated where the new graph has its shape.

        Raises:
            CaptureError: nothing is left behind.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for the device, then give everything up; may be repeated."""


@dataclass(frozen=True)
class Health:
    """Say whether a provider can still run kernels, and what broke it where it cannot."""

    is_ready: bool
    reason: str = ""


class ExecutionProvider(ABC):
    """Claim nodes for one device.

    A context manager. Sessions and memory that are still open keep the device beyond its closing.
    """

    name: str
    device: DeviceId
    registry: KernelRegistry

    @property
    def health(self) -> Health:
        """Say whether kernels can run; costs nothing."""
        return Health(True)

    def claim(
        self, node: Node, inputs: Sequence[TensorSpec | None], *, opset_version: int
    ) -> Claim:
        """Say who takes a node, or why nobody does. Raises PluginError."""
        return self.registry.claim(node, inputs, opset_version=opset_version)

    @abstractmethod
    def open(self, governor: MemoryGovernor) -> ProviderSession:
        """Return what one session needs, charged to `governor`. Raises LeaseRefusedError."""

    @abstractmethod
    def close(self) -> None:
        """Give up the device; may be repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
