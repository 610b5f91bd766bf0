"""Check what the driver answers: the rules nxrt rests on, on a card and on its test double.

What the double must do is what a card does, so a test here may be changed only for what a card was
seen to do. What would crash or poison a real context is in tests/fake_driver instead.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.driver_world import World, api, call, code_of, contract_cubin, in_thread

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_READY = 600


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    is_fake = request.config.getoption("--fake-driver")
    fake = request.getfixturevalue("fake_driver") if is_fake else None
    with World(fake) as opened:
        yield opened


# Contexts


def test_push_and_pop_keep_the_order(world: World) -> None:
    call(api.cuCtxPushCurrent, world.context)
    assert int(call(api.cuCtxPopCurrent)) == int(world.context)
    assert int(call(api.cuCtxGetCurrent)) == int(world.context)


def test_popping_an_empty_stack_is_an_invalid_context(world: World) -> None:
    assert in_thread(lambda: code_of(api.cuCtxPopCurrent)) == 201


def test_a_new_thread_has_no_context(world: World) -> None:
    assert in_thread(lambda: int(call(api.cuCtxGetCurrent))) == 0


def test_a_primary_context_is_the_same_for_every_user(world: World) -> None:
    assert int(call(api.cuDevicePrimaryCtxRetain, world.device)) == int(world.context)
    call(api.cuDevicePrimaryCtxRelease, world.device)
    assert call(api.cuDevicePrimaryCtxGetState, world.device)[1] == 1


def test_a_created_context_is_current_until_destroyed(world: World) -> None:
    context = call(api.cuCtxCreate, None, 0, world.device)
    assert int(call(api.cuCtxGetCurrent)) == int(context)
    call(api.cuCtxDestroy, context)
    assert int(call(api.cuCtxGetCurrent)) == int(world.context)


def test_work_needs_no_current_context(world: World) -> None:
    stream, event, word = world.stream(), world.event(), world.word()
    pinned = world.pinned(4)
    graph = world.graph(lambda s: world.launch(s, "fake_increment", word))
    executable = world.executable(graph)

    def answers() -> dict[str, int]:
        return {
            "launch": world.launch(stream, "fake_increment", word),
            "copy to host": code_of(api.cuMemcpyDtoHAsync, pinned, word, 4, stream),
            "copy to device": code_of(api.cuMemcpyHtoDAsync, word, pinned, 4, stream),
            "fill": code_of(api.cuMemsetD32Async, word, 1, 1, stream),
            "record": code_of(api.cuEventRecord, event, stream),
            "wait": code_of(api.cuStreamWaitEvent, stream, event, 0),
            "event synchronize": code_of(api.cuEventSynchronize, event),
            "event query": code_of(api.cuEventQuery, event),
            "stream synchronize": code_of(api.cuStreamSynchronize, stream),
            "stream query": code_of(api.cuStreamQuery, stream),
            "update": code_of(api.cuGraphExecUpdate, executable, graph),
            "upload": code_of(api.cuGraphUpload, executable, stream),
            "replay": code_of(api.cuGraphLaunch, executable, stream),
            "begin": code_of(api.cuStreamBeginCapture, stream, api.CUstreamCaptureMode(1)),
            "end": code_of(api.cuStreamEndCapture, stream),
            "stream's context": code_of(api.cuStreamGetCtx, stream),
        }

    refused = {name: code for name, code in in_thread(answers).items() if code}
    assert refused == {}
    assert world.read(word) == [2]


def test_creating_needs_a_current_context(world: World) -> None:
    graph = world.graph()

    def answers() -> set[int]:
        return {
            code_of(api.cuStreamCreate, 0),
            code_of(api.cuEventCreate, 0),
            code_of(api.cuMemAlloc, 4),
            code_of(api.cuMemAllocHost, 4),
            code_of(api.cuModuleLoadData, contract_cubin()),
            code_of(api.cuGraphInstantiate, graph, 0),
            code_of(api.cuMemGetInfo),
        }

    assert in_thread(answers) == {201}


def test_destroying_needs_no_current_context(world: World) -> None:
    graph = world.graph()
    made = [
        (api.cuStreamDestroy, call(api.cuStreamCreate, 1)),
        (api.cuEventDestroy, call(api.cuEventCreate, 0)),
        (api.cuMemFree, call(api.cuMemAlloc, 4)),
        (api.cuMemFreeHost, call(api.cuMemAllocHost, 4)),
        (api.cuModuleUnload, call(api.cuModuleLoadData, contract_cubin())),
        (api.cuGraphExecDestroy, call(api.cuGraphInstantiate, graph, 0)),
    ]
    assert in_thread(lambda: [code_of(*each) for each in made]) == [0] * len(made)


def test_streams_know_their_context_and_device(world: World) -> None:
    stream = world.stream()
    assert int(call(api.cuStreamGetDevice, stream)) == int(world.device)
    assert int(call(api.cuStreamGetCtx, stream)) == int(world.context)


def test_a_forked_child_is_not_initialised(world: World) -> None:
    child = os.fork()
    if child == 0:
        # Past nxrt's own guard: what the driver says is asked.
        codes = {int(api.cuCtxGetCurrent()[0]), int(api.cuInit(0)[0]), int(api.cuMemAlloc(4)[0])}
        os._exit(0 if codes == {3} else 1)
    assert os.waitpid(child, 0)[1] == 0


# Memory


def test_addresses_are_aligned_and_contents_are_copied(world: World) -> None:
    source, target = world.memory(256), world.memory(256)
    assert source % 256 == target % 256 == 0
    stream = world.stream()
    sent, received = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    call(api.cuMemcpyHtoDAsync, source, sent.ctypes.data, 256, stream)
    call(api.cuMemcpyDtoDAsync, target, source, 256, stream)
    call(api.cuMemcpyDtoHAsync, received.ctypes.data, target, 256, stream)
    call(api.cuStreamSynchronize, stream)
    assert received.tolist() == sent.tolist()


def test_fills_write_whole_elements(world: World) -> None:
    memory, stream = world.memory(16), world.stream()
    call(api.cuMemsetD8Async, memory, 0x5A, 16, stream)
    call(api.cuMemsetD32Async, memory + 4, 7, 2, stream)
    assert world.read(memory, 4) == [0x5A5A5A5A, 7, 7, 0x5A5A5A5A]


def test_empty_copies_and_fills_do_nothing(world: World) -> None:
    word, stream = world.word(3), world.stream()
    call(api.cuMemsetD8Async, word, 0, 0, stream)
    call(api.cuMemcpyDtoDAsync, word, word, 0, stream)
    assert world.read(word) == [3]


def test_a_pageable_source_may_change_when_the_call_returns(world: World) -> None:
    word, stream = world.word(), world.stream()
    world.keep_busy(stream)
    source = np.array([5], np.uint32)
    call(api.cuMemcpyHtoDAsync, word, source.ctypes.data, 4, stream)
    source[0] = 6
    assert world.read(word) == [5]


def test_a_pageable_target_is_written_when_the_call_returns(world: World) -> None:
    word, stream = world.word(5), world.stream()
    world.keep_busy(stream)
    target = np.zeros(1, np.uint32)
    call(api.cuMemcpyDtoHAsync, target.ctypes.data, word, 4, stream)
    assert target[0] == 5


def test_page_locked_memory_is_read_when_the_copy_runs(world: World) -> None:
    word, stream, (pinned, source) = world.word(), world.stream(), world.pinned_word()
    source[0] = 5
    world.keep_busy(stream)
    call(api.cuMemcpyHtoDAsync, word, pinned, 4, stream)
    source[0] = 6
    assert world.read(word) == [6]


def test_impossible_allocations_are_refused(world: World) -> None:
    assert code_of(api.cuMemAlloc, 0) == INVALID_VALUE
    assert code_of(api.cuMemAlloc, 1 << 50) == OUT_OF_MEMORY
    assert world.memory(4096)


def test_free_memory_is_within_the_total(world: World) -> None:
    free, total = call(api.cuMemGetInfo)
    assert 0 < free <= total


def test_freeing_waits_for_enqueued_work(world: World) -> None:
    stream, event, other = world.stream(), world.event(), int(call(api.cuMemAlloc, 4))
    world.keep_busy(stream)
    call(api.cuEventRecord, event, stream)
    assert code_of(api.cuEventQuery, event) == NOT_READY
    call(api.cuMemFree, other)
    assert code_of(api.cuEventQuery, event) == 0


# Modules and launches


def test_what_is_no_module_is_refused(world: World) -> None:
    assert code_of(api.cuModuleLoadData, b"no module" * 64) == 200
    assert code_of(api.cuModuleGetFunction, world.module, b"no_such_entry_point") == 500


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"grid": (0, 1, 1)}, id="empty-grid"),
        pytest.param({"block": (0, 1, 1)}, id="empty-block"),
        pytest.param({"block": (1025, 1, 1)}, id="1025-threads"),
        pytest.param({"block": (1024, 2, 1)}, id="2048-threads"),
        pytest.param({"grid": (1, 65536, 1)}, id="tall-grid"),
        pytest.param({"shared_nbytes": 49153}, id="too-much-shared-memory"),
    ],
)
def test_impossible_launches_are_refused_at_the_call(world: World, shape: dict[str, Any]) -> None:
    word, stream = world.word(), world.stream()
    assert world.launch(stream, "fake_increment", word, **shape) == INVALID_VALUE
    assert world.launch(stream, "fake_increment", word) == 0
    assert world.read(word) == [1]


def test_every_thread_of_the_grid_runs(world: World) -> None:
    word = world.word()
    assert world.launch(world.stream(), "fake_count", word, grid=(3, 2, 1), block=(4, 1, 2)) == 0
    assert world.read(word) == [48]


def test_more_shared_memory_must_be_asked_for(world: World) -> None:
    word, stream, function = world.word(), world.stream(), world.function("fake_increment")
    attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call(api.cuFuncSetAttribute, function, attribute, 65536)
    assert call(api.cuFuncGetAttribute, attribute, function) == 65536
    assert world.launch(stream, "fake_increment", word, shared_nbytes=65536) == 0
    assert world.read(word) == [1]


# Streams and events


def test_a_stream_keeps_the_order_of_its_work(world: World) -> None:
    word, stream = world.word(), world.stream()
    world.keep_busy(stream)
    call(api.cuMemsetD32Async, word, 10, 1, stream)
    world.launch(stream, "fake_add", word, 5)
    call(api.cuMemsetD32Async, word, 1, 1, stream)
    world.launch(stream, "fake_increment", word)
    assert world.read(word) == [2]


def test_a_busy_stream_and_its_event_are_not_ready(world: World) -> None:
    stream, event = world.stream(), world.event()
    world.keep_busy(stream)
    call(api.cuEventRecord, event, stream)
    assert code_of(api.cuStreamQuery, stream) == NOT_READY
    assert code_of(api.cuEventQuery, event) == NOT_READY
    call(api.cuEventSynchronize, event)
    assert code_of(api.cuEventQuery, event) == 0
    assert code_of(api.cuStreamQuery, stream) == 0


def test_an_event_marks_the_work_before_it_and_no_more(world: World) -> None:
    first, second, event = world.stream(), world.stream(), world.event()
    call(api.cuEventRecord, event, first)
    world.keep_busy(first)
    call(api.cuStreamWaitEvent, second, event, 0)
    call(api.cuStreamSynchronize, second)
    call(api.cuEventSynchronize, event)
    assert code_of(api.cuStreamQuery, first) == NOT_READY


def test_waiting_for_an_event_orders_two_streams(world: World) -> None:
    first, second, event, word = world.stream(), world.stream(), world.event(), world.word(1)
    world.keep_busy(first)
    world.launch(first, "fake_add", word, 4)
    call(api.cuEventRecord, event, first)
    call(api.cuStreamWaitEvent, second, event, 0)
    call(api.cuMemsetD32Async, word, 9, 1, second)
    call(api.cuStreamSynchronize, second)
    assert code_of(api.cuEventQuery, event) == 0
    assert world.read(word) == [9]


def test_an_event_never_recorded_is_ready(world: World) -> None:
    event, stream = world.event(), world.stream()
    assert code_of(api.cuEventQuery, event) == 0
    assert code_of(api.cuEventSynchronize, event) == 0
    assert code_of(api.cuStreamWaitEvent, stream, event, 0) == 0


def test_an_event_recorded_again_marks_the_later_point(world: World) -> None:
    stream, event = world.stream(), world.event()
    call(api.cuEventRecord, event, stream)
    call(api.cuEventSynchronize, event)
    world.keep_busy(stream)
    call(api.cuEventRecord, event, stream)
    assert code_of(api.cuEventQuery, event) == NOT_READY


def test_elapsed_time_is_between_two_timed_and_reached_events(world: World) -> None:
    stream, start, end = world.stream(), world.event(), world.event()
    assert code_of(api.cuEventElapsedTime, start, end) == 400
    call(api.cuEventRecord, start, stream)
    world.keep_busy(stream)
    call(api.cuEventRecord, end, stream)
    assert code_of(api.cuEventElapsedTime, start, end) == NOT_READY
    call(api.cuStreamSynchronize, stream)
    assert call(api.cuEventElapsedTime, start, end) >= 0


def test_untimed_events_have_no_time(world: World) -> None:
    stream, start, end = world.stream(), world.event(2), world.event(2)
    call(api.cuEventRecord, start, stream)
    call(api.cuEventRecord, end, stream)
    call(api.cuStreamSynchronize, stream)
    assert code_of(api.cuEventElapsedTime, start, end) == 400


def test_destroying_a_stream_or_event_does_not_wait(world: World) -> None:
    stream, word, probe = call(api.cuStreamCreate, 1), world.word(), world.event()
    lost = call(api.cuEventCreate, 0)
    world.keep_busy(stream)
    world.launch(stream, "fake_increment", word)
    call(api.cuEventRecord, lost, stream)
    call(api.cuEventRecord, probe, stream)
    call(api.cuEventDestroy, lost)
    call(api.cuStreamDestroy, stream)
    assert code_of(api.cuEventQuery, probe) == NOT_READY
    assert world.read(word) == [1]
