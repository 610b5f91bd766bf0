"""Memory that several sessions use, budgets that are just enough, and what is typed."""

from typing import Any

import numpy as np
import pytest

from nxrt import (
    CaptureError,
    CudaProvider,
    InvalidInputError,
    MemoryBudget,
    MemoryGovernor,
    Session,
)
from nxrt.providers.cuda_session import GRAPH_NBYTES
from nxrt.runtime.device_memory import copy_to_device
from tests.helpers.graph_rig import DEVICE, Rig, backend_of, bound, floats

pytestmark = [pytest.mark.gpu, pytest.mark.fake]


def test_shared_memory_is_freed_behind_every_session_that_uses_it(rig: Rig) -> None:
    with rig.session() as second:
        with rig.session() as first:
            owner = bound(first, 8)
            user = second.bind({"N": 8}, views={"x": owner.view("x")})
            first.synchronize()
        if rig.fake is not None:
            rig.fake.set_lazy(True)
        second.run(user)
        second.run(user)
        user.close()
        if rig.fake is not None:
            assert rig.used == 2 * 32  # x and y are still in use
        second.synchronize()
        assert rig.used == 0


def test_a_graph_waits_for_memory_that_is_about_to_be_back(rig: Rig) -> None:
    rig.governor = MemoryGovernor(MemoryBudget.of(device=GRAPH_NBYTES + 64))
    with rig.session() as session:
        binding = bound(session, 8)
        session.run(binding)
        if rig.fake is not None:
            rig.fake.set_lazy(True)
        with bound(session, 8) as other:
            session.run(other)
        session.capture(binding).close()


def test_a_binding_that_would_not_fit_takes_the_place_of_idle_graphs(rig: Rig) -> None:
    rig.governor = MemoryGovernor(MemoryBudget.of(device=GRAPH_NBYTES + 64))
    with rig.session() as session:
        with bound(session, 8) as binding:
            for _ in range(3):
                session.step(binding)
        session.synchronize()
        assert rig.used == GRAPH_NBYTES
        with session.bind({"N": GRAPH_NBYTES // 8}):
            assert rig.used == GRAPH_NBYTES
        assert session.num_graphs == 0


def test_a_budget_without_room_for_graphs_runs_eagerly_and_records_nothing(rig: Rig) -> None:
    rig.governor = MemoryGovernor(MemoryBudget.of(device=GRAPH_NBYTES))
    with rig.session() as session, bound(session, 8) as binding:
        for _ in range(3):
            session.step(binding)
        assert (binding.read("y") == 2 * floats(8)).all()
        assert session.step_stats.eager == 3
        if rig.fake is not None:
            assert rig.fake.calls("cuStreamBeginCapture") == 0


def test_settings_that_are_refused_leave_no_context_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rig.figures()
    monkeypatch.setenv("NXRT_CACHE_MAX_BYTES", "a lot")
    with pytest.raises(InvalidInputError, match="NXRT_CACHE_MAX_BYTES"):
        CudaProvider()
    assert rig.figures() == before


def test_a_host_array_is_not_baked_into_a_graph(rig: Rig) -> None:
    with rig.session() as session, bound(session, 8) as binding:
        backend = backend_of(session)
        pointer = binding.view("x").pointer

        def record(stream: Any) -> None:
            copy_to_device(pointer, np.zeros(8, np.float32), stream=stream)

        with pytest.raises(CaptureError, match="a host array was copied"):
            backend.capture(record, resources=tuple, kept=())
        session.run(binding)
        assert (binding.read("y") == 2 * floats(8)).all()


@pytest.mark.parametrize("given", [None, 7, "binding"])
def test_what_is_no_binding_is_refused(rig: Rig, given: Any) -> None:
    with rig.session() as session:
        for use in (session.run, session.step, session.capture):
            with pytest.raises(InvalidInputError, match="binding"):
                use(given)


def test_what_is_no_provider_or_governor_is_refused(rig: Rig) -> None:
    with rig.session() as session:
        graph: Any = session.graph
        arguments: list[tuple[Any, Any]] = [
            (rig.provider, rig.governor),
            ([None], rig.governor),
            ([rig.provider], None),
        ]
        for providers, governor in arguments:
            with pytest.raises(InvalidInputError):
                Session(graph, providers, governor)
    assert rig.governor.usage(DEVICE).used == 0
