"""Capture and replay on a real device: failures leave no trace, graphs keep what they touch."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from nxrt import (
    CaptureError,
    ClosedError,
    CudaProvider,
    DriverError,
    MemoryGovernor,
    Role,
    Session,
    device_tier,
)
from nxrt.memory.tier import Tier
from nxrt.providers.cuda_session import GRAPH_NBYTES, CudaProviderSession
from nxrt.runtime import driver
from nxrt.runtime.capture import CapturedGraph
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import Compiler
from nxrt.runtime.device_memory import fill_bytes
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.recording import is_recording
from nxrt.runtime.stream import Stream
from nxrt.tensor import DType, TensorView
from tests.helpers.cases import OUTPUT, drawn_case
from tests.helpers.targets import Target

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

DEVICE: Tier = device_tier(0)


@pytest.fixture
def governor() -> MemoryGovernor:
    return MemoryGovernor()


@pytest.fixture
def backend(cuda_provider: CudaProvider, governor: MemoryGovernor) -> Iterator[CudaProviderSession]:
    opened = cuda_provider.open(governor)
    yield opened
    opened.close()
    assert all(tier.used == 0 for tier in governor.snapshot())


def allocate(backend: CudaProviderSession, nbytes: int = 64) -> GraphAllocation:
    return backend.allocate(nbytes, role=Role.ACTIVATION, holder="test")


Record = Callable[[Stream], None]


def filling(memory: GraphAllocation, value: int = 7) -> Record:
    return lambda stream: fill_bytes(memory.pointer, value, memory.nbytes, stream=stream)


def content(backend: CudaProviderSession, memory: GraphAllocation) -> list[int]:
    target = np.zeros(memory.nbytes, np.uint8)
    backend.download(target, TensorView(memory, DType.U8, (memory.nbytes,)))
    return sorted(set(target.tolist()))


def capture(
    backend: CudaProviderSession, record: Record, *resources: GraphAllocation
) -> CapturedGraph:
    return backend.capture(record, resources=lambda: resources, kept=())


def set_to(backend: CudaProviderSession, memory: GraphAllocation, value: int) -> None:
    filling(memory, value)(backend.stream)


def used_once_idle(backend: CudaProviderSession, governor: MemoryGovernor) -> int:
    """Return the bytes charged once the device has passed everything."""
    backend.synchronize()
    return governor.usage(DEVICE).used


def test_nothing_runs_before_the_first_replay(backend: CudaProviderSession) -> None:
    with allocate(backend) as memory:
        set_to(backend, memory, 1)
        with capture(backend, filling(memory), memory) as graph:
            assert content(backend, memory) == [1]
            graph.replay()
            assert content(backend, memory) == [7]
            assert (graph.num_nodes, graph.num_replays) == (1, 1)


def test_a_graph_keeps_its_memory_alive_and_charged(
    backend: CudaProviderSession, governor: MemoryGovernor
) -> None:
    memory = allocate(backend)
    probe = memory.share()
    graph = capture(backend, filling(memory), memory)
    memory.close()
    del memory
    gc.collect()
    others = [allocate(backend) for _ in range(8)]
    for other in others:
        set_to(backend, other, 0x5A)
    for _ in range(10):
        graph.replay()
    assert content(backend, probe) == [7]
    probe.close()
    for other in others:
        other.close()
    assert used_once_idle(backend, governor) == 64 + GRAPH_NBYTES
    graph.close()
    graph.close()
    assert used_once_idle(backend, governor) == 0


def test_replaying_a_closed_graph_is_a_typed_error(backend: CudaProviderSession) -> None:
    with allocate(backend) as memory:
        graph = capture(backend, filling(memory), memory)
        graph.close()
        with pytest.raises(ClosedError, match="captured graph"):
            graph.replay()


class PlantedError(Exception):
    """The user's own."""


def raise_planted() -> None:
    raise PlantedError("planted")


FAULTS: dict[str, Callable[[CudaProviderSession], None]] = {
    "raises": lambda _: raise_planted(),
    "allocates": lambda backend: allocate(backend).close(),
    "synchronizes": lambda backend: backend.synchronize(),
    "copies": lambda backend: backend.upload(
        TensorView(allocate_before(backend), DType.U8, (64,)), 0, np.zeros(64, np.uint8)
    ),
    "nests": lambda backend: capture(backend, lambda _: None).close(),
}
_before: dict[int, GraphAllocation] = {}


