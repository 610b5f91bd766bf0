"""Check the double where no card can be asked: misuse, planted faults, lost contexts, laziness.

What a card answers as well is in tests/contracts/test_driver_contract.py.
"""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.driver_world import World, api, call, code_of, contract_cubin, in_thread
from tests.helpers.fake_driver import FakeDriver, load

pytestmark = pytest.mark.fake


@pytest.fixture
def world(fake_driver: FakeDriver) -> Iterator[World]:
    with World(fake_driver) as opened:
        yield opened


# Misuse


def test_double_destroys_and_frees_are_violations(world: World, fake_driver: FakeDriver) -> None:
    graph = call(api.cuGraphCreate, 0)
    made = [
        (api.cuStreamDestroy, call(api.cuStreamCreate, 1), 400),
        (api.cuEventDestroy, call(api.cuEventCreate, 0), 400),
        (api.cuModuleUnload, call(api.cuModuleLoadData, contract_cubin()), 400),
        (api.cuGraphExecDestroy, call(api.cuGraphInstantiate, graph, 0), 400),
        (api.cuGraphDestroy, graph, 400),
        (api.cuMemFree, call(api.cuMemAlloc, 4), 1),
        (api.cuMemFreeHost, call(api.cuMemAllocHost, 4), 1),
    ]
    for destroy, handle, code in made:
        assert code_of(destroy, handle) == 0
        assert code_of(destroy, handle) == code
    violations = fake_driver.take_violations()
    assert len(violations) == len(made)
    assert violations[0] == "cuStreamDestroy: the stream was destroyed before"
    assert "was freed before" in violations[-1]


def test_a_handle_of_another_kind_and_none_at_all_are_violations(
    world: World, fake_driver: FakeDriver
) -> None:
    assert code_of(api.cuStreamSynchronize, int(world.event())) == 400
    assert code_of(api.cuStreamSynchronize, 12345) == 400
    assert fake_driver.take_violations() == [
        "cuStreamSynchronize: a handle of the wrong kind: event, not stream",
        "cuStreamSynchronize: 0x3039 is no stream",
    ]


def test_freed_memory_is_not_copied(world: World, fake_driver: FakeDriver) -> None:
    pointer, stream, host = int(call(api.cuMemAlloc, 4)), world.stream(), np.zeros(1, np.uint32)
    call(api.cuMemFree, pointer)
    assert code_of(api.cuMemcpyDtoHAsync, host.ctypes.data, pointer, 4, stream) == 1
    assert host[0] == 0
    assert "was freed" in fake_driver.take_violations()[0]


def test_a_replay_over_freed_memory_loses_the_context(
    world: World, fake_driver: FakeDriver
) -> None:
    pointer = int(call(api.cuMemAlloc, 4))
    graph = world.graph(lambda stream: world.launch(stream, "fake_increment", pointer))
    executable, stream = world.executable(graph), world.stream()
    call(api.cuMemFree, pointer)
    assert code_of(api.cuGraphLaunch, executable, stream) == 0
    assert code_of(api.cuStreamSynchronize, stream) == 700
    assert code_of(api.cuMemAlloc, 4) == 700
    assert "was freed" in fake_driver.take_violations()[0]
    fake_driver.restore_contexts()


def test_a_replay_whose_module_was_unloaded_is_a_violation(
    world: World, fake_driver: FakeDriver
) -> None:
    module = call(api.cuModuleLoadData, contract_cubin())
    function = call(api.cuModuleGetFunction, module, b"fake_spin")
    arguments = ((1,), (ctypes.c_uint64,))
    shape = (1, 1, 1, 1, 1, 1, 0)
    graph = world.graph(
        lambda stream: call(api.cuLaunchKernel, function, *shape, stream, arguments, 0)
    )
    executable, stream = world.executable(graph), world.stream()
    call(api.cuModuleUnload, module)
    call(api.cuGraphLaunch, executable, stream)
    assert code_of(api.cuStreamSynchronize, stream) == 700
    assert "the function was destroyed before" in fake_driver.take_violations()[0]
    fake_driver.restore_contexts()


