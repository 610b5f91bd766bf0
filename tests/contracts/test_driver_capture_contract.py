"""Check what the driver answers about captures and graphs, on a card and on its test double.

The tables are what an H200 with driver 580.159 did, 2026-11-30; see test_driver_contract.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nxrt.errors import DriverError
from tests.helpers.driver_world import World, api, call, code_of, contract_cubin, in_thread

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

LOST = 901
UNSUPPORTED = 900
NONE, ACTIVE, INVALIDATED = 0, 1, 2


@dataclass(frozen=True)
class Scene:
    """What the calls of the tables are made with; `captured` is the stream being recorded."""

    world: World
    captured: Any
    other: Any
    event: Any
    word: int
    pinned: int
    graph: Any
    executable: Any
    host: Any

    def launch(self, stream: Any) -> int:
        return self.world.launch(stream, "fake_increment", self.word)

    def created(self, create: Any, destroy: Any, *args: Any) -> int:
        """Create and destroy; return the first code that is not 0."""
        try:
            made = call(create, *args)
        except DriverError as error:
            return error.code
        return code_of(destroy, made)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    is_fake = request.config.getoption("--fake-driver")
    fake = request.getfixturevalue("fake_driver") if is_fake else None
    with World(fake) as world:
        word = world.word()
        graph = world.graph(lambda stream: world.launch(stream, "fake_increment", word))
        other, event = world.stream(), world.event()
        call(api.cuEventRecord, event, other)
        call(api.cuStreamSynchronize, other)
        host = np.zeros(1, np.uint32)
        yield Scene(
            world=world,
            captured=world.stream(),
            other=other,
            event=event,
            word=word,
            pinned=world.pinned(4),
            graph=graph,
            executable=world.executable(graph),
            host=host,
        )


Action = Callable[[Scene], int]
CUBIN_ENTRY = b"fake_increment"


SURVIVED: dict[str, Action] = {
    "launch elsewhere": lambda s: s.launch(s.other),
    "launch on the legacy stream": lambda s: s.launch(0),
    "replay elsewhere": lambda s: code_of(api.cuGraphLaunch, s.executable, s.other),
    "page-locked copy elsewhere": lambda s: code_of(
        api.cuMemcpyHtoDAsync, s.word, s.pinned, 4, s.other
    ),
    "pageable copy elsewhere": lambda s: code_of(
        api.cuMemcpyHtoDAsync, s.word, s.host.ctypes.data, 4, s.other
    ),
    "pageable copy to device": lambda s: code_of(
        api.cuMemcpyHtoDAsync, s.word, s.host.ctypes.data, 4, s.captured
    ),
    "pageable copy to host": lambda s: code_of(
        api.cuMemcpyDtoHAsync, s.host.ctypes.data, s.word, 4, s.captured
    ),
    "synchronous copy": lambda s: code_of(api.cuMemcpyHtoD, s.word, s.host.ctypes.data, 4),
    "fill elsewhere": lambda s: code_of(api.cuMemsetD8Async, s.word, 0, 4, s.other),
    "record elsewhere": lambda s: code_of(api.cuEventRecord, s.event, s.other),
    "wait elsewhere": lambda s: code_of(api.cuStreamWaitEvent, s.other, s.event, 0),
    "update": lambda s: code_of(api.cuGraphExecUpdate, s.executable, s.graph),
    "upload elsewhere": lambda s: code_of(api.cuGraphUpload, s.executable, s.other),
    "create and destroy a stream": lambda s: s.created(api.cuStreamCreate, api.cuStreamDestroy, 1),
    "create and destroy an event": lambda s: s.created(api.cuEventCreate, api.cuEventDestroy, 0),
    "memory's state": lambda _: code_of(api.cuMemGetInfo),
    "find a function": lambda s: code_of(
        api.cuModuleGetFunction, s.world.module, CUBIN_ENTRY
    ),
    "push and pop": lambda s: (
        code_of(api.cuCtxPushCurrent, s.world.context) or code_of(api.cuCtxPopCurrent)
    ),
    "retain and release": lambda s: (
        code_of(api.cuDevicePrimaryCtxRetain, s.world.device)
        or code_of(api.cuDevicePrimaryCtxRelease, s.world.device)
    ),
}  # fmt: skip

BROKEN: dict[str, Action] = {
    "replay into the capture": lambda s: code_of(api.cuGraphLaunch, s.executable, s.captured),
    "query an event": lambda s: code_of(api.cuEventQuery, s.event),
    "synchronize an event": lambda s: code_of(api.cuEventSynchronize, s.event),
    "query another stream": lambda s: code_of(api.cuStreamQuery, s.other),
    "synchronize another stream": lambda s: code_of(api.cuStreamSynchronize, s.other),
    "query the stream": lambda s: code_of(api.cuStreamQuery, s.captured),
    "synchronize the stream": lambda s: code_of(api.cuStreamSynchronize, s.captured),
    "ask for the stream's device": lambda s: code_of(api.cuStreamGetDevice, s.captured),
    "synchronize the context": lambda _: code_of(api.cuCtxSynchronize),
    "instantiate": lambda s: code_of(api.cuGraphInstantiate, s.graph, 0),
    "allocate": lambda _: code_of(api.cuMemAlloc, 4),
    "allocate page-locked": lambda _: code_of(api.cuMemAllocHost, 4),
    "allocate on another stream": lambda s: code_of(api.cuMemAllocAsync, 4, s.other),
}

FROM_ANOTHER_THREAD: dict[str, Action] = {
    "launch": lambda s: s.launch(s.other),
    "launch on the legacy stream": lambda s: in_context(s, lambda: s.launch(0)),
    "allocate and free": lambda s: in_context(
        s, lambda: s.created(api.cuMemAlloc, api.cuMemFree, 4)
    ),
    "allocate and free page-locked": lambda s: in_context(
        s, lambda: s.created(api.cuMemAllocHost, api.cuMemFreeHost, 4)
    ),
    "load and unload": lambda s: in_context(
        s, lambda: s.created(api.cuModuleLoadData, api.cuModuleUnload, contract_cubin())
    ),
    "instantiate and destroy": lambda s: in_context(
        s, lambda: s.created(api.cuGraphInstantiate, api.cuGraphExecDestroy, s.graph, 0)
    ),
    "synchronize another stream": lambda s: code_of(api.cuStreamSynchronize, s.other),
    "synchronize an event": lambda s: code_of(api.cuEventSynchronize, s.event),
    "query an event": lambda s: code_of(api.cuEventQuery, s.event),
    "synchronous copy": lambda s: in_context(
        s, lambda: code_of(api.cuMemcpyHtoD, s.word, s.host.ctypes.data, 4)
    ),
}

BROKEN_FROM_ANOTHER_THREAD: dict[str, Action] = {
    "synchronize the stream": lambda s: code_of(api.cuStreamSynchronize, s.captured),
    "query the stream": lambda s: code_of(api.cuStreamQuery, s.captured),
    "replay into the capture": lambda s: code_of(api.cuGraphLaunch, s.executable, s.captured),
    "synchronize the context": lambda s: in_context(s, lambda: code_of(api.cuCtxSynchronize)),
}


def in_context(scene: Scene, action: Callable[[], int]) -> int:
    call(api.cuCtxPushCurrent, scene.world.context)
    try:
        return action()
    finally:
        call(api.cuCtxPopCurrent)


def cases(table: dict[str, Action]) -> list[Any]:
    return [pytest.param(action, id=name.replace(" ", "-")) for name, action in table.items()]


def check_survived(scene: Scene, *, num_nodes: int) -> None:
    """The capture is active, ends in a graph, and the graph runs."""
    world = scene.world
    assert world.status(scene.captured) == ACTIVE
    graph = world.end(scene.captured)
    assert call(api.cuGraphGetNodes, graph, 0)[1] == num_nodes
    executable = world.executable(graph)
    call(api.cuMemsetD32Async, scene.word, 0, 1, scene.captured)
    call(api.cuGraphLaunch, executable, scene.captured)
    call(api.cuStreamSynchronize, scene.captured)


def check_lost(scene: Scene) -> None:
    """The capture is invalid until it is ended, and the stream is usable again afterwards."""
    world = scene.world
    assert world.status(scene.captured) == INVALIDATED
    assert scene.launch(scene.captured) == LOST
    assert code_of(api.cuStreamEndCapture, scene.captured) == LOST
    assert world.status(scene.captured) == NONE
    call(api.cuMemsetD32Async, scene.word, 0, 1, scene.captured)
    assert scene.launch(scene.captured) == 0
    assert world.read(scene.word) == [1]


@pytest.mark.parametrize("action", cases(SURVIVED))
def test_a_capture_survives_on_its_own_thread(scene: Scene, action: Action) -> None:
    scene.world.begin(scene.captured)
    assert scene.launch(scene.captured) == 0
    assert action(scene) == 0
    recorded = (SURVIVED["pageable copy to device"], SURVIVED["pageable copy to host"])
    check_survived(scene, num_nodes=2 if action in recorded else 1)


@pytest.mark.parametrize("action", cases(BROKEN))
def test_a_capture_is_lost_on_its_own_thread(scene: Scene, action: Action) -> None:
    scene.world.begin(scene.captured)
    assert scene.launch(scene.captured) == 0
    assert action(scene) == UNSUPPORTED
    check_lost(scene)


@pytest.mark.parametrize(
    ("create", "destroy", "args"),
    [
        pytest.param(api.cuMemAlloc, api.cuMemFree, (4,), id="memory"),
        pytest.param(api.cuMemAllocHost, api.cuMemFreeHost, (4,), id="page-locked memory"),
        pytest.param(api.cuModuleLoadData, api.cuModuleUnload, None, id="module"),
        pytest.param(api.cuGraphInstantiate, api.cuGraphExecDestroy, None, id="executable"),
    ],
)
def test_releasing_loses_a_capture_on_its_own_thread(
    scene: Scene, create: Any, destroy: Any, args: Any
) -> None:
    if create is api.cuModuleLoadData:
        args = (contract_cubin(),)
    made = call(create, *(args or (scene.graph, 0)))
    scene.world.begin(scene.captured)
    assert code_of(destroy, made) == UNSUPPORTED
    check_lost(scene)
    assert code_of(destroy, made) == 0


def test_loading_a_module_and_destroying_a_graph_leave_a_capture_alone(scene: Scene) -> None:
    spare = call(api.cuGraphCreate, 0)
    scene.world.begin(scene.captured)
    module = call(api.cuModuleLoadData, contract_cubin())
    assert code_of(api.cuModuleGetFunction, module, CUBIN_ENTRY) == 0
    assert code_of(api.cuGraphDestroy, spare) == 0
    check_survived(scene, num_nodes=0)
    call(api.cuModuleUnload, module)


def test_waiting_for_an_event_of_outside_loses_a_capture(scene: Scene) -> None:
    scene.world.begin(scene.captured)
    assert code_of(api.cuStreamWaitEvent, scene.captured, scene.event, 0) == 905
    check_lost(scene)


def test_a_refused_launch_loses_a_capture(scene: Scene) -> None:
    scene.world.begin(scene.captured)
    refused = scene.world.launch(scene.captured, "fake_increment", scene.word, grid=(0, 1, 1))
    assert refused == 1
    check_lost(scene)


@pytest.mark.parametrize("action", cases(FROM_ANOTHER_THREAD))
def test_a_capture_survives_other_threads(scene: Scene, action: Action) -> None:
    scene.world.begin(scene.captured)
    assert scene.launch(scene.captured) == 0
    assert in_thread(lambda: action(scene)) == 0
    check_survived(scene, num_nodes=1)


@pytest.mark.parametrize("action", cases(BROKEN_FROM_ANOTHER_THREAD))
def test_a_capture_is_lost_to_another_thread(scene: Scene, action: Action) -> None:
    scene.world.begin(scene.captured)
    assert in_thread(lambda: action(scene)) == UNSUPPORTED
    check_lost(scene)


def test_another_thread_may_launch_into_a_capture(scene: Scene) -> None:
    scene.world.begin(scene.captured)
    assert scene.launch(scene.captured) == 0
    assert in_thread(lambda: scene.launch(scene.captured)) == 0
    check_survived(scene, num_nodes=2)
    assert scene.world.read(scene.word) == [2]


def test_a_capture_that_another_thread_ends_is_over(scene: Scene) -> None:
    scene.world.begin(scene.captured)
    assert in_thread(lambda: code_of(api.cuStreamEndCapture, scene.captured)) == 908
    assert scene.world.status(scene.captured) == NONE
    assert code_of(api.cuStreamEndCapture, scene.captured) == 401
    assert scene.launch(scene.captured) == 0


def test_beginning_twice_and_ending_what_is_not_captured_are_illegal(scene: Scene) -> None:
    mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    scene.world.begin(scene.captured)
    assert code_of(api.cuStreamBeginCapture, scene.captured, mode) == 401
    assert code_of(api.cuStreamEndCapture, scene.other) == 401
    check_survived(scene, num_nodes=0)


def test_two_streams_are_captured_at_once(scene: Scene) -> None:
    scene.world.begin(scene.captured)
    scene.world.begin(scene.other)
    assert scene.launch(scene.other) == 0
    assert call(api.cuGraphGetNodes, scene.world.end(scene.other), 0)[1] == 1
    check_survived(scene, num_nodes=0)
