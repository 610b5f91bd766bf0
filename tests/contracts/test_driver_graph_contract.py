"""Check what the driver makes of captured graphs: their nodes, their replays and their updates.

On a card and on its test double; see test_driver_contract.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.driver_world import World, api, call, code_of

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

NOT_READY = 600
REFUSED_UPDATE = 910
KERNEL, COPY, FILL, CHILD = 0, 1, 2, 4


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    is_fake = request.config.getoption("--fake-driver")
    fake = request.getfixturevalue("fake_driver") if is_fake else None
    with World(fake) as opened:
        yield opened


def types_of(graph: Any) -> list[int]:
    count = call(api.cuGraphGetNodes, graph, 0)[1]
    nodes = call(api.cuGraphGetNodes, graph, count)[0] if count else []
    return [int(call(api.cuGraphNodeGetType, node)) for node in nodes]


def replay(world: World, executable: Any, times: int = 1) -> None:
    stream = world.stream()
    for _ in range(times):
        call(api.cuGraphLaunch, executable, stream)


def adding(world: World, word: int, value: int) -> Callable[[Any], int]:
    return lambda stream: world.launch(stream, "fake_add", word, value)


# What a capture records


def test_nothing_runs_until_the_replay_and_everything_at_each(world: World) -> None:
    word = world.word(1)
    executable = world.executable(world.graph(adding(world, word, 5)))
    assert world.read(word) == [1]
    replay(world, executable, times=3)
    assert world.read(word) == [16]


def test_each_kind_of_work_is_a_node_in_order(world: World) -> None:
    word, other, (pinned, received) = world.word(), world.word(), world.pinned_word()

    def record(stream: Any) -> None:
        call(api.cuMemsetD32Async, word, 4, 1, stream)
        world.launch(stream, "fake_increment", word)
        call(api.cuMemcpyDtoDAsync, other, word, 4, stream)
        call(api.cuMemcpyDtoHAsync, pinned, other, 4, stream)

    graph = world.graph(record)
    assert sorted(types_of(graph)) == [KERNEL, COPY, COPY, FILL]
    replay(world, world.executable(graph))
    assert world.read(other) == [5]
    assert received[0] == 5


def test_an_empty_capture_is_an_empty_graph_that_runs(world: World) -> None:
    graph = world.graph()
    assert int(graph) != 0
    assert types_of(graph) == []
    replay(world, world.executable(graph))


def test_arguments_are_those_of_the_launch(world: World) -> None:
    word = world.word()
    values = np.array([word, 3], np.uint64)
    addresses = values.ctypes.data + np.arange(2, dtype=np.uint64) * np.uint64(8)
    shape = (1, 1, 1, 1, 1, 1, 0)

    def record(stream: Any) -> None:
        function = world.function("fake_add")
        call(api.cuLaunchKernel, function, *shape, stream, addresses.ctypes.data, 0)
        values[1] = 99

    replay(world, world.executable(world.graph(record)))
    assert world.read(word) == [3]


def test_a_page_locked_source_is_read_at_each_replay(world: World) -> None:
    word, (pinned, source) = world.word(), world.pinned_word()
    executable = world.executable(
        world.graph(lambda stream: call(api.cuMemcpyHtoDAsync, word, pinned, 4, stream))
    )
    for value in (5, 6):
        source[0] = value
        replay(world, executable)
        assert world.read(word) == [value]


def test_a_forked_and_joined_stream_is_part_of_the_capture(world: World) -> None:
    main, side = world.stream(), world.stream()
    fork, join, word, other = world.event(2), world.event(2), world.word(), world.word()
    world.begin(main)
    world.launch(main, "fake_increment", word)
    call(api.cuEventRecord, fork, main)
    call(api.cuStreamWaitEvent, side, fork, 0)
    assert world.status(side) == 1
    world.launch(side, "fake_increment", other)
    call(api.cuEventRecord, join, side)
    call(api.cuStreamWaitEvent, main, join, 0)
    graph = world.end(main)
    assert world.status(side) == 0
    replay(world, world.executable(graph))
    assert types_of(graph) == [KERNEL, KERNEL]
    assert world.read(word) + world.read(other) == [1, 1]


def test_a_capture_with_an_unjoined_stream_fails(world: World) -> None:
    main, side, fork, word = world.stream(), world.stream(), world.event(2), world.word()
    world.begin(main)
    call(api.cuEventRecord, fork, main)
    call(api.cuStreamWaitEvent, side, fork, 0)
    world.launch(side, "fake_increment", word)
    assert code_of(api.cuStreamEndCapture, main) == 904
    assert world.status(main) == world.status(side) == 0


# Executables


def test_an_executable_outlives_its_graph(world: World) -> None:
    word, stream = world.word(), world.stream()
    world.begin(stream)
    world.launch(stream, "fake_increment", word)
    graph = call(api.cuStreamEndCapture, stream)
    executable = world.executable(graph)
    call(api.cuGraphDestroy, graph)
    replay(world, executable, times=2)
    assert world.read(word) == [2]


def test_a_destroyed_executable_finishes_what_was_launched(world: World) -> None:
    word, stream, event = world.word(), world.stream(), world.event()
    graph = world.graph(adding(world, word, 5))
    executable = call(api.cuGraphInstantiate, graph, 0)
    world.keep_busy(stream)
    call(api.cuGraphLaunch, executable, stream)
    call(api.cuEventRecord, event, stream)
    call(api.cuGraphExecDestroy, executable)
    assert code_of(api.cuEventQuery, event) == NOT_READY
    assert world.read(word) == [5]


def test_a_graph_inside_another_runs_with_it(world: World) -> None:
    word = world.word()
    child = world.graph(adding(world, word, 5))
    graph = world.graph(adding(world, word, 1))
    nodes = call(api.cuGraphGetNodes, graph, 1)[0]
    call(api.cuGraphAddChildGraphNode, graph, nodes, 1, child)
    assert sorted(types_of(graph)) == [KERNEL, CHILD]
    replay(world, world.executable(graph))
    assert world.read(word) == [6]


def test_a_replay_takes_its_place_in_the_stream(world: World) -> None:
    word, stream = world.word(), world.stream()
    executable = world.executable(world.graph(adding(world, word, 5)))
    world.keep_busy(stream)
    call(api.cuMemsetD32Async, word, 10, 1, stream)
    call(api.cuGraphLaunch, executable, stream)
    world.launch(stream, "fake_increment", word)
    assert world.read(word) == [16]


def test_uploading_changes_nothing(world: World) -> None:
    word, stream = world.word(), world.stream()
    executable = world.executable(world.graph(adding(world, word, 5)))
    call(api.cuGraphUpload, executable, stream)
    assert world.read(word) == [0]
    call(api.cuGraphLaunch, executable, stream)
    assert world.read(word) == [5]


# Updates


def test_an_update_takes_other_values_addresses_grids_and_functions(world: World) -> None:
    first, second = world.word(), world.word()
    executable = world.executable(world.graph(adding(world, first, 5)))
    records: list[tuple[Callable[[Any], int], list[int]]] = [
        (adding(world, first, 7), [7, 0]),
        (adding(world, second, 9), [7, 9]),
        (lambda s: world.launch(s, "fake_count", first, grid=(3, 1, 1)), [10, 9]),
        (lambda s: world.launch(s, "fake_increment", second), [10, 10]),
    ]
    for record, expected in records:
        call(api.cuGraphExecUpdate, executable, world.graph(record))
        replay(world, executable)
        assert world.read(first) + world.read(second) == expected


def test_an_update_to_another_shape_is_refused_and_changes_nothing(world: World) -> None:
    word = world.word()
    executable = world.executable(world.graph(adding(world, word, 5)))

    def twice(stream: Any) -> None:
        adding(world, word, 1)(stream)
        adding(world, word, 1)(stream)

    others = [
        world.graph(twice),
        world.graph(),
        world.graph(lambda stream: call(api.cuMemsetD32Async, word, 0, 1, stream)),
    ]
    for other in others:
        assert code_of(api.cuGraphExecUpdate, executable, other) == REFUSED_UPDATE
    replay(world, executable)
    assert world.read(word) == [5]


def test_an_update_takes_other_copies_and_fills(world: World) -> None:
    first, second = world.word(1), world.word(2)

    def record(value: int, source: int, target: int) -> Callable[[Any], None]:
        def enqueue(stream: Any) -> None:
            call(api.cuMemsetD32Async, source, value, 1, stream)
            call(api.cuMemcpyDtoDAsync, target, source, 4, stream)

        return enqueue

    executable = world.executable(world.graph(record(5, first, second)))
    call(api.cuGraphExecUpdate, executable, world.graph(record(6, second, first)))
    replay(world, executable)
    assert world.read(first) + world.read(second) == [6, 6]


def test_an_update_leaves_what_was_launched_before_alone(world: World) -> None:
    word, stream = world.word(), world.stream()
    executable = world.executable(world.graph(adding(world, word, 5)))
    other = world.graph(adding(world, word, 100))
    world.keep_busy(stream)
    call(api.cuGraphLaunch, executable, stream)
    call(api.cuGraphExecUpdate, executable, other)
    call(api.cuStreamSynchronize, stream)
    assert world.read(word) == [5]
    replay(world, executable)
    assert world.read(word) == [105]


def test_an_executable_takes_the_changed_parameters_of_one_node(world: World) -> None:
    word = world.word()
    graph = world.graph(adding(world, word, 5))
    executable = world.executable(graph)
    node = call(api.cuGraphGetNodes, graph, 1)[0][0]
    params = call(api.cuGraphKernelNodeGetParams, node)
    assert (params.gridDimX, params.blockDimX, params.sharedMemBytes) == (1, 1, 0)
    params.gridDimX = 2
    params.func = world.function("fake_count")
    call(api.cuGraphExecKernelNodeSetParams, executable, node, params)
    replay(world, executable)
    assert world.read(word) == [2]