def allocate_before(backend: CudaProviderSession) -> GraphAllocation:
    return _before[id(backend)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_capture_leaves_no_trace(
    backend: CudaProviderSession, governor: MemoryGovernor, fault: str
) -> None:
    with allocate(backend) as memory:
        _before[id(backend)] = memory
        used = governor.usage(DEVICE).used

        def record(stream: Stream) -> None:
            filling(memory)(stream)
            FAULTS[fault](backend)
            filling(memory)(stream)

        for _ in range(10):
            with pytest.raises(CaptureError) as failure:
                capture(backend, record, memory)
            if fault == "raises":
                assert isinstance(failure.value.__cause__, PlantedError)
            assert not is_recording()
            assert used_once_idle(backend, governor) == used
            assert memory.num_handles == 1
            set_to(backend, memory, 3)
            assert content(backend, memory) == [3]
        with capture(backend, filling(memory), memory) as graph:
            graph.replay()
            assert content(backend, memory) == [7]
        del _before[id(backend)]


def test_an_interrupt_unwinds_and_stays_an_interrupt(backend: CudaProviderSession) -> None:
    def interrupt(_: Stream) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(backend, interrupt)
    backend.synchronize()


def test_a_buffer_closed_while_recording_is_freed_afterwards(
    backend: CudaProviderSession,
) -> None:
    """A free inside would be refused by the driver and would invalidate the capture."""
    dropped = allocate(backend)
    with allocate(backend) as memory:

        def record(stream: Stream) -> None:
            filling(memory)(stream)
            dropped.close()

        with capture(backend, record, memory) as graph:
            graph.replay()
            assert content(backend, memory) == [7]


ELSEWHERE: dict[str, Callable[[CudaProviderSession, CapturedGraph], None]] = {
    "synchronizes": lambda backend, _: backend.synchronize(),
    "replays": lambda _, graph: graph.replay(),
    "closes": lambda _, graph: graph.close(),
    "allocates": lambda backend, _: allocate(backend).close(),
    "captures": lambda backend, _: capture(backend, lambda _: None).close(),
    "opens a session": lambda backend, _: CudaProviderSession(
        backend.stream.device, CompileCache(Compiler(), None), MemoryGovernor()
    ).close(),
}


@pytest.mark.parametrize("action", ELSEWHERE)
def test_nothing_another_thread_does_joins_or_breaks_a_recording(
    backend: CudaProviderSession, action: str
) -> None:
    with allocate(backend) as memory, capture(backend, filling(memory), memory) as graph:

        def record(stream: Stream) -> None:
            filling(memory, 9)(stream)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(ELSEWHERE[action], backend, graph).result()
            filling(memory, 9)(stream)

        for _ in range(20):
            with capture(backend, record, memory) as other:
                other.replay()
                assert content(backend, memory) == [9]
                assert other.num_nodes == 2


def test_recordings_survive_threads_that_never_stop(backend: CudaProviderSession) -> None:
    """No window is left: the others begin before the recording does and end after it."""
    stop = threading.Event()
    memory, busy = allocate(backend), allocate(backend)
    with memory, busy, capture(backend, filling(busy), busy) as graph:

        def keep_busy() -> None:
            while not stop.is_set():
                graph.replay()
                backend.synchronize()
                allocate(backend).close()
                capture(backend, filling(busy), busy).close()
                content(backend, busy)

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(keep_busy) for _ in range(4)]
            try:
                for _ in range(100):
                    with capture(backend, filling(memory, 9), memory) as other:
                        assert other.num_nodes == 1
                        other.replay()
                        assert content(backend, memory) == [9]
            finally:
                stop.set()
            for done in running:
                done.result()


def test_a_copy_of_another_thread_does_not_wait_for_the_end_of_the_recording(
    backend: CudaProviderSession,
) -> None:
    with allocate(backend) as memory:
        view = TensorView(memory, DType.U8, (64,))

        def record(stream: Stream) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(backend.upload, view, 0, np.full(64, 5, np.uint8)).result()
            filling(memory)(stream)

        with capture(backend, record, memory) as graph:
            assert content(backend, memory) == [5]
            graph.replay()
            assert content(backend, memory) == [7]
            assert graph.num_nodes == 1


