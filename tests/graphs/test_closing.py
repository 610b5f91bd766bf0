"""Closing beside other threads and pending work; plug-ins whose answers fail."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from nxrt import (
    Binding,
    ClosedError,
    DType,
    ForeignStorage,
    PluginError,
    Session,
    TensorView,
)
from nxrt.memory.tier import Role
from nxrt.runtime import inside
from nxrt.runtime.capture import CapturedGraph
from tests.helpers.graph_rig import SUMMED, Rig, backend_of, bound, floats

pytestmark = [pytest.mark.gpu, pytest.mark.fake]


def test_a_binding_that_is_being_closed_is_not_captured_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[Future[None]] = []
    with rig.session() as session, ThreadPoolExecutor(1) as pool:
        binding = bound(session, 8)
        for _ in range(3):
            session.step(binding)

        def forget() -> None:
            stepped.append(pool.submit(session.step, binding))

        monkeypatch.setattr(session.kernels[0], "forget", forget)
        binding.close()
        with pytest.raises(ClosedError, match="binding"):
            stepped[0].result()
        assert session._cache.ready == {}


def test_threads_that_step_while_a_binding_is_closed_see_it_closed(rig: Rig) -> None:
    with rig.session() as session, ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            binding = bound(session, 8)
            session.step(binding)

            def step_until_closed(binding: Binding = binding) -> None:
                with suppress(ClosedError):
                    while True:
                        session.step(binding)

            running = [pool.submit(step_until_closed) for _ in range(4)]
            binding.close()
            for done in running:
                done.result()


class Owner:
    """Somebody's memory."""


def foreign(session: Session, count: int) -> tuple[TensorView, "weakref.ref[Owner]", Any]:
    memory = backend_of(session).allocate(4 * count, role=Role.ACTIVATION, holder="theirs")
    owner = Owner()
    storage = ForeignStorage(memory.pointer, memory.nbytes, memory.device, owner)
    return TensorView(storage, DType.F32, (count,)), weakref.ref(owner), memory


def test_foreign_memory_is_kept_until_the_device_has_passed_it(rig: Rig) -> None:
    with rig.session() as session:
        view, owner, memory = foreign(session, 8)
        binding = session.bind({"N": 8}, views={"x": view})
        del view
        binding.write("x", floats(8))
        if rig.fake is not None:
            rig.fake.set_lazy(True)
        session.run(binding)
        binding.close()
        del binding
        gc.collect()
        if rig.fake is not None:
            assert owner() is not None
        session.synchronize()
        gc.collect()
        assert owner() is None
        memory.close()


def test_a_graph_whose_replay_does_not_return_keeps_everything(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inside, "TIMEOUT_S", 0.05)
    with rig.session() as session:
        binding = bound(session, 8)
        session.run(binding)
        graph = session.capture(binding)
        assert isinstance(graph, CapturedGraph)
        binding.close()
        before = rig.used
        graph._inside.marks.append(None)  # as a thread does that is in the driver
        graph.close()
        session.synchronize()
        assert rig.used == before
        assert "did not return" in caplog.text
        graph._inside.marks.pop()
        graph.close()
        session.synchronize()
        assert rig.used < before


def test_a_declined_step_evicts_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.session(max_graphs=1) as session:
        good, other = bound(session, 8), bound(session, 16)
        for _ in range(2):
            session.step(good)
        kernel: Any = session.kernels[0]
        real = kernel.capture_support

        def declining(inputs: Any) -> Any:
            kernel.has_run = inputs[0].shape != (16,)
            return real(inputs)

        monkeypatch.setattr(kernel, "capture_support", declining)
        for _ in range(3):
            session.step(other)
            session.step(good)
        stats = session.step_stats
        assert (stats.eager, stats.captures, stats.evictions) == (1 + 3, 1, 0)
        assert (other.read("y") == 2 * floats(16)).all()


def test_memory_that_a_kernel_changes_makes_graphs_stale(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig.session() as session:
        first, second = bound(session, 8), bound(session, 16)
        for binding in (first, second, first, second):
            session.step(binding)
        assert session.step_stats.captures == 2
        table = backend_of(session).allocate(64, role=Role.WORKSPACE, holder="table")
        monkeypatch.setattr(session.kernels[0], "graph_resources", lambda: (table,))
        session.run(first)
        for binding in (first, second):
            session.step(binding)
        stats = session.step_stats
        assert stats.captures + stats.updates == 4
        table.close()


def failing(*_: object) -> Any:
    raise KeyError("a defect of the plug-in")


@pytest.mark.parametrize("question", ["graph_resources", "capture_support"])
def test_a_plugin_that_fails_when_asked_is_named(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    with rig.session() as session:
        binding = bound(session, 8)
        session.run(binding)
        monkeypatch.setattr(session.kernels[0], question, failing)
        monkeypatch.setattr(failing, "__name__", question)
        for use in (session.capture, session.step):
            with pytest.raises(PluginError, match=f"'cuda toys' failed in {question} of 'scale'"):
                use(binding)
        monkeypatch.undo()
        session.capture(binding).close()


def test_a_plugin_that_fails_to_forget_keeps_no_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with rig.session() as session:
        binding = bound(session, 8)
        session.run(binding)
        monkeypatch.setattr(session.kernels[0], "forget", failing)
        before = rig.used
        binding.close()
        session.synchronize()
        assert rig.used < before
        assert "'scale' failed in forget" in caplog.text


def test_a_workspace_is_kept_by_graphs_even_where_the_kernel_forgets_to_name_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig.session(SUMMED) as session:
        binding = bound(session, 100)
        session.run(binding)
        kernel: Any = session.kernels[1]
        monkeypatch.setattr(kernel, "graph_resources", tuple)
        graph = session.capture(binding)
        with bound(session, 5_000) as larger:
            session.run(larger)
            session.capture(larger).close()  # takes the place of the block the graph uses
        for index in range(3):
            binding.write("x", floats(100, index))
            graph.replay()
            expected = 3 * np.cumsum(floats(100, index))
            assert binding.read("y").tolist() == expected.tolist()
        graph.close()


def close_beside(stream: Any, call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call)
        stream.close()
        running.result()


def test_a_stream_is_not_destroyed_under_a_call(rig: Rig) -> None:
    with rig.session() as session:
        stream = type(backend_of(session).stream)(rig.device)
        entered: list[bool] = []

        def destroy_later() -> None:
            entered.append(True)
            while not stream.is_closed:
                pass
            assert rig.fake is None or rig.fake.calls("cuStreamDestroy") == before

        before = 0 if rig.fake is None else rig.fake.calls("cuStreamDestroy")
        close_beside(stream, lambda: stream._inside.run(destroy_later))
        assert entered
        with pytest.raises(ClosedError, match="stream"):
            stream.synchronize()


@pytest.mark.parametrize("use", ["read", "write"])
def test_memory_that_is_being_copied_outlives_its_binding(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    with rig.session() as session:
        binding = bound(session, 8)
        backend = backend_of(session)
        name = {"read": "download", "write": "upload"}[use]
        real = getattr(backend, name)

        def closing_first(*args: Any) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(binding.close).result()
            real(*args)

        monkeypatch.setattr(backend, name, closing_first)
        if use == "read":
            assert (binding.read("x") == floats(8)).all()
        else:
            binding.write("x", floats(8))
        with pytest.raises(ClosedError):
            binding.read("x")
