"""Streams of the caller's: what is taken for one, and the order with the session's, both ways.

Work is held up, by a kernel that lasts on a card and until it is waited for on the double, so that
an order that is not enforced shows.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from nxrt import Binding, CaptureError, InvalidInputError, Role, Session
from nxrt.graph_cache import StepStats
from nxrt.runtime import driver
from nxrt.runtime.device_memory import copy_on_device, copy_to_host, fill_bytes
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.stream import Stream
from tests.helpers.faulty_toys import PlantedError
from tests.helpers.graph_rig import (
    FAULTY_MIDDLE,
    Delay,
    Floats,
    Rig,
    backend_of,
    bound,
    floats,
)

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

COUNT = 3000
NBYTES = 4 * COUNT
ONES = np.full(COUNT, np.uint32(0x01010101)).view(np.float32)
"""What filling with bytes of 1 gives."""


@pytest.fixture
def session(rig: Rig) -> Iterator[Session]:
    with rig.session() as session:
        yield session


@pytest.fixture
def binding(session: Session) -> Iterator[Binding]:
    with bound(session, COUNT) as binding:
        session.run(binding)
        session.synchronize()
        yield binding


@pytest.fixture
def theirs(rig: Rig, session: Session) -> Iterator[Stream]:
    """Return a stream of the caller's, on the same device."""
    with Stream(rig.device) as stream:
        yield stream
        stream.synchronize()


@pytest.fixture
def copied(session: Session) -> Iterator[GraphAllocation]:
    """Return memory of the caller's, as large as a value."""
    with backend_of(session).allocate(NBYTES, role=Role.ACTIVATION, holder="caller") as memory:
        yield memory


@pytest.fixture
def delay(rig: Rig, session: Session, binding: Binding) -> Iterator[Delay]:
    with Delay(session, rig.fake) as delay:
        yield delay


def seen(pointer: int, stream: Stream) -> Floats:
    """Return what a stream sees at its end."""
    array = np.empty(COUNT, np.float32)
    copy_to_host(array, pointer, stream=stream)
    stream.synchronize()
    return array


Execute = Callable[[Session, Binding, Any], None]
WAYS: dict[str, Execute] = {
    "run": lambda session, binding, stream: session.run(binding, stream=stream),
    "step": lambda session, binding, stream: session.step(binding, stream=stream),
}


