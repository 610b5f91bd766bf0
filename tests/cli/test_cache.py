"""`nxrt cache`: fill, list, verify and clear, and what each says and returns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nxrt.cli import app, cache
from nxrt.kernels.api import CompileUnit
from nxrt.runtime import driver
from nxrt.runtime.driver import DriverStatus

ROOT = Path(__file__).parents[2]
KERNEL = 'extern "C" __global__ void k(int* p) { *p = VALUE; }\n'


@pytest.fixture
def units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let two units be all there is; return their file."""
    path = tmp_path / "tiny.cu"
    path.write_text(KERNEL)
    made = [CompileUnit(path, (("VALUE", value),)) for value in ("1", "2")]
    monkeypatch.setattr(cache, "all_compile_units", lambda: made)
    monkeypatch.setenv("NXRT_CACHE_DIR", str(tmp_path / "cache"))
    return path


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["nxrt", "cache", *arguments])
    with pytest.raises(SystemExit) as done:
        app.main()
    output = capsys.readouterr()
    return int(done.value.code or 0), output.out + output.err


@pytest.mark.usefixtures("units")
def test_warming_compiles_each_unit_for_each_architecture_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archs = ("--arch", "sm_80", "--arch", "sm_90a", "--arch", "sm_80", "--jobs", "2")
    code, output = call(monkeypatch, capsys, "warm", *archs)
    assert code == 0
    assert "4 compiled, 0 already there, 0 failed" in output
    code, output = call(monkeypatch, capsys, "warm", *archs)
    assert code == 0
    assert "0 compiled, 4 already there, 0 failed" in output
    assert output.count("VALUE=1") == 2


@pytest.mark.usefixtures("units")
def test_warming_reports_as_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = call(monkeypatch, capsys, "warm", "--arch", "sm_80", "--json")
    data = json.loads(output)
    assert code == 0
    assert [(unit["arch"], unit["from"]) for unit in data["units"]] == [("sm_80", "compiler")] * 2
    assert data["cache"]["compilations"] == 2


def test_a_unit_that_does_not_compile_is_reported_and_the_others_are_kept(
    units: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    units.write_text(f"#if VALUE == 2\n#error no [bold]\n#endif\n{KERNEL}")
    code, output = call(monkeypatch, capsys, "warm", "--arch", "sm_90a")
    assert code == 1
    assert "1 compiled, 0 already there, 1 failed" in output
    assert f"{units}(2): catastrophic error: #error directive: no [bold]" in output


@pytest.mark.usefixtures("units")
def test_a_folder_that_takes_nothing_makes_warming_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, output = call(
        monkeypatch, capsys, "warm", "--arch", "sm_80", "--dir", str(tmp_path / "file")
    )
    assert code == 1
    assert "2 could not be kept there" in output


@pytest.mark.parametrize("arch", ["90", "sm_", "compute_90", "sm_90x", "sm_90a; rm"])
@pytest.mark.usefixtures("units")
def test_what_is_no_architecture_is_refused(
    arch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = call(monkeypatch, capsys, "warm", "--arch", arch)
    assert code == 2
    assert "--arch" in output


@pytest.mark.usefixtures("units")
def test_without_a_device_the_architecture_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "probe", lambda: DriverStatus(False, "no library here"))
    code, output = call(monkeypatch, capsys, "warm")
    assert code == 2
    assert "no library here" in output
    assert "--arch sm_90a" in output


def test_without_a_folder_there_is_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NXRT_CACHE_DIR", "")
    for command in ("list", "verify", "clear"):
        code, output = call(monkeypatch, capsys, command)
        assert code == 2
        assert "NXRT_CACHE_DIR" in output


@pytest.mark.usefixtures("units")
def test_an_empty_place_is_fine_and_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("list", "verify", "clear"):
        assert call(monkeypatch, capsys, command)[0] == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("units")
def test_the_list_names_source_defines_architecture_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, capsys, "warm", "--arch", "sm_90a")
    (tmp_path / "cache" / f"{0:064x}.cubin").write_text("of an older nxrt")
    code, output = call(monkeypatch, capsys, "list")
    assert code == 0
    for part in ("tiny.cu", "VALUE=1", "VALUE=2", "sm_90a", "KiB", "3 entries", "another version"):
        assert part in output
    data = json.loads(call(monkeypatch, capsys, "list", "--json")[1])
    assert {entry["defines"] for entry in data} == {"VALUE=1", "VALUE=2", ""}


@pytest.mark.usefixtures("units")
def test_verify_finds_what_is_damaged_and_removes_it_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, capsys, "warm", "--arch", "sm_90a")
    assert call(monkeypatch, capsys, "verify")[0] == 0
    entry = min((tmp_path / "cache").glob("*.cubin"))
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    code, output = call(monkeypatch, capsys, "verify")
    assert (code, entry.exists()) == (1, True)
    assert f"{entry.name}: its digest does not match" in output
    bad = json.loads(call(monkeypatch, capsys, "verify", "--remove", "--json")[1])["bad"]
    assert [found["name"] for found in bad] == [entry.name]
    assert not entry.exists()
    assert call(monkeypatch, capsys, "verify")[0] == 0


@pytest.mark.usefixtures("units")
def test_clear_leaves_what_is_not_the_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, capsys, "warm", "--arch", "sm_90a")
    (tmp_path / "cache" / "mine").write_text("")
    code, output = call(monkeypatch, capsys, "clear")
    assert code == 0
    assert "2 files removed" in output
    assert os.listdir(tmp_path / "cache") == ["mine"]  # noqa: PTH208


def test_a_folder_of_somebody_else_is_an_error_and_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    for command in ("list", "verify", "clear"):
        code, output = call(monkeypatch, capsys, command, "--dir", str(tmp_path / "shared"))
        assert code == 2
        assert "others can write to it" in output


def test_a_terminal_without_unicode_is_served(tmp_path: Path) -> None:
    environ = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    # All units would take minutes, and say nothing more about a terminal.
    two = "cache.all_compile_units = lambda made=cache.all_compile_units()[:2]: made"
    lines = ["import sys", "from nxrt.cli import cache", two, "from nxrt.cli.app import main"]
    code = "; ".join([*lines, "sys.exit(main())"])
    done = subprocess.run(
        [sys.executable, "-c", code, "cache", "warm", "--arch", "sm_80", "--dir", str(tmp_path)],
        capture_output=True,
        check=True,
        env=environ,
    )
    assert b"2 compiled, 0 already there, 0 failed" in done.stdout
    assert b"NXRT_DTYPE=" in done.stdout
    assert done.stderr == b""
