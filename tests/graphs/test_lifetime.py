"""Graphs and the memory they touch: whoever lets go first, replays stay right; all comes back."""

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import pytest

from nxrt import ClosedError, DType, ForeignStorage, Role, Session, TensorView
from nxrt.providers.base import Replayable
from nxrt.providers.cuda_session import GRAPH_NBYTES
from nxrt.runtime.device_memory import fill_bytes
from tests.helpers.cases import OUTPUT, drawn_case
from tests.helpers.cuda_toys import Accumulate
from tests.helpers.graph_rig import (
    LONG_CYCLES,
    SUMMED,
    Delay,
    Rig,
    backend_of,
    bound,
    floats,
    poison,
)
from tests.helpers.sessions import workspace_bytes
from tests.helpers.targets import MAX_REPEATS, POISON, GuardedOutput, poison_workspace

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

CASE = drawn_case("lifetime", num_queries=3, num_keys=700, top_k=40, is_causal=True)
REPLAYS = min(1000, MAX_REPEATS)


@pytest.fixture
def selecting(rig: Rig) -> Iterator[Session]:
    with Session(CASE.graph, [rig.provider], rig.governor) as session:
        yield session


@pytest.fixture
def guarded(selecting: Session) -> Iterator[GuardedOutput]:
    output = GuardedOutput(selecting, CASE.output_shape)
    yield output
    output.close()


def captured_in_a_function(session: Session, output: TensorView, **views: TensorView) -> Replayable:
    """Make every input and the workspace, and return nothing but the graph."""
    binding = session.bind(views={OUTPUT: output, **views})
    for name, array in CASE.inputs.items():
        binding.write(name, array)
    session.run(binding)
    graph = session.capture(binding)
    binding.close()
    return graph


def poisoned_blocks(session: Session, sizes: list[int], closing: ExitStack) -> None:
    """Take and fill blocks of these sizes, so that memory that was given back is overwritten."""
    backend = backend_of(session)
    for nbytes in sizes:
        for _ in range(4):
            block = backend.allocate(nbytes, role=Role.ACTIVATION, holder="poison")
            closing.callback(block.close)
            fill_bytes(block.pointer, POISON, nbytes, stream=backend.stream)


def test_a_graph_that_is_all_a_function_returns_replays_right(
    rig: Rig, selecting: Session, guarded: GuardedOutput
) -> None:
    before = rig.used
    graph = captured_in_a_function(selecting, guarded.view)
    gc.collect()
    selecting.synchronize()
    inputs_nbytes = sum(array.nbytes for array in CASE.inputs.values())
    workspace_nbytes = workspace_bytes(rig.governor)
    held = before + inputs_nbytes + workspace_nbytes + GRAPH_NBYTES
    assert rig.used == held
    with ExitStack() as others:
        sizes = [array.nbytes for array in CASE.inputs.values()]
        poisoned_blocks(selecting, [*sizes, workspace_nbytes], others)
        for _ in range(10):
            guarded.poison()
            poison_workspace(selecting)
            graph.replay()
            assert guarded.read().tobytes() == CASE.expected().tobytes()
    selecting.synchronize()
    assert rig.used == held
    graph.close()
    graph.close()
    selecting.synchronize()
    assert rig.used == before + workspace_nbytes  # which the kernel keeps
    with pytest.raises(ClosedError, match="captured graph"):
        graph.replay()


def test_freeing_an_input_waits_for_the_graph_that_reads_it(
    rig: Rig, selecting: Session, guarded: GuardedOutput
) -> None:
    key = CASE.inputs["key"]
    given = backend_of(selecting).allocate(key.nbytes, role=Role.KV_CACHE, holder="caller")
    view = TensorView(given, DType.F32, key.shape)
    graph = captured_in_a_function(selecting, guarded.view, key=view)
    used = rig.used
    given.close()
    selecting.synchronize()
    assert rig.used == used
    with ExitStack() as others:
        poisoned_blocks(selecting, [key.nbytes], others)
        for _ in range(10):
            guarded.poison()
            graph.replay()
            assert guarded.read().tobytes() == CASE.expected().tobytes()
    graph.close()
    selecting.synchronize()
    assert rig.used == used - GRAPH_NBYTES - sum(a.nbytes for a in CASE.inputs.values())


def test_closing_everything_gives_back_every_byte_and_handle(rig: Rig) -> None:
    before = rig.figures()
    live = None if rig.fake is None else rig.fake.snapshot()
    for order in range(3):
        session = rig.session(SUMMED)
        binding = bound(session, 40)
        session.run(binding)
        graph = session.capture(binding)
        session.step(binding)
        graph.replay()
        ends = [graph.close, binding.close, session.close]
        for end in (*ends[order:], *ends[:order]):
            end()
        assert all(value in (0, live) for value in rig.figures().values())
    assert before["pending"] == 0


