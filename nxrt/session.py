"""Run a graph: place its nodes, create their kernels, execute, capture, replay.

It moves no data by itself (that is Binding) and knows no device (that is the provider).
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nxrt.binding import Binding
from nxrt.errors import (
    CaptureDeclinedError,
    CaptureError,
    ClosedError,
    InvalidInputError,
    UnsupportedGraphError,
)
from nxrt.graph import Graph, Node
from nxrt.kernels.api import Kernel
from nxrt.kernels.registry import Claim
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import Role
from nxrt.providers.base import ExecutionProvider, ProviderSession, Replayable
from nxrt.tensor import MAX_SIZE, TensorSpec, TensorView


@dataclass(frozen=True)
class Placement:
    """Report who serves a node: the provider, the plug-in, and the operator version chosen."""

    node: str
    provider: str
    plugin: str
    op: str


@dataclass(frozen=True)
class _Step:
    """One node, ready to run."""

    node: Node
    kernel: Kernel[Any]


class Session:
    """Run one graph on the first provider that takes all of its nodes.

    A context manager. `run` and `capture` may be called from any thread and take turns. `close`
    closes the graphs captured here and the bindings made here.

    Args:
        graph: what to run.
        providers: asked in this order; they must outlive the session.
        governor: every byte this session allocates is charged to it.

    Raises:
        UnsupportedGraphError: no provider takes every node; says who declined what and why.
        PluginError, CompileError, DriverError, LeaseRefusedError: a kernel could not be created;
            nothing is kept.
    """

    def __init__(
        self, graph: Graph, providers: Sequence[ExecutionProvider], governor: MemoryGovernor
    ) -> None:
        self.graph = graph
        placed = _place(graph, providers)
        self.provider = placed.provider
        self.specs: Mapping[str, TensorSpec] = placed.specs
        self.placements = placed.placements()
        self.num_captures = 0
        self._graphs: list[Replayable] = []
        self._bindings: list[Binding] = []
        # Re-entrant: a kernel may close what it made, or ask the session that runs it.
        self._lock = threading.RLock()
        self._is_closed = False
        with ExitStack() as undo:
            self._backend = placed.provider.open(governor)
            undo.callback(self._backend.close)
            self._steps: list[_Step] = []
            for node, claim in placed.claims:
                inputs = [None if name is None else placed.specs[name] for name in node.inputs]
                kernel = self._backend.create_kernel(claim, node, inputs)
                undo.callback(kernel.close)
                self._steps.append(_Step(node, kernel))
            self._undo = undo.pop_all()

    @property
    def kernels(self) -> tuple[Kernel[Any], ...]:
        """Return the kernels in the order of the graph's nodes, for inspection."""
        return tuple(step.kernel for step in self._steps)

    @property
    def provider_session(self) -> ProviderSession:
        """Return what the provider opened for this session, for inspection."""
        return self._backend

    @property
    def num_replays(self) -> int:
        """Return how often graphs captured here were replayed."""
        return sum(graph.num_replays for graph in self._graphs)

    def bind(
        self,
        dims: Mapping[str, int] | None = None,
        *,
        views: Mapping[str, TensorView] | None = None,
        roles: Mapping[str, Role] | None = None,
    ) -> Binding:
        """Give every value of the graph memory, for one set of sizes.

        Args:
            dims: a size for each symbol in the graph's input specs.
            views: memory of the caller's to use for some values.
            roles: what the allocated rest is held for, by value; shown in reports.

        Raises:
            InvalidInputError: a symbol has no size, a name is unknown, a view does not fit.
            LeaseRefusedError, AllocationFailedError: nothing is kept.
        """
        self._require_open()
        sizes = dict(dims or {})
        symbols = {symbol for spec in self.specs.values() for symbol in spec.symbols}
        _check_dims(sizes, symbols)
        specs = {name: spec.bind(sizes) for name, spec in self.specs.items()}
        binding = Binding(
            specs,
            self._backend,
            device=self.provider.device,
            written=frozenset(name for node in self.graph.nodes for name in node.outputs),
            views=views or {},
            roles=roles or {},
            lock=self._lock,
        )
        with self._lock:
            self._bindings = [known for known in self._bindings if not known.is_closed]
            self._bindings.append(binding)
        return binding

    def run(self, binding: Binding) -> None:
        """Execute every node eagerly.

        Raises:
            InvalidInputError: the binding is another session's.
            InvalidNodeError: a kernel refuses the tensors; earlier nodes have run.
            LeaseRefusedError, AllocationFailedError: a workspace cannot grow.
            DriverError: a launch was refused, or an earlier kernel failed.

        Stream: enqueued on the session's stream; `Binding.read` and `synchronize` wait for it.
        """
        with self._lock:
            self._require_own(binding)
            for step in self._steps:
                try:
                    self._execute(step, binding)
                except Exception as error:
                    error.add_note(f"while running node {step.node.name!r}")
                    raise

    def capture(self, binding: Binding) -> Replayable:
        """Record one run of the graph and return it, ready to replay.

        Replays read and write the binding's addresses: write new inputs into the binding, replay,
        read. The graph keeps that memory, and the kernels' workspaces, alive until it is closed.

        Raises:
            CaptureDeclinedError: before anything is recorded, with every node that cannot be.
            CaptureError: recording failed; the session can go on running and capturing.
            LeaseRefusedError: the graph itself does not fit the budget.

        Stream: nothing is executed.
        """
        with self._lock:
            self._require_own(binding)
            self._audit(binding)
            resources = list(binding.graph_resources())
            for step in self._steps:
                resources += step.kernel.graph_resources()
            graph = self._backend.capture(
                lambda: self._record(binding),
                resources=resources,
                kept=[binding.view(name) for name in binding.specs],
            )
            self._graphs.append(graph)
            self.num_captures += 1
            return graph

    def synchronize(self) -> None:
        """Wait for everything enqueued. Raises DriverError for faults of earlier kernels."""
        self._require_open()
        self._backend.synchronize()

    def close(self) -> None:
        """Close graphs, bindings, kernels and what the provider opened; may be repeated.

        Everything is closed even where one raises.
        """
        with self._lock, ExitStack() as closing:
            self._is_closed = True
            closing.callback(self._undo.close)
            for binding in self._bindings:
                closing.callback(binding.close)
            for graph in self._graphs:
                closing.callback(graph.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _execute(self, step: _Step, binding: Binding) -> None:
        inputs = [None if name is None else binding.view(name) for name in step.node.inputs]
        outputs = [binding.view(name) for name in step.node.outputs]
        step.kernel.execute(inputs, outputs, stream=self._backend.stream)

    def _record(self, binding: Binding) -> None:
        for step in self._steps:
            try:
                self._execute(step, binding)
            except CaptureError as error:
                name = step.node.name
                raise CaptureError(error.stage, error.problem, kernel=name) from error
            except Exception as error:
                raise CaptureError("record", str(error), kernel=step.node.name) from error

    def _audit(self, binding: Binding) -> None:
        offenders = []
        support = self._backend.capture_support()
        if not support.is_supported:
            offenders.append((self.provider.name, support.reason))
        else:
            for step in self._steps:
                names = step.node.inputs
                specs = [None if name is None else binding.specs[name] for name in names]
                support = step.kernel.capture_support(specs)
                if not support.is_supported:
                    offenders.append((step.node.name, support.reason))
        if offenders:
            raise CaptureDeclinedError(offenders)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("session")

    def _require_own(self, binding: Binding) -> None:
        # Another session's memory may have other dtypes and belongs to another stream.
        self._require_open()
        if not binding.is_made_by(self._backend):
            raise InvalidInputError(
                "binding",
                found="one of another session",
                accepted="one made by this session's bind",
            )


@dataclass(frozen=True)
class _Placed:
    """A graph of which one provider has claimed every node."""

    provider: ExecutionProvider
    claims: list[tuple[Node, Claim]]
    specs: dict[str, TensorSpec]

    def placements(self) -> tuple[Placement, ...]:
        return tuple(
            Placement(node.name, self.provider.name, claim.plugin, str(claim.key))
            for node, claim in self.claims
        )


def _place(graph: Graph, providers: Sequence[ExecutionProvider]) -> _Placed:
    if not providers:
        raise InvalidInputError("providers", found="none", accepted="at least one")
    declines: list[str] = []
    for provider in providers:
        placed = _claim_all(graph, provider, declines)
        if placed is not None:
            return placed
    raise UnsupportedGraphError(declines)


def _claim_all(graph: Graph, provider: ExecutionProvider, declines: list[str]) -> _Placed | None:
    """Ask a provider for every node; specs of later inputs come from earlier answers."""
    specs = dict(graph.inputs)
    claims: list[tuple[Node, Claim]] = []
    for node in graph.nodes:
        if any(name is not None and name not in specs for name in node.inputs):
            continue  # an earlier decline left its inputs unknown
        inputs = [None if name is None else specs[name] for name in node.inputs]
        version = graph.opset_version(node.domain)
        claim = provider.claim(node, inputs, opset_version=version)
        if not claim.match.is_supported:
            declines.append(f"{provider.name} declines {node.name!r}: {claim.match.reason}")
            continue
        claims.append((node, claim))
        specs.update(zip(node.outputs, claim.match.outputs, strict=True))
    return _Placed(provider, claims, specs) if len(claims) == len(graph.nodes) else None


def _check_dims(dims: Mapping[str, int], symbols: set[str]) -> None:
    for symbol in sorted(symbols - dims.keys()):
        raise InvalidInputError(f"dims[{symbol!r}]", found="nothing", accepted="a size")
    for name, size in dims.items():
        if name not in symbols:
            accepted = ", ".join(sorted(symbols)) or "none: all sizes are known"
            raise InvalidInputError("dims", found=repr(name), accepted=accepted)
        is_integer = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if not is_integer or not 0 <= size <= MAX_SIZE:
            accepted = f"an integer from 0 to {MAX_SIZE}"
            raise InvalidInputError(f"dims[{name!r}]", found=repr(size), accepted=accepted)
