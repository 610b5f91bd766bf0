"""A thread's contexts are its own business: nxrt needs none, and leaves what is there as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from nxrt import Binding, CudaProvider, MemoryGovernor, Role, Session, TensorView
from nxrt.providers.base import Replayable
from nxrt.tensor import DType
from tests.helpers.cases import OUTPUT, IndexSelectCase, drawn_case
from tests.helpers.sessions import write
from tests.process.threads import context_stack, foreign_context, run_together

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

NUM_THREADS = 8


def case_of(seed: int, num_keys: int = 24) -> IndexSelectCase:
    return drawn_case(f"seed-{seed}", num_queries=2, num_keys=num_keys, top_k=4, seed=seed)


@dataclass
class Unchanged:
    """Make calls, and check after each that this thread's stack of contexts is what it was."""

    stack: list[int] = field(default_factory=context_stack)

    @contextmanager
    def after(self, call: str) -> Iterator[None]:
        yield
        assert context_stack() == self.stack, f"{call} changed this thread's contexts"


def use_everything(provider: CudaProvider, case: IndexSelectCase) -> None:
    """Open, bind, write, run, step, capture, replay, read, wait, close: nothing stays current."""
    unchanged = Unchanged()
    governor = MemoryGovernor()
    with unchanged.after("open"):
        session = Session(case.graph, [provider], governor)
    with unchanged.after("bind"):
        binding = session.bind()
    with unchanged.after("write"):
        write(binding, case)
    use(unchanged, session, binding, case)
    with unchanged.after("capture"):
        graph = session.capture(binding)
    replay(unchanged, graph, binding, case)
    for call in (graph.close, binding.close, session.close):
        with unchanged.after(call.__qualname__):
            call()
    assert all(tier.used == 0 for tier in governor.snapshot())


def use(unchanged: Unchanged, session: Session, binding: Binding, case: IndexSelectCase) -> None:
    calls: dict[str, Callable[[Binding], None]] = {"run": session.run, "step": session.step}
    for name, call in calls.items():
        blank(binding)
        with unchanged.after(name):
            call(binding)
        with unchanged.after("read"):
            selected = binding.read(OUTPUT)
        np.testing.assert_array_equal(selected, case.expected())
    with unchanged.after("synchronize"):
        session.synchronize()


def replay(
    unchanged: Unchanged, graph: Replayable, binding: Binding, case: IndexSelectCase
) -> None:
    blank(binding)
    with unchanged.after("replay"):
        graph.replay()
    np.testing.assert_array_equal(binding.read(OUTPUT), case.expected())


def blank(binding: Binding) -> None:
    """Overwrite the output, so that a result of before cannot pass for a new one."""
    binding.write(OUTPUT, np.full(binding.view(OUTPUT).shape, -7, np.int64))


def test_fresh_threads_need_no_context_and_are_left_none(cuda_provider: CudaProvider) -> None:
    use_everything(cuda_provider, case_of(1))  # all is compiled before the threads start

    def act(seed: int) -> None:
        assert context_stack() == []
        use_everything(cuda_provider, case_of(seed))
        assert context_stack() == []

    run_together([lambda seed=seed: act(seed) for seed in range(1, NUM_THREADS + 1)])  # type: ignore[misc]


def test_foreign_context_stays_current(cuda_provider: CudaProvider) -> None:
    def act() -> None:
        with foreign_context() as context:
            use_everything(cuda_provider, case_of(3))
            assert context_stack() == [context]

    run_together([act, lambda: use_everything(cuda_provider, case_of(4))])


def test_provider_opens_and_closes_under_a_foreign_context(cuda_provider: CudaProvider) -> None:
    def act() -> None:
        with foreign_context() as context:
            with CudaProvider() as provider:
                assert context_stack() == [context]
                use_everything(provider, case_of(5))
            assert context_stack() == [context]

    run_together([act])


def test_any_thread_closes_what_another_made(cuda_provider: CudaProvider) -> None:
    governor = MemoryGovernor()
    made: list[Callable[[], None]] = []
    case = case_of(6)
    sessions = [Session(case.graph, [cuda_provider], governor) for _ in range(NUM_THREADS)]
    for session in sessions:
        binding = session.bind()
        write(binding, case)
        session.run(binding)
        made.append(session.capture(binding).close)
        made.append(binding.close)
        made.append(
            session.provider_session.allocate(512, role=Role.ACTIVATION, holder="loose").close
        )

    def close(index: int) -> None:
        unchanged = Unchanged()
        for act in made[index::NUM_THREADS]:
            with unchanged.after("close"):
                act()

    run_together([lambda i=i: close(i) for i in range(NUM_THREADS)])  # type: ignore[misc]
    run_together([session.close for session in sessions])
    assert all(tier.used == 0 for tier in governor.snapshot())


def test_refused_calls_leave_the_contexts_alone(cuda_provider: CudaProvider) -> None:
    governor = MemoryGovernor()
    case = case_of(7)
    with Session(case.graph, [cuda_provider], governor) as session, session.bind() as binding:
        write(binding, case)
        backend = session.provider_session
        memory = backend.allocate(64, role=Role.ACTIVATION, holder="wrong")
        unchanged = Unchanged()
        with unchanged.after("bind"), pytest.raises(ValueError, match="view of"):
            session.bind(views={OUTPUT: TensorView(memory, DType.I64, (1,))})
        with unchanged.after("allocate"), pytest.raises(MemoryError):
            backend.allocate(2**62, role=Role.ACTIVATION, holder="huge")
        memory.close()
    assert all(tier.used == 0 for tier in governor.snapshot())
