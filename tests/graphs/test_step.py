"""Session.step: what it does each time, and that it says so."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nxrt import (
    Binding,
    CaptureError,
    ClosedError,
    MemoryBudget,
    MemoryGovernor,
    Session,
)
from nxrt.graph_cache import StepStats
from nxrt.memory.budget import TierBudget
from nxrt.providers.cuda_session import GRAPH_NBYTES
from tests.helpers.cuda_toys import toy_node
from tests.helpers.faulty_toys import PlantedError
from tests.helpers.graph_rig import (
    FAULTY_MIDDLE,
    SUMMED,
    Rig,
    bound,
    floats,
    poison,
)

pytestmark = [pytest.mark.gpu, pytest.mark.fake]


def stepped(session: Session, binding: Binding) -> Any:
    """Return what a step writes over poison."""
    poison(session, binding)
    session.step(binding)
    return binding.read("y")


def test_the_first_step_runs_eagerly_the_second_captures_the_third_replays(rig: Rig) -> None:
    with rig.session() as session, bound(session, 5) as binding:
        expected = 2 * floats(5)
        seen = []
        for _ in range(4):
            assert np.array_equal(stepped(session, binding), expected)
            seen.append(session.step_stats)
        assert seen == [
            StepStats(eager=1),
            StepStats(eager=1, captures=1, replays=1),
            StepStats(eager=1, captures=1, replays=2),
            StepStats(eager=1, captures=1, replays=3),
        ]
        assert session.num_graphs == 1
        assert session.num_replays == 3


def test_a_new_binding_of_the_shape_of_a_closed_one_updates_its_executable(rig: Rig) -> None:
    with rig.session() as session:
        with bound(session, 5) as binding:
            session.run(binding)
            session.step(binding)
        used = rig.used
        for start in range(1, 4):
            with bound(session, 5, start) as binding:
                assert np.array_equal(stepped(session, binding), 2 * floats(5, start))
        assert session.step_stats == StepStats(captures=1, updates=3, replays=4)
        assert session.num_graphs == 1
        session.synchronize()
        assert rig.used <= used


def test_another_shape_does_not_update(rig: Rig) -> None:
    with rig.session() as session:
        with bound(session, 5) as binding:
            session.run(binding)
            session.step(binding)
        with bound(session, 6) as binding:
            assert np.array_equal(stepped(session, binding), 2 * floats(6))
        assert session.step_stats == StepStats(captures=2, replays=2)


def test_one_graph_too_many_evicts_one(rig: Rig) -> None:
    with rig.session(max_graphs=2) as session:
        first, second, third = (bound(session, count) for count in (4, 5, 6))
        session.run(first)
        for binding in (first, second, second, first, first):
            session.step(binding)
        session.step(third)
        assert session.step_stats == StepStats(captures=3, replays=6, evictions=1)
        assert session.num_graphs == 2
        for binding, count in ((first, 4), (second, 5), (third, 6)):
            assert np.array_equal(stepped(session, binding), 2 * floats(count))
        assert session.num_graphs == 2


def test_a_graph_replayed_since_the_last_eviction_stays(rig: Rig) -> None:
    with rig.session(max_graphs=3) as session:
        bindings = [bound(session, count) for count in range(4, 9)]
        session.run(bindings[0])
        for binding in bindings[:4]:
            session.step(binding)  # the last evicts the first
        used, unused = bindings[1:3]
        session.step(used)
        session.step(bindings[4])
        before = session.step_stats
        assert before.evictions == 2
        session.step(used)
        assert session.step_stats == replace(before, replays=before.replays + 1)
        session.step(unused)
        assert session.step_stats.captures == before.captures + 1


def test_what_cannot_be_captured_runs_eagerly_each_time(rig: Rig) -> None:
    rig.trouble.fault, rig.trouble.is_honest = "synchronizes", True
    with rig.session(FAULTY_MIDDLE) as session, bound(session, 5) as binding:
        for _ in range(5):
            assert np.array_equal(stepped(session, binding), 105 * floats(5))
        assert session.step_stats == StepStats(eager=5)
        assert session.num_graphs == 0


def test_a_graph_that_the_budget_does_not_admit_is_done_without(rig: Rig) -> None:
    rig.governor = MemoryGovernor(MemoryBudget(device=TierBudget(nbytes=GRAPH_NBYTES - 1)))
    with rig.session() as session, bound(session, 5) as binding:
        for _ in range(3):
            assert np.array_equal(stepped(session, binding), 2 * floats(5))
        assert session.step_stats == StepStats(eager=3)


def test_a_workspace_that_grows_in_a_run_leaves_graphs_their_own(rig: Rig) -> None:
    with rig.session(SUMMED) as session, bound(session, 8) as small, bound(session, 99) as large:
        session.run(small)
        session.step(small)
        session.run(large)
        assert np.array_equal(stepped(session, small), np.cumsum(3 * floats(8)))
        assert session.step_stats == StepStats(captures=1, replays=2)


def test_a_workspace_that_a_larger_graph_takes_ends_the_replays_over_the_old_one(rig: Rig) -> None:
    with rig.session(SUMMED) as session, bound(session, 8) as small, bound(session, 99) as large:
        session.run(small)
        session.step(small)
        session.run(large)
        assert np.array_equal(stepped(session, large), np.cumsum(3 * floats(99)))
        assert np.array_equal(stepped(session, small), np.cumsum(3 * floats(8)))
        assert session.step_stats == StepStats(captures=2, updates=1, replays=3)
        for binding, count in ((small, 8), (large, 99)):
            assert np.array_equal(stepped(session, binding), np.cumsum(3 * floats(count)))
        assert session.step_stats == StepStats(captures=2, updates=1, replays=5)


def test_a_run_that_fails_after_a_workspace_grew_changes_no_graph(rig: Rig) -> None:
    nodes = (*SUMMED, toy_node("Faulty", "y", output="z", name="last"))
    with rig.session(nodes) as session, bound(session, 8) as small, bound(session, 99) as large:
        session.run(small)
        session.step(small)
        rig.trouble.fault = "raises"
        with pytest.raises(PlantedError):
            session.run(large)
        rig.trouble.fault = ""
        for _ in range(3):
            for binding, count in ((small, 8), (large, 99)):
                assert np.array_equal(stepped(session, binding), np.cumsum(3 * floats(count)))
        assert session.step_stats == StepStats(captures=2, updates=1, replays=7)


def test_a_failed_capture_is_not_counted_and_the_next_step_tries_again(rig: Rig) -> None:
    with rig.session(FAULTY_MIDDLE) as session, bound(session, 5) as binding:
        session.run(binding)
        rig.trouble.fault = "synchronizes"
        with pytest.raises(CaptureError):
            session.step(binding)
        rig.trouble.fault = ""
        assert np.array_equal(stepped(session, binding), 105 * floats(5))
        assert session.step_stats == StepStats(captures=1, replays=1)


def test_graphs_of_capture_and_of_step_are_counted_apart(rig: Rig) -> None:
    with rig.session() as session, bound(session, 5) as binding:
        session.run(binding)
        with closing(session.capture(binding)) as graph:
            graph.replay()
            session.step(binding)
            assert session.num_captures == 1
            assert session.num_replays == 2
            assert session.step_stats == StepStats(captures=1, replays=1)


def test_a_closed_binding_cannot_be_stepped(rig: Rig) -> None:
    with rig.session() as session:
        binding = bound(session, 5)
        session.run(binding)
        session.step(binding)
        binding.close()
        with pytest.raises(ClosedError, match="binding"):
            session.step(binding)
    with pytest.raises(ClosedError, match="session"):
        session.step(binding)
