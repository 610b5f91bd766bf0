"""What a launch, a replay and an eager run cost the host, beside the bare driver calls they make.

Times the host alone: work is enqueued in small batches that the device keeps up with. The bare
calls go through cuda.bindings in the same run, taking turns with what they are compared with.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from rich.table import Table

from benchmarks.cases import IndexSelectShape
from benchmarks.inputs import opened
from nxrt import CudaProvider
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelect
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime import driver
from nxrt.runtime.capture import CapturedGraph
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.device import Device
from nxrt.runtime.module import BoundLaunch, Function, LaunchConfig, Module
from nxrt.runtime.stream import Stream

BATCH = 200
ROUNDS = 41
SMALL = IndexSelectShape(1, 1, 2048)

_EMPTY = """
extern "C" __global__ void empty(
    void *a, void *b, void *c, void *d, void *e, void *f, void *g, void *h,
    unsigned long long i, unsigned long long j, unsigned long long k, unsigned long long l,
    unsigned m, unsigned n, float o, float p) {}
"""
_KINDS = ("pointer",) * 8 + ("u64",) * 4 + ("u32",) * 2 + ("f32",) * 2


@dataclass(frozen=True)
class HostCost:
    """Compare one call of nxrt's with the bare driver calls that it makes.

    Args:
        name: what was called.
        median_us: host microseconds a call.
        bare_us: of the bare calls, in the same run.
        allowed_us: the most that the call may take, from `bare_us`.
    """

    name: str
    median_us: float
    bare_us: float
    allowed_us: float

    @property
    def is_met(self) -> bool:
        """Say whether the call stays within what it may take."""
        return self.median_us <= self.allowed_us


@dataclass(frozen=True)
class ColdStart:
    """Describe the first step of a new process over a filled compile cache.

    Args:
        import_ms: importing nxrt.
        driver_ms: initialising the driver and the device's context.
        runtime_ms: everything else until the first result is on the host.
        compilations: how many kernels were compiled.
    """

    import_ms: float
    driver_ms: float
    runtime_ms: float
    compilations: int


def measure_host_cost(provider: CudaProvider) -> list[HostCost]:
    """Return every comparison."""
    with ExitStack() as stack:
        session, (binding,) = stack.enter_context(opened(provider, SMALL))
        session.run(binding)
        session.step(binding)
        backend = session.provider_session
        assert isinstance(backend, CudaProviderSession)
        stream = backend.stream
        graph = session.capture(binding)
        assert isinstance(graph, CapturedGraph)
        function = stack.enter_context(_Empty(stream.device)).function
        launch, bare_launch = _launches(function, stream)
        kernel = session.kernels[0]
        assert isinstance(kernel, DsaIndexSelect)
        bare_graph = _bare_graph(graph, stream)
        times = _taking_turns(
            {
                "launch": launch,
                "bare launch": bare_launch,
                "replay": graph.replay,
                "bare replay": bare_graph,
                "step": lambda: session.step(binding),
                "eager": lambda: session.run(binding),
                "bare eager": _bare_launches(kernel, stream),
            },
            stream,
        )
    launch_us, replay_us, eager_us = (times[f"bare {n}"] for n in ("launch", "replay", "eager"))
    return [
        HostCost("bound launch, 16 arguments", times["launch"], launch_us, launch_us + 0.6),
        HostCost("replay of a captured graph", times["replay"], replay_us, replay_us + 0.4),
        HostCost("step of a session, replaying", times["step"], replay_us, replay_us * 1.5),
        HostCost("run of a session, eager", times["eager"], eager_us, eager_us * 2 + 15),
    ]


class _Empty:
    """Lend an empty kernel of 16 arguments."""

    def __init__(self, device: Device) -> None:
        options = CompileOptions(device.capabilities.arch)
        self._module = Module(
            device, Compiler().compile(KernelSource("empty.cu", _EMPTY), options).cubin
        )

    def __enter__(self) -> Self:
        self.function = self._module.function("empty")
        return self

    def __exit__(self, *error: object) -> None:
        self._module.close()


def _launches(
    function: Function, stream: Stream
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the same launch, bound and bare."""
    arguments = function.arguments(_KINDS)
    arguments.set(*range(16))
    bound = BoundLaunch(function, LaunchConfig((1, 1, 1), (32, 1, 1)), arguments)
    shape = bound.driver_arguments(stream)
    bare: Any = driver.api.cuLaunchKernel
    return lambda: bound.enqueue(stream), lambda: bare(*shape)


def _bare_graph(graph: CapturedGraph, stream: Stream) -> Callable[[], object]:
    bare: Any = driver.api.cuGraphLaunch
    handle, native = graph.handle, stream.native
    return lambda: bare(handle, native)


def _bare_launches(kernel: DsaIndexSelect, stream: Stream) -> Callable[[], object]:
    """Return the driver calls of one warm execution and nothing else."""
    launches = kernel.last_launches  # they own the arguments that the calls point to
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (getattr(driver.api, launch.driver_function), launch.driver_arguments(stream))
        for launch in launches
    ]

    def launch_all(_kept: object = launches) -> None:
        for bare, shape in calls:
            bare(*shape)

    return launch_all


def _taking_turns(actions: dict[str, Callable[[], object]], stream: Stream) -> dict[str, float]:
    """Return the median microseconds of each action, of batches that alternate."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(ROUNDS):
        for name, action in actions.items():
            started = time.perf_counter()
            for _ in range(BATCH):
                action()
            times[name].append((time.perf_counter() - started) / BATCH * 1e6)
            stream.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


_COLD = """
import json, sys, time
start = time.perf_counter()
import nxrt
imported = time.perf_counter()
from benchmarks.host_cost import SMALL
from benchmarks.inputs import opened
from nxrt.runtime import driver
from nxrt.runtime.device import Device
from pathlib import Path
begun = time.perf_counter()
device = Device(0)
with device.current():
    pass
ready = time.perf_counter()
with nxrt.CudaProvider(cache_dir=Path(sys.argv[1])) as provider:
    with opened(provider, SMALL) as (session, (binding,)):
        session.run(binding)
        binding.read("selected_indices")
        done = time.perf_counter()
        compilations = provider.cache_stats.compilations
print(json.dumps([(imported - start) * 1e3, (ready - begun) * 1e3, (done - ready) * 1e3,
                  compilations]))
"""


def measure_cold_start() -> ColdStart:
    """Fill a cache in one process, then start another over it; the median of five of those."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _COLD, folder]
        runs = []
        for _ in range(6):
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs.append(json.loads(done.stdout))
    warm = runs[1:]
    import_ms, driver_ms, runtime_ms = (
        statistics.median(run[index] for run in warm) for index in range(3)
    )
    return ColdStart(import_ms, driver_ms, runtime_ms, max(run[3] for run in warm))


def as_table(rows: list[HostCost]) -> Table:
    """Return the comparisons for a person."""
    table = Table(title="host cost", title_justify="left")
    table.add_column("call", no_wrap=True)
    for name in ("us", "bare us", "over it", "ratio", "may be us"):
        table.add_column(name, justify="right")
    table.add_column("met")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.median_us:.2f}",
            f"{row.bare_us:.2f}",
            f"{row.median_us - row.bare_us:+.2f}",
            f"{row.median_us / row.bare_us:.2f}",
            f"{row.allowed_us:.2f}",
            "yes" if row.is_met else "[bold red]no",
        )
    return table
