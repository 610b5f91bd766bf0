"""The CPU provider: NumPy kernels on host memory. It needs no driver and captures nothing.

Its results are the oracles', byte for byte, as those of every other provider must be.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from numpy.typing import NDArray

from nxrt.errors import CaptureDeclinedError, InvalidInputError
from nxrt.graph import Node
from nxrt.kernels.api import CaptureSupport, GraphResource, Kernel
from nxrt.kernels.dsa_index_select.cpu import DsaIndexSelectCpuFactory
from nxrt.kernels.dsa_index_select.spec import KEY as DSA_INDEX_SELECT
from nxrt.kernels.registry import Claim, KernelPlugin, KernelRegistry
from nxrt.memory.allocator import Buffer, HostAllocator, LeasedAllocator
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import Role
from nxrt.providers.base import ExecutionProvider, ProviderSession, Replayable
from nxrt.providers.create import created
from nxrt.storage import CPU_DEVICE
from nxrt.tensor import TensorSpec, TensorView

KERNELS = KernelPlugin(
    "nxrt.cpu",
    ((DSA_INDEX_SELECT, DsaIndexSelectCpuFactory()),),
    origin="nxrt",
)


class CpuProvider(ExecutionProvider):
    """Run the NumPy kernels."""

    def __init__(self) -> None:
        self.name = "cpu"
        self.device = CPU_DEVICE
        self.registry = KernelRegistry()
        self.registry.register(KERNELS)

    def open(self, governor: MemoryGovernor) -> ProviderSession:
        """Return a session's share; nothing is charged yet."""
        return CpuProviderSession(governor)

    def close(self) -> None:
        """Do nothing: there is no device to give up."""


class CpuProviderSession(ProviderSession):
    """Serve one session from host memory, doing everything at once."""

    def __init__(self, governor: MemoryGovernor) -> None:
        self.stream = None
        self._allocator = LeasedAllocator(HostAllocator(), governor)

    def create_kernel(
        self, claim: Claim, node: Node, inputs: Sequence[TensorSpec | None]
    ) -> Kernel[Any]:
        """Create the kernel of a claimed node; see the base class."""
        return created(claim, node, inputs, None)

    def allocate(self, nbytes: int, *, role: Role, holder: str) -> Buffer:
        """Return charged host memory."""
        return self._allocator.allocate(nbytes, role=role, holder=holder)

    def upload(self, view: TensorView, offset: int, source: NDArray[Any]) -> None:
        """Copy at once."""
        view.to_array().reshape(-1)[offset : offset + source.size] = source.reshape(-1)

    def download(self, target: NDArray[Any], view: TensorView) -> None:
        """Copy at once."""
        target[...] = view.to_array()

    def ordered_with(self, stream: object | None) -> AbstractContextManager[None]:
        """Order nothing; raises InvalidInputError for a stream: there are none on the CPU."""
        if stream is not None:
            accepted = "None: the CPU has no streams"
            raise InvalidInputError("stream", found=repr(stream), accepted=accepted)
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: everything is done when its call returns."""

    def capture_support(self) -> CaptureSupport:
        """Say no."""
        return CaptureSupport(False, "the CPU has no graphs; run eagerly, or use a CUDA provider")

    def capture(
        self,
        record: Callable[[Any], None],  # noqa: ARG002
        *,
        resources: Callable[[], Sequence[GraphResource]],  # noqa: ARG002
        kept: Sequence[object],  # noqa: ARG002
        reuse: Replayable | None = None,  # noqa: ARG002
    ) -> Replayable:
        """Decline. Raises CaptureDeclinedError."""
        raise CaptureDeclinedError([("cpu", self.capture_support().reason)])

    def close(self) -> None:
        """Do nothing: allocations are closed by whoever made them."""
