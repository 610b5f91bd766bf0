"""Where CUDA cannot be used every way to ask says why and what to do, at once; the CPU works."""

import ctypes.util
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nxrt import CudaProvider, MemoryGovernor, NxrtError, Session
from tests.helpers.cases import drawn_case
from tests.helpers.fake_driver import SONAME, FakeDriver
from tests.process.launching import run_child, run_python

AT_ONCE_S = 5.0
"""Generous, for a loaded machine: a hang is what is looked for."""

Answers = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Machine:
    """Hold a machine's environment on which CUDA cannot be used, and what the reason must say."""

    id: str
    reason: str
    remedy: str
    environ: dict[str, str] = field(default_factory=dict)


NO_DEVICE = Machine(
    "no-device", r"no device|NO_DEVICE", r"CUDA_VISIBLE_DEVICES", {"NXRT_FAKE_DEVICES": "0"}
)
OLD_DRIVER = Machine("old-driver", r"12\.4", r"580|13", {"NXRT_FAKE_DRIVER_VERSION": "12040"})
NO_LIBRARY = Machine("no-library", r"no CUDA driver library", r"install the NVIDIA driver")


def asked(environ: dict[str, str]) -> Answers:
    ended = run_child("first_call", environ=environ)
    assert (ended.code, ended.err) == (0, "")
    answers: Answers = json.loads(ended.out)
    return answers


def doctor(environ: dict[str, str]) -> tuple[int, str]:
    ended = run_python("-m", "nxrt", "doctor", environ={**environ, "COLUMNS": "200"})
    assert ended.err == ""
    return ended.code, ended.out


def check(machine: Machine, environ: dict[str, str]) -> None:
    """Check what every way to ask for CUDA answers on a machine that has none."""
    answers = asked(environ)
    for name in ("device", "device again", "cuda by name"):
        assert answers[name].get("error") == "DriverUnavailableError", (name, answers[name])
        assert re.search(machine.reason, answers[name]["text"]), answers[name]
        assert re.search(machine.remedy, answers[name]["text"]), answers[name]
    assert re.search(machine.reason, answers["probe"]["value"])
    assert answers["auto"]["value"].startswith("cpu: ")
    assert re.search(machine.reason, answers["auto"]["value"])
    assert answers["cpu"]["value"] == "True"
    assert max(answer["seconds"] for answer in answers.values()) < AT_ONCE_S
    code, said = doctor(environ)
    assert code == 1, said
    assert re.search(machine.reason, said), said
    assert re.search(machine.remedy, said), said


@pytest.mark.fake
@pytest.mark.parametrize("machine", [NO_DEVICE, OLD_DRIVER], ids=lambda machine: machine.id)
def test_driver_that_cannot_serve_is_explained(machine: Machine) -> None:
    check(machine, {**os.environ, **machine.environ})


@pytest.mark.fake
@pytest.mark.parametrize(
    ("code", "says"), [(222, "newer than the driver"), (209, "no code for this device")]
)
def test_code_that_the_driver_is_too_old_for_is_explained(
    fake_driver: FakeDriver, cuda_provider: CudaProvider, code: int, says: str
) -> None:
    governor = MemoryGovernor()
    fake_driver.fail_always("cuModuleLoadData", code=code)
    with pytest.raises(NxrtError, match=says):
        Session(
            drawn_case("new", num_queries=1, num_keys=8, top_k=2).graph, [cuda_provider], governor
        )
    assert all(tier.used == 0 for tier in governor.snapshot())


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a driver here")
def test_missing_driver_is_explained() -> None:
    check(NO_LIBRARY, without_double())


def test_damaged_driver_library_is_explained(tmp_path: Path) -> None:
    (tmp_path / SONAME).write_bytes(b"no library")
    check(NO_LIBRARY, {**without_double(), "LD_LIBRARY_PATH": str(tmp_path)})


def test_importing_loads_no_driver_library() -> None:
    code = "import nxrt; print('libcuda' in open('/proc/self/maps').read())"
    ended = run_python("-c", code, environ=without_double())
    assert (ended.code, ended.out, ended.err) == (0, "False\n", "")


def without_double() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