def test_writing_past_a_block_is_a_violation(world: World, fake_driver: FakeDriver) -> None:
    pointer, stream = world.memory(6), world.stream()
    assert code_of(api.cuMemsetD8Async, pointer, 0, 7, stream) == 1
    assert "pass the end" in fake_driver.take_violations()[0]
    ctypes.memset(pointer + 6, 0, 1)  # as a kernel would that is not checked
    assert "memory after a block was written" in fake_driver.take_violations()[0]
    ctypes.memset(pointer + 6, 0xCA, 1)


def test_new_memory_and_freed_memory_hold_a_pattern(world: World) -> None:
    pointer = int(call(api.cuMemAlloc, 8))
    assert pointer % 512 == 0
    assert ctypes.string_at(pointer, 8) == b"\xa5" * 8
    call(api.cuMemFree, pointer)
    assert ctypes.string_at(pointer, 8) == b"\xdd" * 8


def test_a_damaged_cubin_is_a_violation_and_another_architecture_is_not(
    world: World, fake_driver: FakeDriver
) -> None:
    header = bytearray(contract_cubin())
    header[49] = 80  # e_flags name the architecture
    assert code_of(api.cuModuleLoadData, bytes(header)) == 209
    assert fake_driver.violations == []
    header[18] = 0  # the machine
    assert code_of(api.cuModuleLoadData, bytes(header)) == 200
    assert "damaged" in fake_driver.take_violations()[0]


# Planted faults


def test_the_nth_call_fails_once_and_does_nothing(world: World, fake_driver: FakeDriver) -> None:
    before = fake_driver.snapshot()
    fake_driver.fail("cuMemAlloc", code=2, nth=2)
    assert code_of(api.cuEventQuery, world.event()) == 0
    pointer = call(api.cuMemAlloc, 4)
    assert code_of(api.cuMemAlloc, 4) == 2
    assert fake_driver.num_faults == 0
    call(api.cuMemFree, pointer)
    assert fake_driver.snapshot().difference(before) == {"event": 1}


def test_any_code_may_be_planted_for_any_call(fake_driver: FakeDriver) -> None:
    fake_driver.fail(None, code=123456)
    assert code_of(api.cuDeviceGetCount) == 123456
    assert code_of(api.cuDeviceGetCount) == 0


def test_a_lasting_fault_strikes_until_it_is_cleared(fake_driver: FakeDriver) -> None:
    fake_driver.fail_always("cuDeviceGetCount", code=999, nth=2)
    assert [code_of(api.cuDeviceGetCount) for _ in range(4)] == [0, 999, 999, 999]
    fake_driver.clear_faults()
    assert code_of(api.cuDeviceGetCount) == 0


def test_calls_are_counted_and_traced(world: World, fake_driver: FakeDriver) -> None:
    before = fake_driver.calls("cuMemAlloc")
    with fake_driver.traced() as names:
        call(api.cuMemFree, call(api.cuMemAlloc, 4))
    assert names == ["cuMemAlloc", "cuMemFree"]
    assert fake_driver.calls("cuMemAlloc") == before + 1
    assert fake_driver.calls() > fake_driver.calls("cuMemAlloc")


def test_the_memory_limit_holds(world: World, fake_driver: FakeDriver) -> None:
    free, total = call(api.cuMemGetInfo)
    fake_driver.set_memory_limit(int(total) - int(free) + 1024)
    pointer = call(api.cuMemAlloc, 513)
    assert code_of(api.cuMemAlloc, 1) == 2
    call(api.cuMemFree, pointer)
    call(api.cuMemFree, call(api.cuMemAlloc, 1))


# Lost contexts