def test_a_thousand_replays_after_all_references_are_gone_equal_the_eager_run(rig: Rig) -> None:
    with rig.session(SUMMED) as session:
        backend = backend_of(session)
        x, y = (backend.allocate(4 * 50, role=Role.ACTIVATION, holder="test") for _ in range(2))
        views = {"x": TensorView(x, DType.F32, (50,)), "y": TensorView(y, DType.F32, (50,))}

        def graph_alone() -> Replayable:
            binding = bound(session, 50, views=views)
            session.run(binding)
            graph = session.capture(binding)
            binding.close()
            return graph

        graph = graph_alone()
        gc.collect()
        with bound(session, 5000) as other:
            session.run(other)  # the workspace grows away from under the graph
            read = np.empty(50, np.float32)
            for start in range(REPLAYS):
                backend.upload(views["x"], 0, floats(50, start))
                graph.replay()
                backend.download(read, views["y"])
                assert read.tobytes() == np.cumsum(3 * floats(50, start)).tobytes()
        x.close()
        y.close()
        graph.close()


def test_a_thousand_replays_of_a_selection_are_equal_byte_for_byte(
    selecting: Session, guarded: GuardedOutput
) -> None:
    graph = captured_in_a_function(selecting, guarded.view)
    gc.collect()
    expected = CASE.expected().tobytes()
    guarded.poison()
    for _ in range(REPLAYS):
        graph.replay()
        assert guarded.read().tobytes() == expected


class Anchor:
    """Stands for another library's tensor, whose memory goes with it."""


@pytest.mark.parametrize("is_stepped", [False, True], ids=["captured", "stepped"])
def test_foreign_memory_is_kept_as_long_as_a_graph_reads_it_and_no_longer(
    rig: Rig, is_stepped: bool
) -> None:
    with rig.session() as session, anchored(session) as (view, fate):
        binding = bound(session, 8, views={"x": view.pop()})
        session.run(binding)
        if is_stepped:
            session.step(binding)
        else:
            graph = session.capture(binding)
            binding.close()
            gc.collect()
            assert fate() is not None
            graph.replay()
            graph.close()
        binding.close()
        del binding
        session.synchronize()
        gc.collect()
        assert fate() is None


@contextmanager
def anchored(session: Session) -> Iterator[tuple[list[TensorView], "weakref.ref[Anchor]"]]:
    """Lend the one reference to a view of foreign memory, and a look at what that belongs to."""
    backend = backend_of(session)
    with backend.allocate(4 * 8, role=Role.ACTIVATION, holder="test") as memory:
        anchor = Anchor()
        storage = ForeignStorage(memory.pointer, memory.nbytes, memory.device, anchor)
        fate = weakref.ref(anchor)
        views = [TensorView(storage, DType.F32, (8,))]
        del anchor, storage
        yield views, fate


def test_a_graph_of_a_closed_session_is_closed(rig: Rig) -> None:
    session = rig.session()
    with closing(session), bound(session, 4) as binding:
        session.run(binding)
        graph = session.capture(binding)
    with pytest.raises(ClosedError, match="captured graph"):
        graph.replay()
    graph.close()


def test_memory_of_another_sessions_binding_outlives_that_session(rig: Rig) -> None:
    owner = rig.session()
    theirs = bound(owner, 30, 2)
    owner.synchronize()
    with rig.session(SUMMED) as session:
        binding = session.bind({"N": 30}, views={"x": theirs.view("x")})
        session.run(binding)
        graph = session.capture(binding)
        theirs.close()
        owner.close()
        for _ in range(5):
            poison(session, binding)
            graph.replay()
            assert np.array_equal(binding.read("y"), np.cumsum(3 * floats(30, 2)))


def test_closing_waits_for_nobody_and_memory_stays_charged_until_it_has_passed(rig: Rig) -> None:
    with ExitStack() as undo:
        session = undo.enter_context(rig.session(SUMMED))
        backend = backend_of(session)
        y = undo.enter_context(backend.allocate(4 * 30, role=Role.ACTIVATION, holder="test"))
        output = TensorView(y, DType.F32, (30,))
        binding = bound(session, 30, views={"y": output})
        session.run(binding)
        graph = session.capture(binding)
        session.synchronize()
        used = rig.used
        delay = undo.enter_context(Delay(session, rig.fake))
        delay.before(backend.stream, LONG_CYCLES)
        graph.replay()
        binding.close()
        graph.close()
        assert rig.used == used - GRAPH_NBYTES
        assert rig.device.releases.num_pending == 2
        result = np.empty(30, np.float32)
        session.synchronize()
        assert rig.used == used - GRAPH_NBYTES - 2 * 4 * 30  # x and what was scaled
        assert rig.device.releases.num_pending == 0
        backend.download(result, output)
        assert np.array_equal(result, np.cumsum(3 * floats(30)))


def test_a_replay_between_the_launches_of_a_run_spoils_neither(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may replay at any time; both would write the kernel's workspace."""
    with rig.session(SUMMED) as session, bound(session, 30) as one, bound(session, 20, 5) as two:
        session.run(one)
        graph = session.capture(two)
        session.run(one)
        kernel = session.kernels[1]
        assert isinstance(kernel, Accumulate)
        launch_sum = kernel.launch_sum

        def launch_after_a_replay(*values: Any, stream: Any) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(graph.replay).result()
            launch_sum(*values, stream=stream)

        monkeypatch.setattr(kernel, "launch_sum", launch_after_a_replay)
        for _ in range(3):
            poison(session, one)
            poison(session, two)
            session.run(one)
            assert np.array_equal(one.read("y"), np.cumsum(3 * floats(30)))
            assert np.array_equal(two.read("y"), np.cumsum(3 * floats(20, 5)))
