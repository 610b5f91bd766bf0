"""Measure DsaIndexSelect: captured on CUDA with cold caches, eager on the CPU.

Each time stands beside a floor and beside others' times of the same run. What must be reached is in
cases.py; what a floor comes from, in ceilings.py.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

import numpy as np

from benchmarks import peers
from benchmarks.cases import GOALS, GOALS_ARE_FOR, Goal, IndexSelectShape
from benchmarks.ceilings import Ceilings
from benchmarks.inputs import KeyPool, num_sets, opened
from nxrt import Binding, CudaProvider, KernelPlugin, MemoryGovernor, Role, Session
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelectFactory
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES, KEY
from nxrt.providers.base import ExecutionProvider
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime.device_memory import fill_bytes
from nxrt.runtime.stream import Event

BUSY_NBYTES = 512 * 2**20
WARM_UP = 4
REPLAYS_AT_ONCE = 4
REPEATS, FEW_REPEATS = 41, 21
_MANY_OPERATIONS = 2**33
"""From here on a run is long enough for the median of few."""

MAX_EXACT_OPERATIONS = 2 * 10**11
_EXACT_OPERATIONS_IN_ALL = 10**12
"""The straightforward kernel does about 5e11 a second (H200, 2026-11-30)."""


@dataclass(frozen=True)
class Measurement:
    """Hold one row of the report; times in microseconds of device time (host time on the CPU).

    Args:
        case: the shape's id.
        label: the shape for people.
        torch_us: PyTorch's median, where it was measured.
        exact_us: the straightforward exact kernel's median, where it ends in time.
        floor: what the floor comes from.
        ratio: of the median to the floor.
        must_us, aim_us, public_us, public: see Goal; None where nobody says or on another device.
    """

    case: str
    label: str
    median_us: float
    p90_us: float
    repeats: int
    nbytes: int
    operations: int
    floor_us: float
    floor: str
    ratio: float
    torch_us: float | None = None
    exact_us: float | None = None
    must_us: float | None = None
    aim_us: float | None = None
    public_us: float | None = None
    public: str = ""

    @property
    def is_met(self) -> bool | None:
        """Say whether it is as fast as it must be; None where nothing must be."""
        return None if self.must_us is None else self.median_us <= self.must_us


def measure_cuda(
    provider: CudaProvider,
    shape: IndexSelectShape,
    ceilings: Ceilings,
    pool: KeyPool,
    *,
    has_rivals: bool = True,
) -> Measurement:
    """Replay captured graphs one after another, each on inputs of its own.

    Args:
        provider: of the device.
        shape: what to measure.
        ceilings: of this run.
        pool: where keys come from.
        has_rivals: whether to measure the straightforward kernel and PyTorch beside it.
    """
    repeats = FEW_REPEATS if shape.operations >= _MANY_OPERATIONS else REPEATS
    l2_nbytes = provider.capabilities.l2_nbytes
    exact_us = torch_us = None
    with opened(provider, shape, num_sets(shape.nbytes, l2_nbytes, repeats + WARM_UP), pool) as (
        session,
        bindings,
    ):
        elapsed = timed_replays(session, bindings, repeats)
        if has_rivals and shape.operations <= MAX_EXACT_OPERATIONS:
            exact_us = _exact_us(provider, session, bindings, shape)
    if has_rivals and peers.has_torch():
        torch_us = peers.torch_us(shape, l2_nbytes)
    row = summarize(shape, elapsed, *ceilings.floor(shape))
    return replace(row, torch_us=torch_us, exact_us=exact_us)


def timed_replays(session: Session, bindings: Sequence[Binding], repeats: int) -> list[float]:
    """Capture each binding, replay them in turn, and return microseconds a replay.

    One event stands between every few replays, so that what it costs is shared by them. Each graph
    is replayed once before, as the first launch of one costs more. Then the device is kept busy,
    so that it never waits for the host; that also pushes the inputs out of the caches.
    """
    session.run(bindings[0])
    graphs = [session.capture(binding) for binding in bindings]
    backend = session.provider_session
    assert isinstance(backend, CudaProviderSession)
    stream = backend.stream
    with ExitStack() as stack:
        busy = backend.allocate(BUSY_NBYTES, role=Role.WORKSPACE, holder="a head start")
        stack.callback(busy.close)
        events = [
            stack.enter_context(closing(Event(stream.device, is_timed=True)))
            for _ in range(WARM_UP + repeats + 1)
        ]
        for graph in graphs:
            graph.replay()
        for index in range(8):
            fill_bytes(busy.pointer, index, BUSY_NBYTES, stream=stream)
        turns = cycle(graphs)
        for event in events[:-1]:
            event.record(stream)
            for graph in islice(turns, REPLAYS_AT_ONCE):
                graph.replay()
        events[-1].record(stream)
        events[-1].synchronize()
        elapsed = [last.elapsed_us(first) / REPLAYS_AT_ONCE for first, last in pairwise(events)]
    return elapsed[WARM_UP:]


@contextmanager
def straightforward(provider: CudaProvider) -> Iterator[None]:
    """Let new sessions score every key exactly, with no filter before."""
    name = "straightforward"
    plugin = KernelPlugin(name, ((KEY, DsaIndexSelectFactory(has_filter=False)),))
    provider.registry.register(plugin, replace=True)
    try:
        yield
    finally:
        provider.registry.unregister(name)


def _exact_us(
    provider: CudaProvider, session: Session, bindings: Sequence[Binding], shape: IndexSelectShape
) -> float:
    """Return the straightforward kernel's median over the inputs that are there."""
    repeats = max(5, min(FEW_REPEATS, _EXACT_OPERATIONS_IN_ALL // shape.operations))
    with ExitStack() as stack:
        stack.enter_context(straightforward(provider))
        other = stack.enter_context(Session(session.graph, [provider], MemoryGovernor()))
        same = [
            stack.enter_context(
                other.bind(views={name: binding.view(name) for name in INPUT_NAMES})
            )
            for binding in bindings[: WARM_UP + repeats]
        ]
        return statistics.median(timed_replays(other, same, repeats))


def measure_cpu(
    provider: ExecutionProvider, shape: IndexSelectShape, *, repeats: int = 7
) -> Measurement:
    """Run eagerly; the floor is the same work as one BLAS product, timed beside it."""
    with opened(provider, shape) as (session, (binding,)):
        session.run(binding)
        elapsed = []
        for _ in range(repeats):
            started = time.perf_counter()
            session.run(binding)
            elapsed.append((time.perf_counter() - started) * 1e6)
    return summarize(shape, elapsed, _product_us(shape), "one BLAS product")


def _product_us(shape: IndexSelectShape) -> float:
    rng = np.random.default_rng(1)
    query = rng.standard_normal((shape.S * shape.H, shape.D), np.float32)
    key = rng.standard_normal((shape.D, shape.T), np.float32)
    times = []
    for _ in range(7):
        started = time.perf_counter()
        for _ in range(shape.B):
            query @ key
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def summarize(
    shape: IndexSelectShape, elapsed: list[float], floor_us: float, floor: str
) -> Measurement:
    """Return the row of one case."""
    median = statistics.median(elapsed)
    return Measurement(
        shape.id,
        shape.label,
        median,
        float(np.percentile(elapsed, 90)),
        len(elapsed),
        shape.nbytes,
        shape.operations,
        floor_us,
        floor,
        median / floor_us,
    )


def judged(rows: Sequence[Measurement], device: str) -> list[Measurement]:
    """Return the rows with what they must reach; unchanged on a device that no goal is for."""
    if GOALS_ARE_FOR not in device:
        return list(rows)
    goals = {shape.id: goal for shape, goal in GOALS.items()}
    medians = {row.case: row.median_us for row in rows}
    return [_judged(row, goals.get(row.case, Goal()), medians) for row in rows]


def _judged(row: Measurement, goal: Goal, medians: dict[str, float]) -> Measurement:
    must_us = goal.must_us
    if goal.floor_ratio is not None:
        must_us = goal.floor_ratio * row.floor_us
    if goal.like is not None and goal.like in medians:
        must_us = goal.like_ratio * medians[goal.like]
    return replace(
        row, must_us=must_us, aim_us=goal.aim_us, public_us=goal.public_us, public=goal.public
    )