def test_a_faulting_kernel_loses_its_context_and_no_other(
    world: World, fake_driver: FakeDriver
) -> None:
    fake_driver.register("fake_spin", "Q", lambda *_: 719)
    stream, word = world.stream(), world.word()
    assert world.launch(stream, "fake_spin", 1) == 0
    answers = {
        code_of(api.cuStreamSynchronize, stream),
        code_of(api.cuMemAlloc, 4),
        code_of(api.cuMemFree, word),
        code_of(api.cuMemsetD8Async, word, 0, 4, stream),
        code_of(api.cuCtxSynchronize),
    }
    assert answers == {719}
    other = call(api.cuCtxCreate, None, 0, world.device)
    assert code_of(api.cuCtxSynchronize) == 0
    call(api.cuCtxDestroy, other)
    fake_driver.restore_contexts()


def test_a_lost_context_answers_its_first_code_for_ever(
    world: World, fake_driver: FakeDriver
) -> None:
    stream, event = world.stream(), world.event()
    fake_driver.lose_contexts(700)
    fake_driver.lose_contexts(719)
    assert code_of(api.cuStreamQuery, stream) == 700
    assert code_of(api.cuEventDestroy, event) == 700
    assert code_of(api.cuCtxPushCurrent, world.context) == 0
    assert code_of(api.cuCtxPopCurrent) == 0
    fake_driver.restore_contexts()


def left_behind(library: Path) -> dict[str, int]:
    """Create one of each in a process that has made no context yet, release it, and count."""
    double = load(library)
    before = double.snapshot()
    with World(double) as world:
        for create, *arguments in (
            (api.cuStreamCreate, 1),
            (api.cuEventCreate, 0),
            (api.cuMemAlloc, 4),
            (api.cuMemAllocHost, 4),
            (api.cuModuleLoadData, contract_cubin()),
        ):
            call(create, *arguments)
        world.executable(world.graph())
    return double.snapshot().difference(before)


def test_the_last_release_takes_everything_of_the_context_along(fake_driver: FakeDriver) -> None:
    code = "import sys; from tests.fake_driver import test_fake_driver as here; from pathlib import"
    code += " Path; print(here.left_behind(Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, fake_driver.path],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout.strip() == "{}", done.stderr


# Stand-ins and laziness


def test_lazy_work_runs_when_something_waits_for_it(world: World, fake_driver: FakeDriver) -> None:
    first, second, event, word = world.stream(), world.stream(), world.event(), world.word()
    fake_driver.set_lazy(True)
    world.launch(first, "fake_increment", word)
    call(api.cuEventRecord, event, first)
    world.launch(first, "fake_increment", word)
    world.launch(second, "fake_spin", 1)
    assert fake_driver.runs("fake_increment") == fake_driver.runs("fake_spin") == 0
    call(api.cuEventSynchronize, event)
    assert (fake_driver.runs("fake_increment"), fake_driver.runs("fake_spin")) == (1, 0)
    fake_driver.run_pending()
    assert (fake_driver.runs("fake_increment"), fake_driver.runs("fake_spin")) == (2, 1)


def test_a_stand_in_is_given_values_and_shape(world: World, fake_driver: FakeDriver) -> None:
    seen = []
    fake_driver.register("fake_add", "QI", lambda *arguments: seen.append(arguments))
    word = world.word()
    world.launch(world.stream(), "fake_add", word, 7, grid=(2, 3, 1), block=(4, 1, 1))
    assert seen == [(word, 7, (2, 3, 1), (4, 1, 1))]


def test_a_stand_in_that_raises_is_a_fault_and_is_raised_again(
    world: World, fake_driver: FakeDriver
) -> None:
    def stand_in(*_: object) -> None:
        raise ValueError("planted")

    fake_driver.register("fake_spin", "Q", stand_in)
    stream = world.stream()
    world.launch(stream, "fake_spin", 1)
    assert code_of(api.cuStreamSynchronize, stream) == 719
    fake_driver.restore_contexts()
    with pytest.raises(ValueError, match="planted"):
        fake_driver.check()


