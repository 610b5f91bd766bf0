"""What happens inside a recording that must not: the driver never sees it, and nothing is left.

Kernels that break the rules in their own code are tested in tests/graphs; here it is the calls that
nxrt makes, counted on the double.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from nxrt import CaptureError, Role, Session
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime import driver
from nxrt.runtime.device_memory import copy_on_device, copy_to_host, fill_bytes
from nxrt.runtime.module import BoundLaunch
from nxrt.runtime.stream import Stream
from tests.helpers.cuda_toys import SOURCE, Gather, ToyStandIns
from tests.helpers.fake_driver import FakeDriver, Snapshot
from tests.helpers.fault_scenarios import Subject

pytestmark = pytest.mark.fake

ACTIVE = 1
"""What the driver says of a stream whose recording is still valid."""

NUM_LAUNCHES = 4
"""Of one run of the subject's graph: the step's count, Accumulate's two, and Gather's."""


class PlantedError(Exception):
    """The kernel's own."""


class PlantedInterrupt(BaseException):
    """Stands for Ctrl-C."""


@pytest.fixture
def subject(fake_driver: FakeDriver, cache_dir: Path) -> Iterator[Subject]:
    ToyStandIns(fake_driver).register()
    subject = Subject(fake_driver, cache_dir)
    subject.warm()
    subject.graphs.append(subject.opened.capture(subject.bindings[0]))
    subject.stream()
    subject.opened.synchronize()
    yield subject
    subject.close()
    assert all(tier.used == 0 for tier in subject.governor.snapshot())


def backend_of(session: Session) -> CudaProviderSession:
    backend = session.provider_session
    assert isinstance(backend, CudaProviderSession)
    return backend


def held(subject: Subject) -> tuple[Snapshot, list[int]]:
    """Return what is live and what is charged, once nothing is on its way."""
    subject.opened.synchronize()
    return subject.fake.snapshot(), [tier.used for tier in subject.governor.snapshot()]


@contextmanager
def raising_at(index: int, error: BaseException, *, is_after: bool) -> Iterator[list[int]]:
    """Raise at one of the launches that are recorded inside the with-block; lend their numbers."""
    seen: list[int] = []
    real = BoundLaunch.enqueue

    def enqueue(self: BoundLaunch, stream: Stream) -> None:
        seen.append(len(seen))
        if seen[-1] == index and not is_after:
            raise error
        real(self, stream)
        if seen[-1] == index:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundLaunch, "enqueue", enqueue)
        yield seen


def test_the_recorded_launches_are_counted(subject: Subject) -> None:
    with raising_at(-1, PlantedError(), is_after=False) as seen:
        subject.opened.capture(subject.bindings[0]).close()
    assert len(seen) == NUM_LAUNCHES


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("index", range(NUM_LAUNCHES))
def test_an_exception_at_any_recorded_launch_leaves_no_trace(
    subject: Subject, index: int, is_after: bool
) -> None:
    before, error = held(subject), PlantedError("planted")
    with (
        raising_at(index, error, is_after=is_after),
        pytest.raises(CaptureError, match="planted") as failure,
    ):
        subject.opened.capture(subject.bindings[0])
    assert failure.value.stage == "record"
    assert error in (failure.value.__cause__, getattr(failure.value.__cause__, "__cause__", None))
    assert held(subject) == before
    subject.require_working()


@pytest.mark.parametrize("index", range(NUM_LAUNCHES))
def test_an_interrupt_at_any_recorded_launch_passes_and_leaves_no_trace(
    subject: Subject, index: int
) -> None:
    before = held(subject)
    with raising_at(index, PlantedInterrupt(), is_after=True), pytest.raises(PlantedInterrupt):
        subject.opened.capture(subject.bindings[0])
    assert held(subject) == before
    subject.require_working()


Action = Callable[[Subject], Any]
_stream_of: Callable[[Subject], Stream] = lambda subject: backend_of(subject.opened).stream  # noqa: E731


