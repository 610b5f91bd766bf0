"""`nxrt plan`: table, data and picture say the same; every bad input is one error."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from nxrt.cli import app, plan
from nxrt.cli.plan import share_text
from nxrt.cli.sizes import size_text
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.tier import PINNED
from nxrt.planning.geometry import FOLDER, known_models
from nxrt.runtime import driver

MILLION = str(2**20)
GLM = ("--model", "glm-5.2", "--context", MILLION, "--batch", "1")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command and gives exit code, output and error output."""
    for tier in MemoryBudget.model_fields:
        monkeypatch.delenv(f"NXRT_BUDGET_{tier.upper()}", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def invoke(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nxrt", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            app.main()
        streams = capsys.readouterr()
        return int(done.value.code or 0), streams.out, streams.err

    return invoke


def data_of(run: Run, *arguments: object) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(*arguments, "--json")[1])
    return data


def test_what_fits_is_exit_code_0(run: Run) -> None:
    code, out, err = run(*GLM, "--budget", "device=100GiB")
    assert (code, err) == (0, "")
    for expected in (
        "it fits",
        "87.75 GiB",
        "5.25 GiB",
        "1.07 MiB",
        "93.00 GiB",
        "limit 100.00 GiB",
        "93.0 % of the limit",
    ):
        assert expected in out
    assert "largest batch at this context: 1\n" in out
    assert "longest context at this batch: 1,048,576, all that the model has" in out


def test_what_does_not_fit_is_exit_code_1_and_names_the_line(run: Run) -> None:
    code, out, _ = run(*GLM, "--budget", "device=80GiB")
    assert code == 1
    assert "it does not fit: device:0 lacks 13.00 GiB" in out
    assert 'device = "94 GiB"' in out
    assert "largest batch at this context: 0\n" in out


def test_the_named_line_makes_it_fit(run: Run, tmp_path: Path) -> None:
    budget = tmp_path / "budget.toml"
    budget.write_text('[budget]\ndevice = "80 GiB"\npinned = 100\n')
    report = data_of(run, *GLM, "--budget", budget)
    assert report["fits"] is False
    budget.write_text(f"[budget]\n{report['budget_line']}\n")
    assert run(*GLM, "--budget", budget)[0] == 0


@pytest.mark.parametrize("model", known_models())
@pytest.mark.parametrize("device", ["1GiB", "200GiB"])
def test_data_table_and_picture_have_the_same_numbers(
    run: Run, tmp_path: Path, model: str, device: str
) -> None:
    picture = tmp_path / "plan.svg"
    options = ("--model", model, "--context", 100_000, "--batch", 2, "--budget", f"device={device}")
    code, out, _ = run(*options, "--picture", picture)
    report = data_of(run, *options)
    drawn = "\n".join(ET.parse(picture).getroot().itertext())
    assert code == (0 if report["fits"] else 1)
    for line in report["lines"]:
        row = rf"{line['role']} .*{line['holder']} .*{line['what']} .*{size_text(line['nbytes'])}"
        assert re.search(row, out)
        assert f"{line['holder']}: {line['what']}" in drawn
        assert size_text(line["nbytes"]) in drawn
    for total in report["totals"]:
        assert total["nbytes"] == sum(
            line["nbytes"] for line in report["lines"] if line["tier"] == total["tier"]
        )
        assert size_text(total["nbytes"]) in out
        assert size_text(total["nbytes"]) in drawn
    for answer in (report["largest_batch"], report["longest_context"]):
        assert f": {answer:,}" in out
        assert f": {answer:,}" in drawn


def test_without_a_budget_there_is_no_limit(run: Run) -> None:
    report = data_of(run, *GLM)
    assert report["fits"] is True
    assert report["largest_batch"] is None
    assert [total["limit"] for total in report["totals"]] == [None, None]
    assert "largest batch at this context: without limit" in run(*GLM)[1]


def test_sizes_win_over_the_file_and_the_file_over_the_environment(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NXRT_BUDGET_PINNED", "3 MiB")
    monkeypatch.setenv("NXRT_BUDGET_DEVICE", "3 GiB")
    budget = tmp_path / "budget.toml"
    budget.write_text('[budget]\ndevice = "2 GiB"\n')
    limits = [total["limit"] for total in data_of(run, *GLM, "--budget", budget)["totals"]]
    assert limits == [2 * 2**30, 3 * 2**20]
    report = data_of(run, *GLM, "--budget", budget, "--budget", "device=1GiB")
    assert report["totals"][0]["limit"] == 2**30


def test_a_model_may_be_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (FOLDER / "glm-5.2.toml").read_text(encoding="utf-8")
    path.write_text(text.replace('"GLM-5.2"', '"Mine"'), encoding="utf-8")
    report = data_of(run, "--model", path, "--context", 10)
    assert (report["model"], report["batch"]) == ("Mine", 1)


BAD_OPTIONS = {
    "unknown model": (("--model", "glm-9", "--context", 5), "glm-5.2"),
    "context 0": (("--model", "glm-5.2", "--context", 0), "context: got 0"),
    "context below 0": (("--model", "glm-5.2", "--context", -5), "context: got -5"),
    "context above": (("--model", "deepseek-v3.2", "--context", 163_841), "163,840"),
    "batch 0": ((*GLM[:4], "--batch", 0), "batch: got 0"),
    "batch above": ((*GLM[:4], "--batch", 2**31), "batch: got 2147483648"),
    "too many bytes": ((*GLM[:4], "--batch", 2**31 - 1), "at most 9223372036854775807"),
    "no tier": ((*GLM, "--budget", "24GiB"), "--budget: got '24GiB'"),
    "unknown tier": ((*GLM, "--budget", "disk=1GiB"), "--budget: got 'disk=1GiB'"),
    "bad size": ((*GLM, "--budget", "device=many"), "budget.device: got 'many'"),
    "two files": ((*GLM, "--budget", "{ok}", "--budget", "{ok}"), "one .toml file"),
    "no file": ((*GLM, "--budget", "gone.toml"), "gone.toml: got No such file"),
    "no TOML": ((*GLM, "--budget", "{torn}"), "accepted: TOML"),
    "no table": ((*GLM, "--budget", "{empty}"), "empty.toml.budget: got no such table"),
    "no tier in the file": ((*GLM, "--budget", "{tiers}"), "budget.disk"),
    "budget no table": ((*GLM, "--budget", "{flat}"), "a [budget] table"),
    "suffix": ((*GLM, "--picture", "plan.png"), "ends with .svg or .html"),
    "no suffix": ((*GLM, "--picture", "svg"), "ends with .svg or .html"),
    "no folder": ((*GLM, "--picture", "gone/plan.svg"), "gone/plan.svg: No such file"),
}
FILES = {
    "ok": "[budget]\n",
    "torn": "[budget",
    "empty": "",
    "tiers": "[budget]\ndisk = 1\n",
    "flat": "budget = 3\n",
}


@pytest.mark.parametrize("fault", BAD_OPTIONS)
def test_a_bad_input_is_one_clear_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {name: tmp_path / f"{name}.toml" for name in FILES}
    for name, text in FILES.items():
        paths[name].write_text(text)
    options, message = BAD_OPTIONS[fault]
    code, out, err = run(*(str(option).format(**paths) for option in options))
    assert code == 2
    assert message in err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.glob("*.svg")) == []


@pytest.mark.parametrize("options", [(), ("--model", "glm-5.2"), (*GLM[:3], "many")])
def test_a_missing_or_unreadable_option_is_exit_code_2(run: Run, options: tuple[str, ...]) -> None:
    assert run(*options)[0] == 2


def test_a_share_of_a_device_nobody_has_measured_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = driver.DriverStatus(False, "planted")
    monkeypatch.setattr(driver, "probe", lambda: nothing)
    code, _, err = run(*GLM, "--budget", "device=85%")
    assert code == 2
    assert 'write device = "8 GiB"' in err


def test_a_share_of_pinned_memory_is_of_what_this_machine_has(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "measured_host_capacity", lambda: 2**20)
    assert plan.measured_capacities(MemoryBudget.of(pinned="50%")) == {PINNED: 2**20}
    code, out, _ = run(*GLM, "--budget", "pinned=50%")
    assert code == 1
    assert "pinned lacks 512.00 KiB" in out


def test_what_no_budget_line_can_admit_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "measured_host_capacity", lambda: 2**19)
    out = run(*GLM, "--budget", "pinned=50%")[1]
    assert "and this machine has 512.00 KiB in all" in out


