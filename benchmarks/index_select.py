"""Measure DsaIndexSelect: captured on CUDA with cold caches, eager on the CPU.

Each time stands beside a floor of the same run: the larger of the bytes at the copy bandwidth
measured here and the un-fused operations at the device's lanes and clock.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import IndexSelectShape
from nxrt import Binding, CudaProvider, Graph, MemoryGovernor, Node, Role, Session
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES, input_specs
from nxrt.kernels.numerics import narrow
from nxrt.providers.base import ExecutionProvider
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime.device_memory import copy_on_device, fill_bytes
from nxrt.runtime.stream import Event

OUTPUT = "selected_indices"
BUSY_NBYTES = 512 * 2**20
WARM_UP = 4
COPY_NBYTES = 2**30


@dataclass(frozen=True)
class Measurement:
    """Hold one row of the report; times in microseconds of device time (host time on the CPU)."""

    case: str
    median_us: float
    p90_us: float
    repeats: int
    nbytes: int
    operations: int
    floor_us: float
    floor: str
    ratio: float


@dataclass(frozen=True)
class Ceilings:
    """Hold what this device can do, in this run."""

    copy_bytes_per_s: float
    operations_per_s: float

    def floor(self, shape: IndexSelectShape) -> tuple[float, str]:
        """Return the floor in microseconds and what it comes from."""
        by_bytes = shape.nbytes / self.copy_bytes_per_s * 1e6
        by_operations = shape.operations / self.operations_per_s * 1e6
        return max((by_bytes, "bytes"), (by_operations, "un-fused arithmetic"))


@contextmanager
def opened(
    provider: ExecutionProvider, shape: IndexSelectShape, num_sets: int = 1
) -> Iterator[tuple[Session, list[Binding]]]:
    """Open a session on one shape, with as many sets of inputs written."""
    attributes = {"top_k": shape.K, "scale": shape.D**-0.5, "weights_scale": shape.H**-0.5}
    node = Node("DsaIndexSelect", INPUT_NAMES, (OUTPUT,), domain="pkg.nxrt", attributes=attributes)
    specs = input_specs(shape.dtype, B=shape.B, S=shape.S, T=shape.T, H=shape.H, D=shape.D)
    graph = Graph((node,), specs, (OUTPUT,))
    rng = np.random.default_rng(20)
    pool = narrow(rng.standard_normal((2 * shape.T, shape.D), np.float32), shape.dtype)
    with ExitStack() as stack:
        session = stack.enter_context(Session(graph, [provider], MemoryGovernor()))
        bindings = [stack.enter_context(session.bind()) for _ in range(num_sets)]
        for binding in bindings:
            for name in ("query", "weights"):
                values = rng.standard_normal(specs[name].sizes, np.float32)
                binding.write(name, narrow(values, shape.dtype))
            binding.write("key", some_rows_of(pool, shape, rng))
            binding.write("attention_bias", np.zeros(specs["attention_bias"].sizes, np.float32))
        yield session, bindings


def some_rows_of(
    pool: NDArray[Any], shape: IndexSelectShape, rng: np.random.Generator
) -> NDArray[Any]:
    """Return keys [B, T, D]: for each batch a stretch of the pool, which is drawn but once."""
    starts = rng.integers(0, len(pool) - shape.T + 1, shape.B)
    return np.stack([pool[start : start + shape.T] for start in starts])


def measure_cuda(
    provider: CudaProvider, shape: IndexSelectShape, ceilings: Ceilings, *, repeats: int = 41
) -> Measurement:
    """Replay captured graphs one after another, each on inputs of its own.

    The inputs in turn are more than four times the L2 cache, so that none is found there. The
    device is kept busy at first, so that it never waits for the host.
    """
    num_sets = max(2, 1 + 4 * provider.capabilities.l2_nbytes // shape.nbytes)
    with opened(provider, shape, num_sets) as (session, bindings):
        session.run(bindings[0])
        graphs = [session.capture(binding) for binding in bindings]
        backend = session.provider_session
        assert isinstance(backend, CudaProviderSession)
        stream = backend.stream
        busy = backend.allocate(BUSY_NBYTES, role=Role.WORKSPACE, holder="a head start")
        events = [Event(stream.device, is_timed=True) for _ in range(repeats + WARM_UP + 1)]
        with stream.device.current():
            for index in range(8):
                fill_bytes(busy.pointer, index, BUSY_NBYTES, stream=stream)
            for event, graph in zip(events, cycle(graphs), strict=False):
                event.record(stream)
                graph.replay()
            events[-1].synchronize()
            elapsed = [last.elapsed_us(first) for first, last in pairwise(events)]
        for resource in (*events, busy):
            resource.close()
    return summarize(shape, elapsed[WARM_UP:], *ceilings.floor(shape))


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
        median,
        float(np.percentile(elapsed, 90)),
        len(elapsed),
        shape.nbytes,
        shape.operations,
        floor_us,
        floor,
        median / floor_us,
    )


def measure_ceilings(provider: CudaProvider) -> Ceilings:
    """Copy a gibibyte on the device, bytes read and written counted; median of 9."""
    backend = provider.open(MemoryGovernor())
    source = backend.allocate(COPY_NBYTES, role=Role.WORKSPACE, holder="copy source")
    target = backend.allocate(COPY_NBYTES, role=Role.WORKSPACE, holder="copy target")
    stream = backend.stream
    first, last = Event(stream.device, is_timed=True), Event(stream.device, is_timed=True)
    elapsed = []
    with stream.device.current():
        fill_bytes(source.pointer, 0x3C, COPY_NBYTES, stream=stream)
        for _ in range(9):
            first.record(stream)
            copy_on_device(target.pointer, source.pointer, COPY_NBYTES, stream=stream)
            last.record(stream)
            last.synchronize()
            elapsed.append(last.elapsed_us(first))
    for resource in (first, last, source, target, backend):
        resource.close()
    has = provider.capabilities
    lanes = has.num_multiprocessors * has.lanes_per_multiprocessor
    return Ceilings(2 * COPY_NBYTES / statistics.median(elapsed) * 1e6, lanes * has.clock_hz)
