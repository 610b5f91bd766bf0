"""Captures that fail: one typed error with the first cause, and nothing left behind.

The recorded region is three kernels of which the second breaks the rules, in every way there is.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from nxrt import (
    Binding,
    CaptureDeclinedError,
    CaptureError,
    DriverError,
    Role,
    Session,
)
from nxrt.graph_cache import StepStats
from nxrt.runtime.recording import is_recording
from tests.helpers.faulty_toys import BREAKING_FAULTS, FAULTS, PlantedError
from tests.helpers.graph_rig import (
    DRIFT_NBYTES,
    FAULTY_MIDDLE,
    Rig,
    backend_of,
    bound,
    floats,
    is_capturing,
    poison,
)
from tests.helpers.targets import MAX_REPEATS

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

REPEATS = min(50, MAX_REPEATS)
COUNT = 6
RIGHT = 105 * floats(COUNT)

CAUSES: dict[str, tuple[type[Exception], str]] = {
    "raises": (PlantedError, "planted"),
    "allocates": (CaptureError, "memory was allocated"),
    "allocates past nxrt": (DriverError, "cuMemAlloc"),
    "copies on the default stream": (CaptureError, "not the recorded one"),
    "fills on the default stream": (CaptureError, "not the recorded one"),
    "fills on the usual stream": (CaptureError, "not the recorded one"),
    "synchronizes": (CaptureError, "a stream was synchronized"),
    "synchronizes the usual stream": (CaptureError, "a stream was synchronized"),
    "reads a scalar back": (CaptureError, "a host array was copied"),
    "queries an event": (CaptureError, "an event was queried"),
    "loads code": (CaptureError, "a module was loaded"),
    "hides a refused wait": (CaptureError, "a stream was synchronized"),
    "hides a refused fill": (CaptureError, "not the recorded one"),
    "hides an illegal wait": (CaptureError, "not permitted while recording"),
    "hides an illegal allocation": (CaptureError, "not permitted while recording"),
}
"""For each fault the first cause, which is the error's `__cause__`."""


@pytest.fixture
def session(rig: Rig) -> Iterator[Session]:
    with rig.session(FAULTY_MIDDLE) as session:
        yield session


@pytest.fixture
def binding(session: Session) -> Iterator[Binding]:
    with bound(session, COUNT) as binding:
        session.run(binding)
        yield binding


def assert_right_eagerly_and_captured(session: Session, binding: Binding) -> None:
    poison(session, binding)
    session.run(binding)
    assert np.array_equal(binding.read("y"), RIGHT)
    with closing(session.capture(binding)) as graph:
        poison(session, binding)
        graph.replay()
        assert np.array_equal(binding.read("y"), RIGHT)


def test_every_fault_has_a_first_cause() -> None:
    assert list(CAUSES) == BREAKING_FAULTS


@pytest.mark.parametrize("fault", CAUSES)
def test_a_failed_capture_names_kernel_and_cause_and_leaves_no_trace(
    rig: Rig, session: Session, binding: Binding, fault: str
) -> None:
    kind, words = CAUSES[fault]
    session.synchronize()
    before = rig.figures()
    free_nbytes = rig.free_nbytes()
    for _ in range(REPEATS):
        rig.trouble.fault = fault
        with pytest.raises(CaptureError, match=words) as failure:
            session.capture(binding)
        rig.trouble.fault = ""
        assert (failure.value.stage, failure.value.kernel) == ("record", "second")
        assert isinstance(failure.value.__cause__, kind)
        assert words in str(failure.value.__cause__)
        assert not is_capturing(session)
        assert not is_recording()
        assert rig.figures() == before
        assert_right_eagerly_and_captured(session, binding)
        session.synchronize()
        assert rig.figures() == before
    assert free_nbytes - rig.free_nbytes() <= DRIFT_NBYTES


@pytest.mark.parametrize("fault", [name for name in CAUSES if not name.startswith("hides")])
def test_a_fault_of_the_first_kernel_is_not_blamed_on_a_later_one(
    rig: Rig, session: Session, binding: Binding, fault: str
) -> None:
    """The second recording follows the first failure at once."""
    for _ in range(3):
        rig.trouble.fault = fault
        with pytest.raises(CaptureError) as failure:
            session.capture(binding)
        assert failure.value.kernel == "second"
        assert "invalidated" not in str(failure.value)


