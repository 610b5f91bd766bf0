"""Executables that are updated for a new graph, and those that cannot be."""

import logging

import numpy as np
import pytest

from nxrt import Session
from nxrt.graph_cache import StepStats
from nxrt.providers.cuda_session import GRAPH_NBYTES
from tests.helpers.graph_rig import FAULTY_MIDDLE, SUMMED, Rig, bound, floats, poison

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

COUNT = 6


def stepped_once(session: Session, start: int) -> None:
    """Step a binding of its own and close it; the result must be right."""
    with bound(session, COUNT, start) as binding:
        poison(session, binding)
        session.step(binding)
        assert np.array_equal(binding.read("y"), 105 * floats(COUNT, start))


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "cannot be updated" in r.getMessage()]


def test_a_graph_of_another_topology_falls_back_to_a_new_executable(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nxrt.runtime.capture")
    with rig.session(FAULTY_MIDDLE) as session:
        stepped_once(session, 0)
        for number, num_launches in enumerate((1, 2, 3, 1), start=1):
            session.synchronize()
            live = rig.fake.live("exec") if rig.fake else 0
            rig.trouble.num_launches = num_launches
            caplog.clear()
            before = session.step_stats
            stepped_once(session, number)
            after = session.step_stats
            is_refused = number > 1
            assert len(refusals(caplog)) == int(is_refused)
            assert after.captures - before.captures == int(is_refused or number == 1)
            assert after.updates == before.updates
            session.synchronize()
            if number > 1:
                assert not rig.fake or rig.fake.live("exec") == live
            assert session.num_graphs == 1


def test_a_graph_of_the_same_topology_is_updated_without_a_word(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nxrt.runtime.capture")
    with rig.session(FAULTY_MIDDLE) as session:
        for start in range(6):
            stepped_once(session, start)
        assert session.step_stats == StepStats(eager=1, captures=1, updates=4, replays=5)
        assert refusals(caplog) == []
        session.synchronize()
        held = [holder for holder in rig.governor.snapshot()[0].holders if "graph" in holder.holder]
        assert [holder.used for holder in held] == [GRAPH_NBYTES]


def test_a_replay_on_its_way_is_not_changed_by_an_update(rig: Rig) -> None:
    """The values of a launch that was enqueued stay; nothing waits for it."""
    with rig.session(SUMMED) as session:
        first = bound(session, 40, 1)
        session.run(first)
        session.step(first)
        if rig.fake is not None:
            rig.fake.set_lazy(True)
        for _ in range(3):
            session.step(first)
        first.close()
        with bound(session, 40, 2) as second:
            session.step(second)
            assert session.step_stats.updates == 1
            assert np.array_equal(second.read("y"), np.cumsum(3 * floats(40, 2)))