def test_work_on_another_stream_is_refused_and_the_recording_stays_valid(
    backend: CudaProviderSession,
) -> None:
    """It would run now, and be missing in every replay."""
    with allocate(backend) as memory:

        def record(stream: Stream) -> None:
            with pytest.raises(CaptureError, match="not the recorded one"):
                filling(memory)(backend.stream)
            filling(memory)(stream)

        with capture(backend, record, memory) as graph:
            graph.replay()
            assert content(backend, memory) == [7]


def test_many_threads_replay_one_graph(backend: CudaProviderSession) -> None:
    with allocate(backend) as memory, capture(backend, filling(memory), memory) as graph:

        def replay_often() -> None:
            for _ in range(500):
                graph.replay()

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(replay_often) for _ in range(8)]:
                done.result()
        assert content(backend, memory) == [7]
        assert graph.num_replays == 4000


def test_closing_a_graph_that_others_replay_is_safe(backend: CudaProviderSession) -> None:
    with allocate(backend) as memory:
        for _ in range(30):
            graph = capture(backend, filling(memory), memory)

            def replay_until_closed(graph: CapturedGraph = graph) -> None:
                with suppress(ClosedError):
                    while True:
                        graph.replay()

            with ThreadPoolExecutor(4) as pool:
                running = [pool.submit(replay_until_closed) for _ in range(4)]
                graph.close()
                for done in running:
                    done.result()


def test_a_graph_keeps_memory_that_came_from_another_binding(cuda_provider: CudaProvider) -> None:
    case = drawn_case("shared", num_queries=1, num_keys=40, top_k=3)
    governor = MemoryGovernor()
    with Session(case.graph, [cuda_provider], governor) as session:
        owner = session.bind()
        user = session.bind(views={"key": owner.view("key")})
        for name, array in case.inputs.items():
            user.write(name, array)
        session.run(user)
        graph = session.capture(user)
        owner.close()
        graph.replay()
        assert user.read(OUTPUT).tobytes() == case.expected().tobytes()
    assert governor.usage(DEVICE).used == 0


def test_a_session_outlives_the_closing_of_its_provider(cache_dir: Path) -> None:
    case = drawn_case("outlives", num_queries=1, num_keys=40, top_k=3)
    governor = MemoryGovernor()
    provider = CudaProvider(cache_dir=cache_dir)
    session = Session(case.graph, [provider], governor)
    binding = session.bind()
    provider.close()
    provider.close()
    for name, array in case.inputs.items():
        binding.write(name, array)
    session.run(binding)
    assert binding.read(OUTPUT).tobytes() == case.expected().tobytes()
    session.close()
    assert governor.usage(DEVICE).used == 0
    with pytest.raises(ClosedError, match="CUDA provider"):
        provider.open(governor)


def test_a_session_closes_the_graphs_captured_from_it(cuda_provider: CudaProvider) -> None:
    case = drawn_case("closing", num_queries=1, num_keys=40, top_k=3)
    target, governor = Target(cuda_provider, "eager"), MemoryGovernor()
    with target.bound(case, governor) as (session, binding, guarded):
        session.run(binding)
        graph = session.capture(binding)
        binding.close()
        guarded.poison()
        graph.replay()
        assert guarded.read().tobytes() == case.expected().tobytes()
    with pytest.raises(ClosedError):
        graph.replay()
    assert governor.usage(DEVICE).used == 0
    assert OUTPUT in session.specs


def test_a_launch_error_is_the_first_cause(
    backend: CudaProviderSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = DriverError(code=1, name="PLANTED", call="cuGraphInstantiate", explanation="")

    def fail(*_: object) -> None:
        raise error

    real = driver.call
    function = driver.api.cuGraphInstantiate
    with monkeypatch.context() as patch:
        patch.setattr(driver, "call", lambda f, *a: fail() if f is function else real(f, *a))
        with allocate(backend) as memory, pytest.raises(CaptureError) as failure:
            capture(backend, filling(memory), memory)
    assert failure.value.stage == "instantiate"
    assert failure.value.__cause__ is error
    backend.synchronize()