@pytest.mark.parametrize("fault", CAUSES)
def test_step_reports_a_dishonest_kernel_and_goes_on(
    rig: Rig, session: Session, binding: Binding, fault: str
) -> None:
    rig.trouble.fault = fault
    with pytest.raises(CaptureError) as failure:
        session.step(binding)
    assert not isinstance(failure.value, CaptureDeclinedError)
    assert failure.value.kernel == "second"
    rig.trouble.fault = ""
    poison(session, binding)
    session.step(binding)
    assert np.array_equal(binding.read("y"), RIGHT)
    assert session.step_stats == StepStats(captures=1, replays=1)


@pytest.mark.parametrize("fault", ["synchronizes", "reads a scalar back", "queries an event"])
def test_an_honest_kernel_is_declined_before_recording_and_runs_eagerly(
    rig: Rig, session: Session, binding: Binding, fault: str
) -> None:
    rig.trouble.fault, rig.trouble.is_honest = fault, True
    begun = rig.fake.calls("cuStreamBeginCapture") if rig.fake else 0
    with pytest.raises(CaptureDeclinedError) as refusal:
        session.capture(binding)
    assert refusal.value.offenders == (("second", f"it {fault}"),)
    for _ in range(3):
        poison(session, binding)
        session.step(binding)
        assert np.array_equal(binding.read("y"), RIGHT)
    assert session.step_stats == StepStats(eager=3)
    assert not rig.fake or rig.fake.calls("cuStreamBeginCapture") == begun


def test_every_kernel_that_cannot_be_recorded_is_named(rig: Rig) -> None:
    with rig.session(FAULTY_MIDDLE) as session, bound(session, COUNT) as binding:
        with pytest.raises(CaptureDeclinedError) as refusal:
            session.capture(binding)
        assert [name for name, _ in refusal.value.offenders] == ["first", "second", "third"]


def test_the_clean_kernel_is_captured_and_replayed(session: Session, binding: Binding) -> None:
    with closing(session.capture(binding)) as graph:
        for start in range(10):
            binding.write("x", floats(COUNT, start))
            graph.replay()
            assert np.array_equal(binding.read("y"), 105 * floats(COUNT, start))


def test_memory_closed_while_recording_goes_back_afterwards(
    rig: Rig, session: Session, binding: Binding
) -> None:
    session.synchronize()
    before = rig.figures()
    for _ in range(5):
        dropped = backend_of(session).allocate(640, role=Role.ACTIVATION, holder="test")
        rig.trouble.fault, rig.trouble.closes = "closes memory", [dropped]
        with closing(session.capture(binding)) as graph:
            graph.replay()
            assert np.array_equal(binding.read("y"), RIGHT)
        session.synchronize()
        assert rig.figures() == before


BLOCKING: dict[str, Callable[[Session, Binding], object]] = {
    "write": lambda _, binding: binding.write("x", floats(COUNT)),
    "read": lambda _, binding: binding.read("y"),
    "synchronize": lambda session, _: session.synchronize(),
    "close of the session": lambda session, _: session.close(),
    "bind": lambda session, _: session.bind({"N": 3}),
    "another capture": lambda session, binding: session.capture(binding),
    "run with a stream": lambda session, binding: session.run(binding, stream=0),
}


def void(_: object) -> None:
    """Return nothing."""


@pytest.mark.parametrize("action", BLOCKING)
def test_what_a_user_may_not_do_inside_a_recording_is_refused_and_the_session_goes_on(
    rig: Rig, session: Session, binding: Binding, action: str
) -> None:
    """The user's code is called from inside the capture scope, by a kernel of theirs."""
    FAULTS["calls the user"] = lambda *_: void(BLOCKING[action](session, binding))
    try:
        rig.trouble.fault = "calls the user"
        session.synchronize()
        before = rig.figures()
        with pytest.raises(CaptureError) as failure:
            session.capture(binding)
        assert failure.value.kernel == "second"
        assert rig.figures() == before
    finally:
        rig.trouble.fault = ""
        del FAULTS["calls the user"]
    assert_right_eagerly_and_captured(session, binding)
