"""`nxrt doctor`: what it says of a whole machine, and of one that lacks something."""

import json
import sys
from pathlib import Path

import pytest

from nxrt.cli import app, doctor
from nxrt.errors import CompileError
from nxrt.runtime import driver, environment
from nxrt.runtime.compilation.compiler import Compiler
from nxrt.runtime.driver import DriverStatus
from nxrt.runtime.environment import Finding, inspect_environment


def finding(findings: tuple[Finding, ...], subject: str) -> Finding:
    return next(f for f in findings if f.subject == subject)


def test_it_looks_at_everything_nxrt_uses() -> None:
    subjects = {f.subject for f in inspect_environment()}
    assert {"driver", "NVRTC", "CUDA headers", "compiling a kernel", "compile cache"} <= subjects
    assert {"package numpy", "package cuda-bindings"} <= subjects


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    status = DriverStatus(False, "no CUDA driver library")
    monkeypatch.setattr(driver, "probe", lambda: status)
    found = finding(inspect_environment(), "driver")
    assert not found.is_ok
    assert "install the NVIDIA driver" in found.remedy


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Compiler) -> str:
        raise CompileError("NVRTC", arch="any", log="libnvrtc.so.13 not found", remedy="pip ...")

    monkeypatch.setattr(Compiler, "version", property(missing))
    findings = inspect_environment()
    assert not finding(findings, "NVRTC").is_ok
    assert not finding(findings, "compiling a kernel").is_ok


def test_headers_of_another_release_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    monkeypatch.setattr(environment, "cuda_include_dir", lambda: tmp_path)
    found = finding(inspect_environment(), "CUDA headers")
    assert not found.is_ok
    assert "12.8, while NVRTC is" in found.found


def test_a_cache_folder_that_cannot_be_written_is_reported() -> None:
    found = finding(inspect_environment({"NXRT_CACHE_DIR": "/proc/nxrt"}), "compile cache")
    assert not found.is_ok
    assert "NXRT_CACHE_DIR" in found.remedy


def test_memory_only_is_fine() -> None:
    assert finding(inspect_environment({}), "compile cache").is_ok


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    inspect_environment({"NXRT_CACHE_DIR": str(tmp_path / "cache")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([Finding("a", True, "x")], doctor.READY),
        ([Finding("a", False, "x")], doctor.READY),
        ([Finding("a", False, "x", needed_for="cuda")], doctor.CPU_ONLY),
        ([Finding("a", False, "x", needed_for="cpu")], doctor.UNUSABLE),
    ],
    ids=["ready", "something optional", "cpu only", "unusable"],
)
def test_the_exit_code_is_the_verdict(findings: list[Finding], code: int) -> None:
    assert doctor.exit_code(findings) == code


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_the_command_prints_what_was_found(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = (Finding("driver", False, "none [here]", "install it", "cuda"),)
    monkeypatch.setattr(app, "inspect_environment", lambda: findings)
    monkeypatch.setattr(sys, "argv", ["nxrt", "doctor", *options])
    with pytest.raises(SystemExit) as done:
        app.main()
    out = capsys.readouterr().out
    assert done.value.code == doctor.CPU_ONLY
    assert "none [here]" in out
    assert "install it" in out
    if options:
        assert json.loads(out)[0]["subject"] == "driver"