@pytest.mark.parametrize("device", ["80GiB", "100GiB"])
def test_the_svg_stacks_the_lines_and_marks_the_limit(
    run: Run, tmp_path: Path, device: str
) -> None:
    picture = tmp_path / "plan.svg"
    run(*GLM, "--budget", f"device={device}", "--picture", picture)
    root = ET.parse(picture).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg"
    (limit,) = root.iter(f"{svg}line")
    needed = 93.0
    allowed = float(device.removesuffix("GiB"))
    assert float(limit.get("x1", "")) == pytest.approx(
        40 + 880 * allowed / max(allowed, needed), abs=1
    )
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for box in root.iter(f"{svg}rect"):
        assert float(box.get("x", "0")) + float(box.get("width", "")) <= width + 0.1
        assert float(box.get("y", "0")) + float(box.get("height", "")) <= height


def test_the_html_holds_the_same_svg(run: Run, tmp_path: Path) -> None:
    run(*GLM, "--picture", tmp_path / "plan.svg")
    run(*GLM, "--picture", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8") in page
    ET.fromstring(page.removeprefix("<!DOCTYPE html>"))


def test_a_picture_is_drawn_of_what_does_not_fit_too(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    assert run(*GLM, "--budget", "device=0", "--picture", picture, "--json")[0] == 1
    assert "it does not fit" in picture.read_text(encoding="utf-8")


def test_a_terminal_without_unicode_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = [sys.executable, "-m", "nxrt", "plan", *GLM, "--budget", "device=80GiB"]
    done = subprocess.run(command, check=False, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"######|" in done.stdout
    assert b"?" not in done.stdout


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (2**30, "1.00 GiB"),
        (2**42, "4,096.00 GiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


def test_a_small_share_is_not_nothing() -> None:
    texts = [share_text(*pair) for pair in ((0, 5), (1, 10**9), (1, 3), (0, 0))]
    assert texts == ["0.0 %", "<0.1 %", "33.3 %", "0.0 %"]
