"""Measure DsaIndexSelect: captured on CUDA with cold caches, eager on the CPU.

Each time stands beside a floor of the same run: the larger of the bytes at the copy bandwidth
measured here and the un-fused operations at the device's lanes and clock.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.cases import IndexSelectShape
from nxrt import Binding, CudaProvider, Graph, MemoryGovernor, Node, Role, Session
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES, input_specs
from nxrt.kernels.numerics import narrow
from nxrt.providers.base import ExecutionProvider
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime.device_memory import copy_on_device, fill_bytes
from nxrt.runtime.stream import Event

OUTPUT = "selected_indices"
FLUSH_NBYTES = 512 * 2**20
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
def prepared(
    provider: ExecutionProvider, shape: IndexSelectShape
) -> Iterator[tuple[Session, Binding]]:
    """Open a session on one shape, with its inputs written."""
    attributes = {"top_k": shape.K, "scale": shape.D**-0.5, "weights_scale": shape.H**-0.5}
    node = Node("DsaIndexSelect", INPUT_NAMES, (OUTPUT,), domain="pkg.nxrt", attributes=attributes)
    specs = input_specs(shape.dtype, B=shape.B, S=shape.S, T=shape.T, H=shape.H, D=shape.D)
    graph = Graph((node,), specs, (OUTPUT,))
    rng = np.random.default_rng(20)
    with Session(graph, [provider], MemoryGovernor()) as session, session.bind() as binding:
        for name in ("query", "key", "weights"):
            values = rng.standard_normal(specs[name].sizes, np.float32)
            binding.write(name, narrow(values, shape.dtype))
        binding.write("attention_bias", np.zeros(specs["attention_bias"].sizes, np.float32))
        yield session, binding


def measure_cuda(
    provider: CudaProvider, shape: IndexSelectShape, ceilings: Ceilings, *, repeats: int = 21
) -> Measurement:
    """Replay a captured graph, each time after the L2 cache was overwritten."""
    with prepared(provider, shape) as (session, binding):
        session.run(binding)
        graph = session.capture(binding)
        backend = session.provider_session
        assert isinstance(backend, CudaProviderSession)
        flush = backend.allocate(FLUSH_NBYTES, role=Role.WORKSPACE, holder="cache flush")
        stream = backend.stream
        first, last = Event(stream.device, is_timed=True), Event(stream.device, is_timed=True)
        elapsed = []
        with stream.device.current():
            for index in range(repeats + 3):
                fill_bytes(flush.pointer, index, FLUSH_NBYTES, stream=stream)
                first.record(stream)
                graph.replay()
                last.record(stream)
                last.synchronize()
                elapsed.append(last.elapsed_us(first))
        for resource in (first, last, flush):
            resource.close()
    return summarize(shape, elapsed[3:], *ceilings.floor(shape))


def measure_cpu(
    provider: ExecutionProvider, shape: IndexSelectShape, *, repeats: int = 7
) -> Measurement:
    """Run eagerly; the floor is the same work as one BLAS product, timed beside it."""
    with prepared(provider, shape) as (session, binding):
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