def fill(subject: Subject, stream: Stream) -> None:
    fill_bytes(subject.bindings[0].view("x").pointer, 0, 4, stream=stream)


def read_back(subject: Subject) -> None:
    view = subject.bindings[0].view("x")
    copy_to_host(subject.inputs(subject.bindings[0])[0], view.pointer, stream=_stream_of(subject))


def copy(subject: Subject) -> None:
    pointer = subject.bindings[0].view("x").pointer
    copy_on_device(pointer, pointer + 8, 8, stream=subject.streams[0])


ACTIONS: dict[str, Action] = {
    "allocates": lambda s: backend_of(s.opened).allocate(8, role=Role.ACTIVATION, holder="test"),
    "binds": lambda s: s.opened.bind({"N": 3}),
    "loads code": lambda s: backend_of(s.opened)._context.load(SOURCE),
    "waits for its stream": lambda s: _stream_of(s).synchronize(),
    "waits for another stream": lambda s: s.streams[0].synchronize(),
    "waits for the session": lambda s: s.opened.synchronize(),
    "reads": lambda s: s.bindings[0].read("picked"),
    "writes": lambda s: s.bindings[0].write("x", s.inputs(s.bindings[0])[0]),
    "reads back": read_back,
    "fills on the session's stream": lambda s: fill(s, _stream_of(s)),
    "fills on another stream": lambda s: fill(s, s.streams[0]),
    "copies on another stream": copy,
    "runs": lambda s: s.opened.run(s.bindings[0]),
    "runs with a stream": lambda s: s.opened.run(s.bindings[0], stream=s.streams[0].handle),
    "captures": lambda s: s.opened.capture(s.bindings[0]),
    "steps": lambda s: s.opened.step(s.bindings[0]),
    "replays": lambda s: s.graphs[0].replay(),
    "closes a graph": lambda s: s.graphs[0].close(),
    "closes the session": lambda s: s.opened.close(),
}


@contextmanager
def doing_while_recording(act: Callable[[Stream], None]) -> Iterator[None]:
    """Let Gather act after its launch, when it is recorded."""
    real = Gather.execute

    def execute(self: Gather, inputs: Any, outputs: Any, *, stream: Stream) -> None:
        real(self, inputs, outputs, stream=stream)
        if stream.is_capturing:
            act(stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gather, "execute", execute)
        yield


@pytest.mark.parametrize("action", ACTIONS)
def test_what_would_break_a_recording_is_refused_and_the_kernel_named(
    subject: Subject, action: str
) -> None:
    before = held(subject)
    with (
        doing_while_recording(lambda _: ACTIONS[action](subject)),
        pytest.raises(CaptureError) as failure,
    ):
        subject.opened.capture(subject.bindings[0])
    assert failure.value.kernel == "pick"
    assert held(subject) == before
    subject.require_working()


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_refused_to_a_recording_is_not_seen_by_the_driver(
    subject: Subject, action: str
) -> None:
    seen: list[str] = []
    states: list[int] = []

    def act(stream: Stream) -> None:
        with subject.fake.traced() as names, pytest.raises(CaptureError):
            ACTIONS[action](subject)
        seen.extend(names)
        states.append(int(driver.call(driver.api.cuStreamIsCapturing, stream.handle)))

    with doing_while_recording(act), suppress(CaptureError):
        subject.opened.capture(subject.bindings[0]).close()
    assert (seen, states) == ([], [ACTIVE])


def test_an_event_that_is_queried_while_recording_is_refused(subject: Subject) -> None:
    with (
        Stream(subject.device) as stream,
        doing_while_recording(lambda _: void(event.is_reached())),
    ):
        event = stream.fence()
        with pytest.raises(CaptureError, match="an event was queried"):
            subject.opened.capture(subject.bindings[0])
        event.close()


def void(_: object) -> None:
    """Return nothing."""
