"""The decode job: one position at a time against a key buffer of fixed capacity.

The first steps run eagerly; then one graph is captured and replayed for the rest. Every selected
row is compared with the oracle at the end. Nothing is printed here.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxrt.binding import Binding
from nxrt.cli.job import Job
from nxrt.cli.recording import Recording
from nxrt.cli.trace import Trace
from nxrt.errors import CaptureDeclinedError
from nxrt.graph import Graph, Node
from nxrt.kernels.dsa_index_select.reference import select_indices
from nxrt.kernels.dsa_index_select.spec import (
    INPUT_NAMES,
    Attributes,
    input_specs,
    parse_attributes,
)
from nxrt.kernels.numerics import widen
from nxrt.memory.governor import MemoryGovernor, TierUsage
from nxrt.memory.tier import Role, Tier, device_tier
from nxrt.placement import Placement
from nxrt.providers.base import ExecutionProvider, Replayable
from nxrt.providers.cuda import CudaProvider
from nxrt.providers.select import select_provider
from nxrt.runtime.compilation.compile_cache import CacheStats
from nxrt.session import Session
from nxrt.tensor import DType

OUTPUT = "selected_indices"
MASKED = np.float32(-np.inf)


@dataclass(frozen=True)
class Progress:
    """Report where the job is: a phase, and how far it has come."""

    phase: str
    done: int
    total: int


@dataclass
class DecodeResult:
    """Hold everything a report shows.

    Args:
        provider: name and the reason it was chosen.
        placements: who served each node.
        eager_us: host time of each eager step, from its first input to its result on the host.
        replayed_us: the same of each replayed step.
        selected: [S, top_k] int64, the rows in order.
        rows_equal: for each row whether it equals the oracle.
        memory: the governor's books after the last step.
        released: nothing was left charged after the session was closed.
        cache: what the compile cache did, None without one.
        num_captures: graphs captured.
        num_replays: graphs replayed.
        num_graph_nodes: nodes in the graph, 0 without one.
        capture_decline: why nothing was captured, empty where something was.
    """

    provider: tuple[str, str]
    placements: tuple[Placement, ...] = ()
    eager_us: list[float] = field(default_factory=list)
    replayed_us: list[float] = field(default_factory=list)
    selected: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))
    rows_equal: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    memory: tuple[TierUsage, ...] = ()
    released: bool = False
    cache: CacheStats | None = None
    num_captures: int = 0
    num_replays: int = 0
    num_graph_nodes: int = 0
    capture_decline: str = ""


def run_decode(
    job: Job,
    trace: Trace,
    report: Callable[[Progress], None],
    recording: Recording | None = None,
) -> DecodeResult:
    """Decode every query of the trace and check every row.

    Args:
        job: what to run.
        trace: the data.
        report: called after each step and during the check.
        recording: is told the phases, and gets the governor's books, also of a run that fails.

    Raises:
        NxrtError: the job cannot run as asked; everything is given back.
    """
    recording = recording or Recording()
    recording.begin("setup")
    graph = decode_graph(job, trace)
    choice = select_provider(job.job.provider)
    with choice.provider as provider:
        governor = MemoryGovernor(
            job.budget, capacities=_capacities(provider), history=recording.history
        )
        result = DecodeResult((provider.name, choice.reason))
        with recording.watching(governor), Session(graph, [provider], governor) as session:
            result.placements = session.placements
            with _bind(session, trace) as binding, recording.closing():
                _decode(session, binding, job, trace, result, report, recording)
                result.memory = governor.snapshot()
        result.released = all(tier.used == 0 for tier in governor.snapshot())
        if isinstance(provider, CudaProvider):
            result.cache = provider.cache_stats
    result.rows_equal = _check(graph.nodes[0], trace, result.selected, report)
    return result


def decode_graph(job: Job, trace: Trace) -> Graph:
    """Return the graph of one decode step: one query row, T keys."""
    domain, op = job.job.op.split("::")
    _, num_heads, depth = trace.query.shape
    node = Node(op, INPUT_NAMES, (OUTPUT,), domain=domain, attributes=job.attributes)
    inputs = input_specs(DType.BF16, B=1, S=1, T="T", H=num_heads, D=depth)
    return Graph((node,), inputs, (OUTPUT,), {domain: 1})


def _capacities(provider: ExecutionProvider) -> dict[Tier, int]:
    if not isinstance(provider, CudaProvider):
        return {}
    return {device_tier(provider.device.ordinal): provider.capabilities.total_memory}


def _bind(session: Session, trace: Trace) -> Binding:
    return session.bind({"T": trace.capacity}, roles={"key": Role.KV_CACHE})


def _decode(
    session: Session,
    binding: Binding,
    job: Job,
    trace: Trace,
    result: DecodeResult,
    report: Callable[[Progress], None],
    recording: Recording,
) -> None:
    first = trace.position(0)
    bias = np.full(trace.capacity, MASKED)
    bias[:first] = 0
    binding.write("attention_bias", bias)
    binding.write("key", trace.key[:first])
    captured: Replayable | None = None
    rows = []
    recording.begin("eager")
    for step in range(trace.num_steps):
        if step == job.job.warmup_steps:
            captured = _capture(session, binding, result, recording)
        started = time.perf_counter()
        _write_inputs(binding, trace, step)
        if captured is None:
            session.run(binding)
        else:
            captured.replay()
        rows.append(binding.read(OUTPUT).reshape(-1))
        elapsed_us = (time.perf_counter() - started) * 1e6
        (result.eager_us if captured is None else result.replayed_us).append(elapsed_us)
        report(Progress("decode", step + 1, trace.num_steps))
    result.selected = np.stack(rows)
    result.num_captures = session.num_captures
    result.num_replays = session.num_replays


def _write_inputs(binding: Binding, trace: Trace, step: int) -> None:
    """Write what is new at a step: its query, its key, and that the key may be seen."""
    position = trace.position(step)
    depth = trace.key.shape[1]
    binding.write("query", trace.query[step])
    binding.write("weights", trace.weights[step])
    binding.write("key", trace.key[position], offset=position * depth)
    binding.write("attention_bias", np.zeros(1, np.float32), offset=position)


def _capture(
    session: Session, binding: Binding, result: DecodeResult, recording: Recording
) -> Replayable | None:
    recording.begin("capture")
    try:
        captured = session.capture(binding)
    except CaptureDeclinedError as decline:
        result.capture_decline = "; ".join(reason for _, reason in decline.offenders)
        recording.forget_phase()
        return None
    recording.begin("replay")
    result.num_graph_nodes = captured.num_nodes
    return captured


def _check(
    node: Node, trace: Trace, selected: NDArray[np.int64], report: Callable[[Progress], None]
) -> NDArray[np.bool_]:
    """Compare all rows with the oracle, which sees them as one prefill under a causal mask.

    So a provider is also checked for what a step by step run adds: the growing buffer, the moving
    mask, state carried from step to step.
    """
    attributes = parse_attributes(node)
    report(Progress("check", 0, trace.num_steps))
    expected = oracle_rows(trace, attributes)
    report(Progress("check", trace.num_steps, trace.num_steps))
    equal: NDArray[np.bool_] = (expected == selected).all(axis=1)
    return equal


def oracle_rows(trace: Trace, attributes: Attributes) -> NDArray[np.int64]:
    """Return [S, top_k], what each step must select."""
    position = np.arange(trace.num_steps)[:, None] + trace.position(0)
    causal = np.where(np.arange(trace.capacity) <= position, np.float32(0), MASKED)
    query, key, weights = (_batched(a) for a in (trace.query, trace.key, trace.weights))
    selected = select_indices(query, key, weights, causal[None, None], attributes)
    return selected.reshape(trace.num_steps, attributes.top_k)


def _batched(bits: NDArray[Any]) -> NDArray[np.float32]:
    return widen(bits, DType.BF16)[None]
