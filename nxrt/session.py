"""Run a graph: place its nodes, create their kernels, execute, capture, replay.

It moves no data by itself (that is Binding) and knows no device (that is the provider).
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

from nxrt.binding import Binding
from nxrt.errors import (
    AllocationFailedError,
    CaptureDeclinedError,
    CaptureError,
    ClosedError,
    DeviceLostError,
    DriverError,
    ForkedProcessError,
    InvalidInputError,
    LeaseRefusedError,
)
from nxrt.graph import Graph
from nxrt.graph_cache import GraphCache, StepStats
from nxrt.kernels.api import GraphResource, Kernel
from nxrt.locks import new_rlock
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import Role
from nxrt.placement import check_dims, placed_graph
from nxrt.providers.base import ExecutionProvider, ProviderSession, Replayable
from nxrt.ready_node import ReadyNode
from nxrt.runtime.recording import refuse_recording
from nxrt.tensor import TensorSpec, TensorView

_log = logging.getLogger(__name__)

_MAX_RECENT = 64
"""How many enqueued nodes an asynchronous failure names."""


class Session:
    """Run one graph on the first provider that takes all of its nodes.

    A context manager. Everything may be called from any thread; runs and captures take turns,
    replays do not wait for anything. `close` closes the graphs captured here and the bindings made
    here.

    Args:
        graph: what to run.
        providers: asked in this order.
        governor: every byte this session allocates is charged to it.
        max_graphs: how many graphs `step` keeps.

    Raises:
        UnsupportedGraphError: no provider takes every node; says who declined what and why.
        PluginError, CompileError, DriverError, LeaseRefusedError: a kernel could not be created;
            nothing is kept.
        InvalidInputError: `max_graphs` is not a number from 1.
    """

    def __init__(
        self,
        graph: Graph,
        providers: Sequence[ExecutionProvider],
        governor: MemoryGovernor,
        *,
        max_graphs: int = 8,
    ) -> None:
        if not isinstance(governor, MemoryGovernor):
            accepted = "a MemoryGovernor"
            raise InvalidInputError("governor", found=repr(governor), accepted=accepted)
        self.graph = graph
        placed = placed_graph(graph, providers)
        self.provider = placed.provider
        self.specs: Mapping[str, TensorSpec] = placed.specs
        self.placements = placed.placements()
        self.num_captures = 0
        self._num_past_replays = 0
        self._cache = GraphCache(self._captured, self._audit, self._generation, max_graphs)
        self._graphs: list[Replayable] = []
        self._bindings: list[Binding] = []
        self._recent: deque[str] = deque(maxlen=_MAX_RECENT)
        # Re-entrant: a kernel may close what it made, or ask the session that runs it.
        self._lock = new_rlock()
        self._is_closed = False
        with ExitStack() as undo:
            self._backend = placed.provider.open(governor)
            undo.callback(self._backend.close)
            self._steps: list[ReadyNode] = []
            for node, claim in placed.claims:
                inputs = [None if name is None else placed.specs[name] for name in node.inputs]
                kernel = self._backend.create_kernel(claim, node, inputs)
                undo.callback(kernel.close)
                self._steps.append(ReadyNode(node, kernel, claim.plugin))
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
        """Return how often graphs of this session were replayed; never falls."""
        past_and_kept = self._num_past_replays + self._cache.num_replays
        return past_and_kept + sum(graph.num_replays for graph in self._graphs)

    @property
    def num_graphs(self) -> int:
        """Return how many graphs `step` keeps now."""
        return self._cache.num_graphs

    @property
    def step_stats(self) -> StepStats:
        """Return what `step` did so far."""
        with self._lock:
            return replace(self._cache.stats, replays=self._cache.num_replays)

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
            views: memory of the caller's to use for some values. What other streams do to it is
                ordered by naming them in `run` or `step`.
            roles: what the allocated rest is held for, by value; shown in reports.

        Raises:
            InvalidInputError: a symbol has no size, a name is unknown, a view does not fit.
            LeaseRefusedError, AllocationFailedError: nothing is kept.
            ClosedError: the session is closed.
        """
        sizes = dict(dims or {})
        symbols = {symbol for spec in self.specs.values() for symbol in spec.symbols}
        check_dims(sizes, symbols)
        specs = {name: spec.bind(sizes) for name, spec in self.specs.items()}
        with self._lock:
            self._require_open()
            make = partial(
                Binding,
                specs,
                self._backend,
                device=self.provider.device,
                nodes=self.graph.nodes,
                views=views or {},
                roles=roles or {},
                owner=self,
            )
            try:
                binding = make()
            except LeaseRefusedError:
                if not self._cache.drop_idle():
                    raise
                binding = make()
            self._bindings = [known for known in self._bindings if not known.is_closed]
            self._bindings.append(binding)
        return binding

    def run(self, binding: Binding, *, stream: object | None = None) -> None:
        """Execute every node eagerly.

        Args:
            binding: one of this session's.
            stream: a stream of the caller's (an object with `__cuda_stream__`, or a handle as an
                integer): this run comes after what it has so far, and before what it gets later.

        Raises:
            InvalidInputError: the binding is another session's, or the stream none of this device.
            InvalidNodeError: a kernel refuses the tensors; earlier nodes have run.
            LeaseRefusedError, AllocationFailedError: a workspace cannot grow.
            DriverError: a launch was refused, or an earlier kernel failed.
            CaptureError: this thread records a graph, or the stream's owner captures it.

        Stream: enqueued on the session's stream; `Binding.read` and `synchronize` wait for it.
        """
        with self._lock:
            self._require_own(binding)
            with self._backend.ordered_with(stream):
                self._run(binding)

    def step(self, binding: Binding, *, stream: object | None = None) -> None:
        """Execute every node the fastest way there is: replay, capture and replay, or eagerly.

        A graph is replayed only while everything that it bakes in is as it was when captured; it
        is captured anew, or the executable of one no longer needed is updated, where not. What
        cannot be captured runs eagerly. `step_stats` says which happened. The session closes these
        graphs: when their binding is closed, and when there are more than `max_graphs`.

        Args and Raises: as `run`.
            CaptureError: recording failed; the session can go on.

        Stream: as `run`.
        """
        if stream is None:
            graph = self._cache.ready.get(binding)
            if graph is not None:
                try:
                    graph.replay()
                except ClosedError:  # by another thread, just now
                    pass
                else:
                    self._recent.append("a replayed graph")
                    return
        with self._lock:
            self._require_own(binding)
            with self._backend.ordered_with(stream):
                self._step(binding)

    def capture(self, binding: Binding) -> Replayable:
        """Record one run of the graph and return it, ready to replay; the caller closes it.

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
            graph = self._captured(binding, None)
            self._cache.refresh()
            for known in tuple(self._graphs):
                if known.is_closed:
                    self._graphs.remove(known)
                    self._num_past_replays += known.num_replays
            self._graphs.append(graph)
            self.num_captures += 1
            return graph

    def synchronize(self) -> None:
        """Wait for everything enqueued; faults that kernels met are raised here.

        Raises:
            DriverError: an earlier kernel failed; the error's notes name what was enqueued.
            DeviceFaultError: an earlier kernel met bad data.
            CaptureError: this thread records a graph.
        """
        self._require_open()
        with self.naming_recent():
            self._backend.synchronize()

    def close(self) -> None:
        """Close graphs, bindings, kernels and what the provider opened; may be repeated.

        Waits for the device. Everything is closed even where one raises.

        Raises:
            DriverError: an earlier kernel failed, and nobody was told yet.
            CaptureError: this thread records a graph; the session stays open.
        """
        refuse_recording("a session was closed")
        with self._lock, self.naming_recent(), ExitStack() as closing:
            self._is_closed = True
            closing.callback(self._undo.close)
            for binding in self._bindings:
                closing.callback(binding.close)
            for graph in self._graphs:
                closing.callback(graph.close)
            closing.callback(self._cache.clear)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def naming_recent(self) -> Iterator[None]:
        """Wait for the device inside the with-block; a failure then names what was enqueued."""
        try:
            yield
        except DriverError as error:
            if self._recent:
                error.add_note(f"enqueued since the last wait, oldest first: {list(self._recent)}")
            raise
        self._recent.clear()

    @contextmanager
    def closing(self, binding: Binding) -> Iterator[None]:
        """Give up the graph that `step` keeps of a binding; nothing runs inside the with-block."""
        with self._lock:
            self._cache.forget(binding)
            for step in self._steps:
                try:
                    step.kernel.forget()
                except Exception:  # noqa: BLE001  (the memory has to go back all the same)
                    _log.exception("the kernel of node %r failed in forget", step.node.name)
            yield

    def _run(self, binding: Binding) -> None:
        try:
            self._execute(binding, self._backend.stream)
        finally:
            self._cache.refresh()

    def _kernel_memory(self) -> list[GraphResource]:
        """Return the memory of the kernels' own that recordings bake in."""
        return [resource for step in self._steps for resource in step.graph_resources()]

    def _generation(self) -> tuple[int, ...]:
        return tuple(resource.identity for resource in self._kernel_memory())

    def _step(self, binding: Binding) -> None:
        try:
            graph = self._cache.obtain(binding)
        except (CaptureDeclinedError, LeaseRefusedError, AllocationFailedError):
            self._cache.count_eager()
            self._run(binding)
            return
        graph.replay()
        self._recent.append("a replayed graph")

    def _captured(self, binding: Binding, reuse: Replayable | None) -> Replayable:
        with ExitStack() as undo:
            if reuse is not None:
                undo.callback(reuse.close)
            return self._backend.capture(
                lambda stream: self._record(binding, stream),
                resources=lambda: [*binding.graph_resources(), *self._kernel_memory()],
                kept=binding.foreign_views(),
                reuse=reuse,
            )

    def _execute(self, binding: Binding, stream: Any) -> None:
        self._backend.begin_step(stream)
        for step, (inputs, outputs) in zip(self._steps, tuple(binding.operands), strict=True):
            self._recent.append(step.node.name)
            try:
                step.kernel.execute(inputs, outputs, stream=stream)
            except Exception as error:
                error.add_note(f"while running node {step.node.name!r}")
                raise

    def _record(self, binding: Binding, stream: Any) -> None:
        self._backend.begin_step(stream)
        for step, (inputs, outputs) in zip(self._steps, tuple(binding.operands), strict=True):
            name = step.node.name
            try:
                step.kernel.execute(inputs, outputs, stream=stream)
                self._backend.require_recording(stream)
            except (DeviceLostError, ForkedProcessError):
                raise
            except CaptureError as error:
                raise CaptureError(error.stage, error.problem, kernel=name) from error
            except Exception as error:
                raise CaptureError("record", str(error), kernel=name) from error

    def _audit(self, binding: Binding) -> None:
        offenders = []
        support = self._backend.capture_support()
        if not support.is_supported:
            offenders.append((self.provider.name, support.reason))
        else:
            for step in self._steps:
                names = step.node.inputs
                specs = [None if name is None else binding.specs[name] for name in names]
                support = step.capture_support(specs)
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
        accepted = "one made by this session's bind"
        if not isinstance(binding, Binding):
            raise InvalidInputError("binding", found=repr(binding), accepted=accepted)
        if not binding.is_made_by(self._backend):
            found = "one of another session"
            raise InvalidInputError("binding", found=found, accepted=accepted)
        binding.require_open()