class Theirs:
    """A stream of another library's."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __cuda_stream__(self) -> Any:
        return self._answer


@pytest.mark.parametrize("kind", ["handle", "numpy integer", "protocol", "legacy", "per thread"])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_stands_for_a_stream_is_taken(
    session: Session, binding: Binding, theirs: Stream, kind: str, way: str
) -> None:
    stream = {
        "handle": theirs.handle,
        "numpy integer": np.uint64(theirs.handle),
        "protocol": Theirs((0, theirs.handle)),
        "legacy": 0,
        "per thread": 2,
    }[kind]
    for start in range(3):
        binding.write("x", floats(COUNT, start), stream=stream)
        WAYS[way](session, binding, stream)
        assert np.array_equal(binding.read("y", stream=stream), 2 * floats(COUNT, start))


def test_the_sessions_own_stream_may_be_named(session: Session, binding: Binding) -> None:
    session.run(binding, stream=backend_of(session).stream.handle)
    assert np.array_equal(binding.read("y"), 2 * floats(COUNT))


NO_STREAMS: dict[str, Any] = {
    "text": "nothing",
    "fraction": 1.5,
    "negative": -1,
    "too large": 2**64,
    "truth": True,
    "a list": [0, 1],
    "protocol of nothing": Theirs(None),
    "protocol of one": Theirs((0,)),
    "protocol of text": Theirs((0, "stream")),
    "protocol of a number": Theirs(7),
    "protocol of a negative": Theirs((0, -5)),
}


@pytest.mark.parametrize("kind", NO_STREAMS)
def test_what_is_no_stream_is_refused_and_nothing_runs(
    session: Session, binding: Binding, kind: str
) -> None:
    stream = NO_STREAMS[kind]
    uses = (
        lambda: session.run(binding, stream=stream),
        lambda: session.step(binding, stream=stream),
        lambda: binding.write("x", floats(COUNT, 1), stream=stream),
        lambda: binding.read("x", stream=stream),
    )
    for use in uses:
        with pytest.raises(InvalidInputError, match="stream"):
            use()
    assert np.array_equal(binding.read("x"), floats(COUNT))
    assert session.step_stats == StepStats()


MODES = driver.api.CUstreamCaptureMode


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_a_stream_that_its_owner_captures_is_refused_and_the_capture_survives(
    rig: Rig, session: Session, binding: Binding, theirs: Stream, copied: GraphAllocation, mode: str
) -> None:
    device, api = rig.device, driver.api
    session.synchronize()
    begin = getattr(MODES, f"CU_STREAM_CAPTURE_MODE_{mode}")
    device.call(api.cuStreamBeginCapture, theirs.handle, begin)
    fill_bytes(copied.pointer, 1, NBYTES, stream=theirs)
    for use in (
        lambda: session.run(binding, stream=theirs.handle),
        lambda: session.step(binding, stream=theirs.handle),
        lambda: binding.write("x", floats(COUNT, 1), stream=theirs.handle),
        lambda: binding.read("x", stream=theirs.handle),
    ):
        with pytest.raises(CaptureError, match="captured by its owner"):
            use()
    assert int(device.call(api.cuStreamIsCapturing, theirs.handle)) == 1
    graph = device.call(api.cuStreamEndCapture, theirs.handle)
    executable = device.create(api.cuGraphInstantiate, graph, 0)
    device.call(api.cuGraphLaunch, executable, theirs.handle)
    assert np.array_equal(seen(copied.pointer, theirs), ONES)
    device.create(api.cuGraphExecDestroy, executable)
    device.create(api.cuGraphDestroy, graph)
    WAYS["run"](session, binding, theirs.handle)
    assert np.array_equal(binding.read("y"), 2 * floats(COUNT))


@pytest.mark.parametrize("way", WAYS)
def test_a_run_comes_after_what_the_callers_stream_had(
    session: Session, binding: Binding, theirs: Stream, delay: Delay, way: str
) -> None:
    session.step(binding)  # so that a step replays
    delay.before(theirs)
    fill_bytes(binding.view("x").pointer, 1, NBYTES, stream=theirs)
    WAYS[way](session, binding, theirs.handle)
    assert np.array_equal(binding.read("y"), 2 * ONES)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_comes_before_what_the_callers_stream_gets_next(
    session: Session, binding: Binding, theirs: Stream, delay: Delay, way: str
) -> None:
    session.step(binding)
    binding.write("x", floats(COUNT, 4))
    delay.before(backend_of(session).stream)
    WAYS[way](session, binding, theirs.handle)
    assert np.array_equal(seen(binding.view("y").pointer, theirs), 2 * floats(COUNT, 4))


def test_a_run_that_fails_is_ordered_all_the_same(rig: Rig, session: Session) -> None:
    with ExitStack() as undo:
        broken = undo.enter_context(rig.session(FAULTY_MIDDLE))
        binding = undo.enter_context(bound(broken, COUNT))
        theirs = undo.enter_context(Stream(rig.device))
        delay = undo.enter_context(Delay(session, rig.fake))
        rig.trouble.fault = "raises"
        delay.before(backend_of(broken).stream)
        with pytest.raises(PlantedError):
            broken.run(binding, stream=theirs.handle)
        assert np.array_equal(seen(binding.view("b").pointer, theirs), 15 * floats(COUNT))


def test_a_write_comes_after_what_the_callers_stream_reads(
    session: Session, binding: Binding, theirs: Stream, delay: Delay, copied: GraphAllocation
) -> None:
    delay.before(theirs)
    copy_on_device(copied.pointer, binding.view("x").pointer, NBYTES, stream=theirs)
    binding.write("x", floats(COUNT, 1), stream=theirs.handle)
    session.synchronize()
    assert np.array_equal(seen(copied.pointer, theirs), floats(COUNT))
    assert np.array_equal(binding.read("x"), floats(COUNT, 1))


def test_a_write_comes_before_what_the_callers_stream_gets_next(
    session: Session, binding: Binding, theirs: Stream, delay: Delay
) -> None:
    delay.before(backend_of(session).stream)
    binding.write("x", floats(COUNT, 1), stream=theirs.handle)
    assert np.array_equal(seen(binding.view("x").pointer, theirs), floats(COUNT, 1))


def test_a_read_sees_what_the_callers_stream_wrote(
    session: Session, binding: Binding, theirs: Stream, delay: Delay
) -> None:
    delay.before(theirs)
    fill_bytes(binding.view("y").pointer, 1, NBYTES, stream=theirs)
    assert np.array_equal(binding.read("y", stream=theirs.handle), ONES)


def test_ordering_keeps_nothing(rig: Rig, session: Session, theirs: Stream) -> None:
    with bound(session, COUNT) as binding:
        session.run(binding, stream=theirs.handle)
        session.step(binding, stream=theirs.handle)
        session.synchronize()
        before = rig.figures()
        for _ in range(200):
            session.step(binding, stream=theirs.handle)
            session.run(binding, stream=theirs.handle)
            binding.read("y", stream=theirs.handle)
        assert rig.figures() == before
