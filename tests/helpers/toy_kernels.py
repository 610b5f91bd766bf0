"""Toy operators on the CPU: tiny, countable, and able to fail on purpose.

They serve the tests of the registry and the session; none of them is an operator of nxrt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from nxrt.graph import Graph, Node
from nxrt.kernels.api import Kernel, KernelFactory, KernelMatch, OpKey
from nxrt.kernels.registry import KernelPlugin
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, Role
from nxrt.providers.cpu import CpuProvider
from nxrt.session import Session
from nxrt.tensor import DType, TensorSpec, TensorView

DOMAIN = "test.toy"
X = TensorSpec(DType.F32, ("N",))
"""The one graph input, "x", of the sessions made here."""

KERNEL_NBYTES = 64
"""What each toy kernel leases where its factory was given a governor."""

Compute = Callable[[Sequence[NDArray[Any] | None]], NDArray[Any]]


@dataclass
class Journal:
    """Record what happened to the kernels of one test, in order."""

    events: list[str] = field(default_factory=list)
    inputs: list[tuple[TensorView | None, ...]] = field(default_factory=list)


def double(arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any]:
    """Return twice the first input."""
    assert arrays[0] is not None
    return arrays[0] * 2


def add(arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any]:
    """Return the sum of the inputs that are there."""
    total: NDArray[Any] = sum(array for array in arrays if array is not None)  # type: ignore[assignment]
    return total


class ToyKernel(Kernel[None]):
    """Apply a NumPy function to whole tensors."""

    def __init__(
        self, name: str, compute: Compute, journal: Journal, lease: MemoryLease | None
    ) -> None:
        self._name = name
        self._compute = compute
        self._journal = journal
        self._lease = lease
        journal.events.append(f"create {name}")

    def execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorView],
        *,
        stream: None,  # noqa: ARG002  (there is none on the CPU)
    ) -> None:
        """Note the call and its inputs, compute, write."""
        self._journal.events.append(f"execute {self._name}")
        self._journal.inputs.append(tuple(inputs))
        arrays = [None if view is None else view.to_array() for view in inputs]
        outputs[0].to_array()[...] = self._compute(arrays)

    def close(self) -> None:
        """Note the call, give the lease back."""
        self._journal.events.append(f"close {self._name}")
        if self._lease is not None:
            self._lease.close()


class ToyFactory(KernelFactory[None]):
    """Take every node whose first input is there; the output is described as that input is.

    Args:
        compute: what the kernels do.
        journal: where they note what happens to them.
        governor: charged `KERNEL_NBYTES` by each kernel from its creation to its end.
    """

    def __init__(
        self,
        compute: Compute = double,
        *,
        journal: Journal | None = None,
        governor: MemoryGovernor | None = None,
    ) -> None:
        self._compute = compute
        self._journal = journal or Journal()
        self._governor = governor

    def claim(
        self,
        node: Node,  # noqa: ARG002
        inputs: Sequence[TensorSpec | None],
    ) -> KernelMatch:
        """Take the node, or say that its input is missing."""
        if not inputs or inputs[0] is None:
            return KernelMatch.declined("the first input is missing")
        return KernelMatch.supported([inputs[0]])

    def create(
        self,
        node: Node,
        inputs: Sequence[TensorSpec | None],  # noqa: ARG002
        context: None,  # noqa: ARG002
    ) -> Kernel[Any]:
        """Create the kernel, charged where there is a governor."""
        lease = None
        if self._governor is not None:
            role = Role.WORKSPACE
            lease = self._governor.reserve(HOST, KERNEL_NBYTES, role=role, holder=node.name)
        return ToyKernel(node.name, self._compute, self._journal, lease)


class StubFactory(ToyFactory):
    """Answer with whatever a test supplies, right or wrong; as ToyFactory where it supplies none.

    Args:
        on_claim: called instead of `claim`.
        on_create: called instead of `create`.
    """

    def __init__(
        self,
        *,
        on_claim: Callable[[], Any] | None = None,
        on_create: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        self._on_claim = on_claim
        self._on_create = on_create

    def claim(self, node: Node, inputs: Sequence[TensorSpec | None]) -> KernelMatch:
        """Return what the test wants, or raise it."""
        if self._on_claim is None:
            return super().claim(node, inputs)
        answer: KernelMatch = self._on_claim()
        return answer

    def create(self, node: Node, inputs: Sequence[TensorSpec | None], context: None) -> Kernel[Any]:
        """Return what the test wants, or raise it."""
        if self._on_create is None:
            return super().create(node, inputs, context)
        kernel: Kernel[Any] = self._on_create()
        return kernel


def raising(error: Exception) -> Callable[[], Any]:
    """Return a function without arguments that raises."""

    def fail() -> Any:
        raise error

    return fail


def toy_plugin(
    factories: dict[str, KernelFactory[Any]], *, name: str = "toy", origin: str = "tests"
) -> KernelPlugin:
    """Return a plug-in that lists factories by operator name, in `DOMAIN`, version 1."""
    kernels = tuple((OpKey(DOMAIN, op), factory) for op, factory in factories.items())
    return KernelPlugin(name, kernels, origin=origin)


def toy_provider(factories: dict[str, KernelFactory[Any]]) -> CpuProvider:
    """Return a CPU provider that has the toy operators as well."""
    provider = CpuProvider()
    provider.registry.register(toy_plugin(factories))
    return provider


def toy_node(op: str, *inputs: str | None, output: str, name: str = "") -> Node:
    """Return a node of a toy operator with one output."""
    return Node(op, tuple(inputs), (output,), domain=DOMAIN, name=name)


@dataclass
class Toys:
    """Hold what one test needs: the operators Double and Add, their journal, and the books."""

    journal: Journal = field(default_factory=Journal)
    governor: MemoryGovernor = field(default_factory=MemoryGovernor)

    @property
    def used(self) -> int:
        """Return the host bytes that are charged now."""
        return self.governor.usage(HOST).used

    def factory(self, compute: Compute) -> ToyFactory:
        """Return a factory whose kernels are charged and write into the journal."""
        return ToyFactory(compute, journal=self.journal, governor=self.governor)

    def provider(self, **others: KernelFactory[Any]) -> CpuProvider:
        """Return a provider of Double, Add and other operators."""
        return toy_provider({"Double": self.factory(double), "Add": self.factory(add), **others})

    def session(self, *nodes: Node, **others: KernelFactory[Any]) -> Session:
        """Return a session of these nodes, on a provider of its own."""
        return Session(Graph(nodes, {"x": X}, ()), [self.provider(**others)], self.governor)
