"""Each driver function that nxrt uses, failing or missing: a typed error, and nothing left behind.

The sweeps over whole scenarios are in test_fault_injection; here every function has a test.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxrt import DeviceLostError, DriverError
from nxrt.runtime.device import Device
from nxrt.runtime.stream import Stream
from tests.helpers.fake_driver import FakeDriver
from tests.helpers.fault_scenarios import SCENARIOS, Subject
from tests.helpers.fault_sweep import FAILING_CODES, LOSING_CODES, Laboratory, entry_points

pytestmark = pytest.mark.fake

ENTRY_POINTS = entry_points()
UNKNOWN = 123456


def test_the_entry_points_are_found() -> None:
    assert len(ENTRY_POINTS) >= 40
    assert {"cuInit", "cuLaunchKernel", "cuGraphLaunch", "cuMemFree"} <= set(ENTRY_POINTS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ENTRY_POINTS)
def test_a_function_may_fail_with_every_code(laboratory: Laboratory, call: str) -> None:
    problems: list[str] = []
    for code in FAILING_CODES:
        problems += laboratory.fail_once(*laboratory.first_fault(call, code))
    for code in LOSING_CODES:
        problems += laboratory.lose(*laboratory.first_fault(call, code))
    assert not problems, "\n".join(problems)


USES: dict[str, Callable[[Subject], Any]] = {
    "cuMemAlloc": lambda subject: subject.opened.bind({"N": 3}),
    "cuLaunchKernel": lambda subject: subject.opened.run(subject.bindings[0]),
    "cuGraphLaunch": lambda subject: subject.graphs[0].replay(),
    "cuStreamSynchronize": lambda subject: subject.opened.synchronize(),
    "cuEventSynchronize": lambda subject: subject.bindings[0].read("picked"),
}


@pytest.mark.parametrize("call", USES)
def test_a_code_that_nobody_knows_is_a_driver_error(
    laboratory: Laboratory, cache_dir: Path, call: str
) -> None:
    subject = Subject(laboratory.fake, cache_dir)
    subject.warm()
    subject.graphs.append(subject.opened.capture(subject.bindings[0]))
    laboratory.fake.fail(call, code=UNKNOWN)
    with pytest.raises(DriverError) as failure:
        USES[call](subject)
    error = failure.value
    assert (error.code, error.name, error.call) == (UNKNOWN, "UNKNOWN", call)
    subject.require_working()
    subject.close()


def test_the_first_of_several_losses_is_the_one_that_is_told(
    laboratory: Laboratory, fake_driver: FakeDriver
) -> None:
    device = Device(0)
    stream = Stream(device)
    fake_driver.fail("cuStreamSynchronize", code=700)
    fake_driver.fail_always(None, code=719, nth=2)
    with pytest.raises(DriverError, match=r"cuStreamSynchronize .*\(700\)"):
        stream.synchronize()
    num_calls = fake_driver.calls()
    with pytest.raises(DeviceLostError) as loss:
        stream.synchronize()
    assert (loss.value.code, loss.value.call) == (700, "cuStreamSynchronize")
    assert fake_driver.calls() == num_calls
    fake_driver.clear_faults()
    device.fault = None
    stream.close()
    device.close()


CHILD = "tests.helpers.missing_functions"
ALWAYS_THERE = {
    "cuCtxPopCurrent": "every driver that pushes also pops; without it the stack would overflow",
    "cuStreamEndCapture": "every driver that begins a capture also ends it",
}
"""What is not left out, and why."""


def test_a_function_may_be_missing(laboratory: Laboratory, cache_dir: Path) -> None:
    """An older driver has not all of them; each is left out in a process of its own."""
    laboratory.trace(SCENARIOS[0])  # compiles what the children load
    root = Path(__file__).parents[2]
    left_out = [call for call in ENTRY_POINTS if call not in ALWAYS_THERE]
    library = laboratory.fake._library._name
    command = [sys.executable, "-m", CHILD, library, str(cache_dir), *left_out]
    environment = {**os.environ, "PYTHONPATH": str(root), "NXRT_FAKE_MISSING": ""}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["missing"] for line in lines] == left_out
    problems = [f"{line['missing']}: {text}" for line in lines for text in line["problems"]]
    assert not problems, "\n".join(problems)