def test_a_stand_in_with_other_parameters_than_the_code_is_a_violation(
    world: World, fake_driver: FakeDriver
) -> None:
    fake_driver.register("fake_spin", "QQ", lambda *_: None)
    world.launch(world.stream(), "fake_spin", 1)
    assert "other parameters than the code" in fake_driver.take_violations()[0]
    fake_driver.restore_contexts()


def test_a_stand_in_that_calls_the_driver_is_refused(world: World, fake_driver: FakeDriver) -> None:
    codes = []
    fake_driver.register("fake_spin", "Q", lambda *_: codes.append(code_of(api.cuMemAlloc, 4)))
    world.launch(world.stream(), "fake_spin", 1)
    assert codes == [800]
    assert fake_driver.take_violations() == ["cuMemAlloc: called from inside a kernel"]


def test_other_threads_call_the_driver_while_a_kernel_runs(
    world: World, fake_driver: FakeDriver
) -> None:
    is_running, may_end = threading.Event(), threading.Event()

    def stand_in(*_: object) -> None:
        is_running.set()
        assert may_end.wait(10)

    fake_driver.register("fake_spin", "Q", stand_in)
    busy, other, word = world.stream(), world.stream(), world.word()
    thread = threading.Thread(target=lambda: world.launch(busy, "fake_spin", 1))
    thread.start()
    assert is_running.wait(10)
    assert code_of(api.cuStreamQuery, busy) == 600
    assert world.launch(other, "fake_increment", word) == 0
    assert code_of(api.cuStreamSynchronize, other) == 0
    may_end.set()
    thread.join()
    assert code_of(api.cuStreamQuery, busy) == 0


def test_threads_that_wait_for_each_others_streams_do_not_hang(
    world: World, fake_driver: FakeDriver
) -> None:
    streams, word = [world.stream() for _ in range(4)], world.word()
    fake_driver.register("fake_spin", "Q", lambda *_: None)
    fake_driver.set_lazy(True)

    def work(index: int) -> int:
        event = call(api.cuEventCreate, 2)
        for turn in range(100):
            stream, next_stream = streams[index], streams[(index + 1 + turn) % 4]
            world.launch(stream, "fake_spin", 1)
            world.launch(stream, "fake_increment", word)
            call(api.cuEventRecord, event, stream)
            call(api.cuStreamWaitEvent, next_stream, event, 0)
            if turn % 3 == 0:
                call(api.cuStreamSynchronize, next_stream)
        return code_of(api.cuEventDestroy, event)

    def in_context(index: int) -> None:
        call(api.cuCtxPushCurrent, world.context)
        work(index)

    threads = [threading.Thread(target=in_context, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    call(api.cuCtxSynchronize)
    assert fake_driver.runs("fake_increment") == fake_driver.runs("fake_spin") == 400


# Processes

SCRIPT = """
from nxrt.runtime import driver
print(driver.probe())
try:
    driver.call(driver.api.cuInit, 0)
    driver.call(driver.api.cuGraphExecUpdate, 0, 0)
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("NXRT_FAKE_DEVICES", "3", "num_devices=3"),
        ("NXRT_FAKE_DEVICES", "0", "NO_DEVICE"),
        ("NXRT_FAKE_DRIVER_VERSION", "12040", "version='12.4'"),
        ("NXRT_FAKE_DRIVER_VERSION", "11080", "cuGraphExecUpdate failed with FUNCTION_NOT_FOUND"),
        ("NXRT_FAKE_MISSING", "cuMemFree,cuGraphExecUpdate", "FUNCTION_NOT_FOUND"),
        ("NXRT_FAKE_MISSING", "cuMemFree", "cuGraphExecUpdate failed with CUDA_ERROR_INVALID_HA"),
    ],
)
def test_a_subprocess_meets_the_double_and_the_environment_shapes_it(
    fake_driver: FakeDriver, variable: str, value: str, expected: str
) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expected in finished.stdout


def test_the_stack_depth_is_of_one_thread(world: World, fake_driver: FakeDriver) -> None:
    assert fake_driver.stack_depth == 1
    assert in_thread(lambda: fake_driver.stack_depth) == 0
