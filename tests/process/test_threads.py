"""Threads share a session, and a recording thread is not disturbed by what the others do."""

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from nxrt import CudaProvider, MemoryGovernor, Session
from tests.helpers.cases import OUTPUT, IndexSelectCase, drawn_case
from tests.helpers.sessions import dynamic_session, write
from tests.helpers.targets import MAX_REPEATS
from tests.process.threads import run_together

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

NUM_THREADS = 8
NUM_ROUNDS = min(12, MAX_REPEATS)
NUM_CAPTURES = min(100, MAX_REPEATS)
FILL = -7


def case_of(seed: int, num_keys: int) -> IndexSelectCase:
    return drawn_case(f"seed-{seed}", num_queries=1, num_keys=num_keys, top_k=4, seed=seed)


@pytest.mark.usefixtures("switching_often")
def test_threads_on_one_session_get_their_own_results(cuda_provider: CudaProvider) -> None:
    governor = MemoryGovernor()
    cases = {seed: case_of(seed, 16 + 8 * (seed % 3)) for seed in range(1, 2 * NUM_THREADS)}
    expected = {seed: case.expected() for seed, case in cases.items()}
    assert len({result.tobytes() for result in expected.values()}) == len(cases)
    num_compared = []

    with dynamic_session(cuda_provider, governor) as session:

        def act(first: int) -> None:
            own = cases[first], case_of(100 + first, cases[first].key.shape[1])
            results = expected[first], own[1].expected()
            with session.bind({"T": own[0].key.shape[1]}) as binding:
                for turn in range(NUM_ROUNDS):
                    write(binding, own[turn % 2])
                    binding.write(OUTPUT, np.full(binding.view(OUTPUT).shape, FILL, np.int64))
                    (session.step if turn % 3 else session.run)(binding)
                    np.testing.assert_array_equal(binding.read(OUTPUT), results[turn % 2])
                    num_compared.append(first)

        run_together([lambda seed=seed: act(seed) for seed in range(1, NUM_THREADS + 1)])  # type: ignore[misc]
    assert len(num_compared) == NUM_THREADS * NUM_ROUNDS
    assert all(tier.used == 0 for tier in governor.snapshot())


def test_threads_replay_one_graph_each_while_others_capture(cuda_provider: CudaProvider) -> None:
    governor = MemoryGovernor()
    with dynamic_session(cuda_provider, governor) as session:

        def act(seed: int) -> None:
            case = case_of(seed, 24)
            with session.bind({"T": 24}) as binding:
                write(binding, case)
                session.run(binding)
                for _ in range(NUM_ROUNDS):
                    binding.write(OUTPUT, np.full(binding.view(OUTPUT).shape, FILL, np.int64))
                    with session.capture(binding) as graph:  # type: ignore[attr-defined]
                        graph.replay()
                        np.testing.assert_array_equal(binding.read(OUTPUT), case.expected())

        run_together([lambda seed=seed: act(seed) for seed in range(1, NUM_THREADS + 1)])  # type: ignore[misc]
    assert all(tier.used == 0 for tier in governor.snapshot())


class Neighbour:
    """Do all that a thread may do while another one records."""

    def __init__(self, provider: CudaProvider) -> None:
        self.provider = provider
        self.case = case_of(50, 24)
        self.is_over = threading.Event()
        self.num_turns = 0

    def act(self) -> None:
        """Take turns until told to stop."""
        while not self.is_over.is_set():
            self.turn()

    def turn(self) -> None:
        """Allocate, load, copy, launch, wait, capture, replay and free."""
        governor = MemoryGovernor()
        with (
            Session(self.case.graph, [self.provider], governor) as session,
            session.bind() as binding,
        ):
            write(binding, self.case)
            session.run(binding)
            session.synchronize()
            graph = session.capture(binding)
            graph.replay()
            np.testing.assert_array_equal(binding.read(OUTPUT), self.case.expected())
            graph.close()
        assert all(tier.used == 0 for tier in governor.snapshot())
        self.num_turns += 1


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Let threads change within a capture, which is shorter than a usual turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching_often")
def test_captures_survive_what_another_thread_does(cuda_provider: CudaProvider) -> None:
    case = case_of(9, 24)
    neighbour = Neighbour(cuda_provider)

    def capture_often() -> None:
        try:
            with (
                Session(case.graph, [cuda_provider], MemoryGovernor()) as session,
                session.bind() as binding,
            ):
                write(binding, case)
                session.run(binding)
                for _ in range(NUM_CAPTURES):
                    binding.write(OUTPUT, np.full(binding.view(OUTPUT).shape, FILL, np.int64))
                    graph = session.capture(binding)
                    graph.replay()
                    np.testing.assert_array_equal(binding.read(OUTPUT), case.expected())
                    graph.close()
        finally:
            neighbour.is_over.set()

    run_together([capture_often, neighbour.act])
    assert neighbour.num_turns > 0


@pytest.mark.parametrize("moment", ["before", "after"])
def test_capture_survives_a_neighbour_in_its_middle(
    cuda_provider: CudaProvider, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The other thread acts exactly while this one records, not only likely so."""
    case = case_of(10, 24)
    with (
        Session(case.graph, [cuda_provider], MemoryGovernor()) as session,
        session.bind() as binding,
    ):
        write(binding, case)
        session.run(binding)
        interposed = Interposed(session.kernels[0].execute, moment, Neighbour(cuda_provider).turn)
        monkeypatch.setattr(session.kernels[0], "execute", interposed)
        for _ in range(3):
            binding.write(OUTPUT, np.full(binding.view(OUTPUT).shape, FILL, np.int64))
            graph = session.capture(binding)
            graph.replay()
            np.testing.assert_array_equal(binding.read(OUTPUT), case.expected())
            graph.close()
        assert interposed.num_calls == 3


class Interposed:
    """Call something on a fresh thread before or after a kernel is recorded."""

    def __init__(self, execute: Callable[..., None], moment: str, act: Callable[[], None]) -> None:
        self.execute, self.moment, self.act = execute, moment, act
        self.num_calls = 0

    def __call__(self, *args: object, **options: object) -> None:
        self.num_calls += 1
        if self.moment == "before":
            run_together([self.act])
        self.execute(*args, **options)
        if self.moment == "after":
            run_together([self.act])
