"""A writer and readers on two streams: nobody sees half a step, memory waits for its readers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from nxrt import Binding, DType, Role, Session, TensorView
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime.device_memory import copy_on_device, copy_to_host, fill_bytes
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.stream import Stream
from tests.helpers.cuda_toys import toy_node
from tests.helpers.graph_rig import Delay, Floats, Rig, backend_of, bound, floats
from tests.helpers.targets import MAX_REPEATS, POISON

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

TOKENS = 3000
NBYTES = 4 * TOKENS
STEPS = min(500, MAX_REPEATS)
APPENDING = (
    toy_node("Append", "x", output="state", name="append"),
    toy_node("Scale", "state", output="selected", name="select", factor=5.0),
)


@pytest.fixture
def theirs(rig: Rig) -> Iterator[Stream]:
    """Return the second stream, which only its handle is known of."""
    with Stream(rig.device) as stream:
        yield stream
        stream.synchronize()


@pytest.fixture
def session(rig: Rig) -> Iterator[Session]:
    with rig.session(APPENDING) as session:
        yield session


def allocate(session: Session, nbytes: int = NBYTES) -> GraphAllocation:
    return backend_of(session).allocate(nbytes, role=Role.STATE_GROUP, holder="checkpoint")


def fetched(pointer: int, stream: Stream) -> Floats:
    array = np.empty(TOKENS, np.float32)
    copy_to_host(array, pointer, stream=stream)
    stream.synchronize()
    return array


def run(session: Session, binding: Binding, stream: int) -> None:
    session.run(binding, stream=stream)


def step(session: Session, binding: Binding, stream: int) -> None:
    session.step(binding, stream=stream)


@pytest.mark.parametrize("execute", [run, step])
def test_checkpoints_on_one_stream_are_whole_while_another_appends(
    rig: Rig, session: Session, theirs: Stream, execute: Callable[[Session, Binding, int], None]
) -> None:
    with ExitStack() as undo:
        binding = undo.enter_context(bound(session, TOKENS))
        checkpoints = undo.enter_context(allocate(session, STEPS * NBYTES))
        state, one = binding.view("state"), floats(TOKENS)
        fill_bytes(state.pointer, 0, NBYTES, stream=backend_of(session).stream)
        session.run(binding)
        session.step(binding)
        done = 2
        delay = undo.enter_context(Delay(session, rig.fake))
        for number in range(STEPS):
            delay.before(backend_of(session).stream if number % 2 else theirs)
            execute(session, binding, theirs.handle)
            target = checkpoints.pointer + number * NBYTES
            copy_on_device(target, state.pointer, NBYTES, stream=theirs)
            if number % 50 == 0:
                selected = binding.read("selected", stream=theirs.handle)
                assert np.array_equal(selected, 5 * (done + number + 1) * one)
        for number in range(STEPS):
            saved = fetched(checkpoints.pointer + number * NBYTES, theirs)
            assert np.array_equal(saved, (done + number + 1) * one)
        assert np.array_equal(binding.read("state"), (done + STEPS) * one)
        assert session.step_stats.replays == 1 + (STEPS if execute is step else 0)


def test_a_checkpoint_is_restored_in_order(rig: Rig, session: Session, theirs: Stream) -> None:
    """The way back: the caller's stream writes the state, the session's appends to it."""
    with ExitStack() as undo:
        binding = undo.enter_context(bound(session, TOKENS))
        saved = undo.enter_context(allocate(session))
        state, one = binding.view("state"), floats(TOKENS)
        fill_bytes(state.pointer, 0, NBYTES, stream=backend_of(session).stream)
        session.run(binding)
        session.step(binding, stream=theirs.handle)
        copy_on_device(saved.pointer, state.pointer, NBYTES, stream=theirs)
        delay = undo.enter_context(Delay(session, rig.fake))
        for _ in range(20):
            session.step(binding, stream=theirs.handle)
            delay.before(theirs)
            copy_on_device(state.pointer, saved.pointer, NBYTES, stream=theirs)
            session.step(binding, stream=theirs.handle)
            assert np.array_equal(binding.read("state"), 3 * one)


def overwrite_what_is_free(
    backend: CudaProviderSession, elsewhere: Stream, undo: ExitStack
) -> None:
    """Take blocks of the size of a value, and fill them on a stream that waits for nobody."""
    for _ in range(20):
        block = backend.allocate(NBYTES, role=Role.ACTIVATION, holder="next")
        undo.callback(block.close)
        fill_bytes(block.pointer, POISON, NBYTES, stream=elsewhere)


def test_memory_is_not_handed_out_while_another_stream_reads_it(
    rig: Rig, session: Session, theirs: Stream
) -> None:
    for _ in range(5):
        with ExitStack() as undo:
            copied = undo.enter_context(allocate(session))
            binding = bound(session, TOKENS)
            view = binding.view("state")
            fill_bytes(view.pointer, 0, NBYTES, stream=backend_of(session).stream)
            session.run(binding, stream=theirs.handle)
            delay = undo.enter_context(Delay(session, rig.fake))
            delay.before(theirs)
            copy_on_device(copied.pointer, view.pointer, NBYTES, stream=theirs)
            binding.close()
            elsewhere = undo.enter_context(Stream(rig.device))
            overwrite_what_is_free(backend_of(session), elsewhere, undo)
            elsewhere.synchronize()
            assert np.array_equal(fetched(copied.pointer, theirs), floats(TOKENS))


@pytest.mark.parametrize("is_owner_closed", [False, True], ids=["owner open", "owner closed"])
def test_memory_of_one_session_is_not_handed_out_while_another_reads_it(
    rig: Rig, session: Session, is_owner_closed: bool
) -> None:
    with ExitStack() as undo:
        owner = undo.enter_context(rig.session(APPENDING))
        made = bound(owner, TOKENS)
        owner.synchronize()
        state = TensorView(undo.enter_context(allocate(session)), DType.F32, (TOKENS,))
        backend = backend_of(session)
        fill_bytes(state.pointer, 0, NBYTES, stream=backend.stream)
        reader = session.bind({"N": TOKENS}, views={"x": made.view("x"), "state": state})
        delay = undo.enter_context(Delay(session, rig.fake))
        delay.before(backend.stream)
        session.run(reader)
        made.close()
        if is_owner_closed:
            owner.close()
        reader.close()
        with Stream(rig.device) as elsewhere:
            overwrite_what_is_free(backend, elsewhere, undo)
            read = np.empty(TOKENS, np.float32)
            backend.download(read, state)
            assert np.array_equal(read, floats(TOKENS))
            elsewhere.synchronize()
