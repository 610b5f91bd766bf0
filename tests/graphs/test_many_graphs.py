"""More graphs than are kept, and many that are: bounded, never stale, and all memory comes back."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from nxrt import Binding, Role, Session
from nxrt.providers.cuda_session import GRAPH_NBYTES
from tests.helpers.graph_rig import (
    DEVICE,
    DRIFT_NBYTES,
    SUMMED,
    Floats,
    Rig,
    bound,
    floats,
    poison,
)
from tests.helpers.targets import MAX_REPEATS

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

BOUND = 8
SIGNATURES = 100
LIVE = 64


def summed(count: int, start: int) -> Floats:
    return np.cumsum(3 * floats(count, start), dtype=np.float32)


def assert_stepped_right(session: Session, binding: Binding, start: int) -> None:
    count = binding.view("x").num_elements
    poison(session, binding)
    session.step(binding)
    assert np.array_equal(binding.read("y"), summed(count, start))


def graph_nbytes(rig: Rig) -> int:
    holders = rig.governor.usage(DEVICE).holders
    return sum(holder.used for holder in holders if holder.role is Role.GRAPH)


@pytest.fixture
def signatures(rig: Rig) -> Iterator[tuple[Session, list[Binding]]]:
    """Open a session of `BOUND` graphs, and a binding for each of the signatures."""
    with rig.session(SUMMED, max_graphs=BOUND) as session, ExitStack() as undo:
        bindings = [
            undo.enter_context(bound(session, number + 1, number)) for number in range(SIGNATURES)
        ]
        session.run(bindings[-1])  # the largest workspace
        session.step(bindings[-1])
        yield session, bindings


def test_more_signatures_than_graphs_are_captured_again_and_never_stale(
    rig: Rig, signatures: tuple[Session, list[Binding]]
) -> None:
    session, bindings = signatures
    flat, free_nbytes = None, 0
    schedule = [*range(SIGNATURES), *[3, 77] * (min(1000, MAX_REPEATS) // 2), *range(SIGNATURES)]
    for number, signature in enumerate(schedule):
        assert_stepped_right(session, bindings[signature], signature)
        assert session.num_graphs <= BOUND
        if number % 10:
            continue
        session.synchronize()
        assert graph_nbytes(rig) == session.num_graphs * GRAPH_NBYTES
        assert not rig.fake or rig.fake.live("exec") == session.num_graphs
        if number >= 2 * BOUND and flat is None:
            flat, free_nbytes = rig.figures(), rig.free_nbytes()
        assert flat in (None, rig.figures())
    assert free_nbytes - rig.free_nbytes() <= DRIFT_NBYTES
    stats = session.step_stats
    num_steps = len(schedule) + 1
    assert (stats.eager, stats.updates, stats.replays) == (0, 0, num_steps)
    assert stats.evictions == stats.captures - BOUND
    assert stats.captures <= 2 * SIGNATURES + 3


def test_two_signatures_in_turn_are_captured_once(
    signatures: tuple[Session, list[Binding]],
) -> None:
    session, bindings = signatures
    for signature in range(50):
        session.step(bindings[signature])
    before = session.step_stats
    for number in range(200):
        assert_stepped_right(session, bindings[(3, 77)[number % 2]], (3, 77)[number % 2])
    after = session.step_stats
    assert after.captures - before.captures <= 2
    assert after.replays - before.replays == 200


class Zoo:
    """Up to `LIVE` graphs of each kind, of random shapes, in a session that keeps as many.

    Args:
        session: of SUMMED.
        draw: decides everything.
    """

    def __init__(self, session: Session, draw: random.Random) -> None:
        self._session = session
        self._draw = draw
        self.bindings: list[tuple[Binding, int]] = []
        self.graphs: list[tuple[object, Binding, int]] = []

    def add(self) -> None:
        count, start = self._draw.randrange(1, 20), self._draw.randrange(7)
        self.bindings.append((bound(self._session, count, start), start))
        assert_stepped_right(self._session, *self.bindings[-1])

    def act(self) -> None:
        """Step, write and step, replace a binding by one of its shape, capture, or close."""
        action = self._draw.choices(
            [self._step, self._rewrite, self._replace, self._capture, self._close],
            weights=[50, 20, 15, 10, 5],
        )[0]
        action(self._draw.randrange(len(self.bindings)))

    def _step(self, place: int) -> None:
        assert_stepped_right(self._session, *self.bindings[place])

    def _rewrite(self, place: int) -> None:
        binding, start = self.bindings[place]
        binding.write("x", floats(binding.view("x").num_elements, start + 1))
        self.bindings[place] = (binding, start + 1)
        self._step(place)

    def _replace(self, place: int) -> None:
        binding, start = self.bindings.pop(place)
        count = binding.view("x").num_elements
        binding.close()
        self.bindings.append((bound(self._session, count, start), start))
        self._step(len(self.bindings) - 1)

    def _capture(self, place: int) -> None:
        binding, start = self.bindings[place]
        with closing(self._session.capture(binding)) as graph:
            poison(self._session, binding)
            graph.replay()
            count = binding.view("x").num_elements
            assert np.array_equal(binding.read("y"), summed(count, start))

    def _close(self, place: int) -> None:
        self.bindings.pop(place)[0].close()
        self.add()

    def close(self) -> None:
        for binding, _ in self.bindings:
            binding.close()


def test_many_live_graphs_in_any_order_stay_right_and_give_everything_back(rig: Rig) -> None:
    num_steps = 1000 if rig.fake else 10 * min(1000, MAX_REPEATS)
    with rig.session(SUMMED, max_graphs=LIVE) as session:
        with bound(session, 20) as largest:
            session.run(largest)
            session.step(largest)
        session.synchronize()
        before, used = rig.figures(), rig.used - GRAPH_NBYTES
        zoo = Zoo(session, random.Random(21))
        for _ in range(LIVE):
            zoo.add()
        for _ in range(num_steps):
            zoo.act()
            assert session.num_graphs <= LIVE
        stats = session.step_stats
        assert stats.updates >= num_steps // 20
        assert stats.eager == 0
        zoo.close()
        session.synchronize()
        assert rig.used == used + session.num_graphs * GRAPH_NBYTES
        assert rig.figures()["pending"] == before["pending"] == 0
    assert all(tier.used == 0 for tier in rig.governor.snapshot())
