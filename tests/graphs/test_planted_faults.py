"""Graphs while single driver calls are refused: only the test double can do that."""

import itertools
import os
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from nxrt import Binding, CaptureError, DriverError, NxrtError, Session
from nxrt.errors import DeviceFaultError
from nxrt.providers.cuda_session import GRAPH_NBYTES
from tests.graphs.test_device_faults import BELOW, GATHERING, INPUTS, NUM_X, aim
from tests.helpers.fake_driver import FakeDriver
from tests.helpers.graph_rig import SUMMED, Rig, bound, floats, poison

pytestmark = [pytest.mark.fake]

COUNT = 9
RIGHT = np.cumsum(3 * floats(COUNT))


def double(rig: Rig) -> FakeDriver:
    assert rig.fake is not None
    return rig.fake


def assert_steps_right(session: Session, binding: Binding) -> None:
    poison(session, binding)
    session.step(binding)
    assert np.array_equal(binding.read("y"), RIGHT)


@pytest.mark.parametrize("code", [1, 2, 900, 901])
def test_a_capture_that_fails_at_any_call_leaves_nothing_behind(rig: Rig, code: int) -> None:
    fake, errors = double(rig), []
    with rig.session(SUMMED) as session, bound(session, COUNT) as binding:
        session.run(binding)
        session.capture(binding).close()
        session.synchronize()
        before = rig.figures()
        for nth in itertools.count(1):
            fake.fail(None, code=code, nth=nth)
            try:
                session.capture(binding).close()
            except CaptureError as error:
                errors.append(error)
            is_past_the_end = fake.num_faults > 0
            fake.clear_faults()
            session.synchronize()
            assert rig.figures() == before, f"call {nth}"
            with closing(session.capture(binding)) as graph:
                poison(session, binding)
                graph.replay()
                assert np.array_equal(binding.read("y"), RIGHT)
            if is_past_the_end:
                break
    assert {error.stage for error in errors} >= {"begin", "record", "end", "instantiate", "upload"}
    assert {error.kernel for error in errors} == {"", "scale", "sum"}


@pytest.mark.parametrize("code", [1, 2, 910])
def test_an_update_that_fails_at_any_call_leaves_nothing_behind(rig: Rig, code: int) -> None:
    fake = double(rig)
    with rig.session(SUMMED) as session, bound(session, COUNT) as other:
        session.run(other)
        session.step(other)
        session.synchronize()
        used, live = rig.used - GRAPH_NBYTES, fake.snapshot()
        for nth in itertools.count(1):
            with bound(session, COUNT) as binding:
                session.step(binding)
            with bound(session, COUNT) as binding:
                session.synchronize()
                fake.fail(None, code=code, nth=nth)
                try:
                    session.step(binding)
                except NxrtError as error:
                    assert isinstance(error, (CaptureError, DriverError))  # noqa: PT017
                is_past_the_end = fake.num_faults > 0
                fake.clear_faults()
                assert_steps_right(session, binding)
            session.synchronize()
            assert rig.used == used + session.num_graphs * GRAPH_NBYTES, f"call {nth}"
            assert fake.live("exec") == session.num_graphs
            assert fake.snapshot().difference(live).keys() <= {"exec"}
            if is_past_the_end:
                break
        assert_steps_right(session, other)


@pytest.mark.parametrize(
    "call",
    [
        "cuMemcpyDtoHAsync",
        "cuEventRecord",
        "cuEventSynchronize",
        "cuLaunchKernel",
        "cuMemsetD8Async",
    ],
)
def test_a_fault_outlives_a_read_that_failed(rig: Rig, call: str) -> None:
    with rig.session(GATHERING, INPUTS) as session, session.bind({"N": 3}) as binding:
        binding.write("x", floats(NUM_X))
        aim(binding, BELOW)
        session.run(binding)
        double(rig).fail(call, code=1)
        with pytest.raises(DriverError, match=call):
            session.synchronize()
        with pytest.raises(DeviceFaultError, match="'gather i' met bad data in step 0") as failure:
            session.synchronize()
        assert not hasattr(failure.value, "__notes__")
        session.synchronize()


ANOTHER_DEVICE = """
from nxrt import InvalidInputError
from nxrt.runtime.device import Device
from nxrt.runtime.stream import ForeignStream, Stream
first, second = Device(0), Device(1)
with Stream(second) as stream:
    try:
        ForeignStream(first, stream.handle)
    except InvalidInputError as error:
        print(error.found)
"""


def test_a_stream_of_another_device_is_refused() -> None:
    environment = os.environ | {"NXRT_FAKE_DEVICES": "2"}
    command = [sys.executable, "-c", ANOTHER_DEVICE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "a stream of device 1\n"
