"""What a provider is, and what one session gets from it.

A provider claims nodes and holds nothing that is charged; all memory belongs to the session that
opened it, under that session's governor.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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

    def replay(self) -> None:
        """Enqueue the graph. Raises ClosedError, DriverError."""

    def close(self) -> None:
        """Wait for the last replay and give everything up; may be repeated."""


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
        """Copy a whole contiguous view into an array, after everything enqueued before."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything enqueued. Raises DriverError for faults of earlier kernels."""

    @abstractmethod
    def capture_support(self) -> CaptureSupport:
        """Say whether this provider can capture at all."""

    @abstractmethod
    def capture(
        self,
        record: Callable[[], None],
        *,
        resources: Sequence[GraphResource],
        kept: Sequence[object],
    ) -> Replayable:
        """Record what `record` enqueues.

        Args:
            record: enqueues the work; runs once.
            resources: the graph takes a handle of its own on each.
            kept: kept referenced by the graph.

        Raises:
            CaptureError: nothing is left behind.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for the device, then give everything up; may be repeated."""


class ExecutionProvider(ABC):
    """Claim nodes for one device.

    A context manager; close it after every session that uses it.
    """

    name: str
    device: DeviceId
    registry: KernelRegistry

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
