"""The plug-in interface: what a kernel and its factory are, and the answers they give.

No driver, no registry, no provider. Every "no" here is a value that carries its reason.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from nxrt.errors import InvalidInputError
from nxrt.graph import Node, normalized_domain
from nxrt.tensor import TensorSpec, TensorView

StreamT_contra = TypeVar("StreamT_contra", contravariant=True)
"""What orders a provider's work: `nxrt.runtime.stream.Stream` on CUDA, None on the CPU."""

ContextT_contra = TypeVar("ContextT_contra", contravariant=True)
"""What a provider lends its kernels: `nxrt.runtime.kernel_context.KernelContext` on CUDA, None on
the CPU."""


@dataclass(frozen=True, slots=True)
class OpKey:
    """Name one version of an operator.

    Args:
        domain: such as "pkg.nxrt"; "ai.onnx" and "" are the same.
        op: the operator's name.
        since_version: the first domain version this contract holds for, from 1.
    """

    domain: str
    op: str
    since_version: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "domain", normalized_domain(self.domain))
        version = self.since_version
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise InvalidInputError(
                f"since_version of {self.op}", found=repr(version), accepted="an integer from 1"
            )

    def __str__(self) -> str:
        return f"{self.domain or 'ai.onnx'}::{self.op} v{self.since_version}"


@dataclass(frozen=True, slots=True)
class KernelMatch:
    """Answer a claim: the specs of the outputs, or the reason why not."""

    outputs: tuple[TensorSpec, ...] = ()
    reason: str = ""

    @property
    def is_supported(self) -> bool:
        """Say whether the node was taken."""
        return not self.reason

    @classmethod
    def supported(cls, outputs: Sequence[TensorSpec]) -> "KernelMatch":
        """Take the node; its outputs will have these specs."""
        return cls(outputs=tuple(outputs))

    @classmethod
    def declined(cls, reason: str) -> "KernelMatch":
        """Decline, saying what came, what is accepted, and how to fix it."""
        return cls(reason=reason or "declined without a reason")


@dataclass(frozen=True, slots=True)
class CaptureSupport:
    """Answer whether a kernel can be recorded now, and if not why."""

    is_supported: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkspaceRequirement:
    """Say how many bytes of scratch an execution needs; for planning and for budgets."""

    nbytes: int = 0


@dataclass(frozen=True)
class CompileUnit:
    """Name one translation unit that a kernel may need, so that it can be compiled ahead of time.

    Args:
        path: the .cu file.
        defines: preprocessor names and values.
        flags: further NVRTC options.
        artefact: "cubin", for exactly one architecture; or "ptx", which the driver compiles when it
            loads it. What `KernelContext.load` is given.
    """

    path: Path
    defines: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    artefact: str = "cubin"


class GraphResource(Protocol):
    """Device memory whose address a captured graph bakes in."""

    @property
    def identity(self) -> int:
        """Return a number that names this memory in the whole process."""

    def share(self) -> Self:
        """Return a further handle, which keeps the memory alive."""

    def close(self) -> None:
        """Give up this handle."""


class Kernel(ABC, Generic[StreamT_contra]):
    """Execute one node. Made by a factory, owned by a session, closed by it.

    Called from one thread at a time unless the implementation says otherwise.
    """

    @abstractmethod
    def execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorView],
        *,
        stream: StreamT_contra,
    ) -> None:
        """Enqueue the work, or do it where there is no stream; an omitted input is None.

        Must not synchronise or read device memory back; must not allocate or compile once a shape
        has run. May raise InvalidNodeError for tensors that the contract refuses, before anything
        is enqueued.

        Stream: the outputs are written once the stream has passed what was enqueued; the caller
            keeps all memory alive until then.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up everything the kernel owns; may be repeated; must not raise."""

    def workspace_requirement(
        self,
        inputs: Sequence[TensorSpec | None],  # noqa: ARG002
    ) -> WorkspaceRequirement:
        """Return the scratch that these inputs need; the kernel owns and charges it.

        Raises:
            SizeOverflowError: the sizes cannot be addressed.
        """
        return WorkspaceRequirement()

    def capture_support(
        self,
        inputs: Sequence[TensorSpec | None],  # noqa: ARG002
    ) -> CaptureSupport:
        """Say whether `execute` on such inputs can be recorded now. Asked before recording."""
        return CaptureSupport(False, "the kernel does not declare that it can be captured")

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return the memory of its own that recordings bake in; asked after each recording.

        Replays of other threads may be enqueued between the launches of an eager execution: what
        both would write must not be the same memory. `nxrt.runtime.workspace` sees to that.
        """
        return ()

    def forget(self) -> None:
        """Drop references to tensors of earlier executions; called when a binding is closed."""


class KernelFactory(ABC, Generic[ContextT_contra]):
    """Claim nodes and create their kernels. Stateless; called from any thread."""

    @abstractmethod
    def claim(self, node: Node, inputs: Sequence[TensorSpec | None]) -> KernelMatch:
        """Say whether `create` will work and what comes out.

        Must be complete: a node that is taken here may not be refused later for its attributes,
        dtypes or known dimensions. Touches no device. Must not raise.

        Args:
            node: the node.
            inputs: by slot; None is an omitted input; dimensions may be symbolic.
        """

    @abstractmethod
    def create(
        self, node: Node, inputs: Sequence[TensorSpec | None], context: ContextT_contra
    ) -> Kernel[Any]:
        """Create the kernel of a node that was claimed: compile, load, take what it keeps.

        Raises:
            InvalidNodeError: the node was never claimed.
            CompileError, DriverError, LeaseRefusedError: nothing is kept.
        """

    def compile_units(self) -> Sequence[CompileUnit]:
        """Return everything `create` may have to compile, for compiling ahead of time."""
        return ()
