"""`nxrt run --memory-report`: what is written, that it is written, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from nxrt.cli import decode
from nxrt.cli.memory_timeline import timelines
from nxrt.cli.recording import Recording
from nxrt.errors import JobError
from nxrt.memory.events import Event

Command = Callable[..., tuple[int, str, str]]


def said(path: Path) -> str:
    return "\n".join(ET.fromstring(path.read_text().removeprefix("<!DOCTYPE html>")).itertext())


def test_the_events_are_those_of_the_run(command: Command, job: Path, tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    code, out, err = command("run", job, "--json", "--memory-report", path)
    assert (code, err) == (0, "")
    events = tuple(Event(**json.loads(line)) for line in path.read_text().splitlines())
    (host,) = timelines(events)
    memory = next(tier for tier in json.loads(out)["memory"] if tier["tier"] == "host")
    peaks = {(h["role"], h["holder"]): h["peak"] for h in memory["holders"]}
    assert {(h.role, h.holder): h.peak for h in host.holders} == peaks
    assert host.peak.used == memory["peak"]
    assert host.moments[-1].used == 0


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_report_tells_who_held_what_in_which_phase(
    command: Command, job: Path, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"memory.{suffix}"
    options = ("--budget", "host=2KiB", "--budget", "host.watermark=1500")
    assert command("run", job, *options, "--memory-report", path)[0] == 0
    text = said(path)
    for expected in (
        "memory of job.toml", "host", "setup", "eager", "close", "limit", "watermark", "2.00 KiB",
        "kv_cache, peak 640 B", "activation, peak", "largest holders", "selected_indices",
        "1.46 KiB", "ended after",
    ):  # fmt: skip
        assert expected in text
    for absent in ("capture", "replay", "requests that failed"):
        assert absent not in text


def test_a_page_holds_the_same_picture_and_the_tables(
    command: Command, job: Path, tmp_path: Path
) -> None:
    path = tmp_path / "memory.html"
    command("run", job, "--memory-report", path)
    root = ET.fromstring(path.read_text().removeprefix("<!DOCTYPE html>"))
    titles = [heading.text for heading in root.iter("h2")]
    assert titles == ["tiers, in bytes", "roles", "largest holders", "phases"]
    cells = [cell.text for cell in root.iter("td")]
    assert {"selected_indices", "attention_bias", "eager", "640 B"} <= set(cells)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) == 1


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_report_refers_to_nothing_else(
    command: Command, job: Path, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"memory.{suffix}"
    command("run", job, "--memory-report", path)
    text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    for foreign in ("<script", "http:", "https:", "href", "src=", "url(", "@import", " on"):
        assert foreign not in text.replace(" once", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memory.png", "ends with .html, .svg or .jsonl"),
        ("memory", "ends with .html, .svg or .jsonl"),
        ("gone/memory.svg", "gone/memory.svg: No such file"),
        ("file/memory.jsonl", "file/memory.jsonl: Not a directory"),
        ("folder.svg", "folder.svg: Is a directory"),
    ],
)
def test_a_bad_path_is_refused_before_anything_runs(
    command: Command, job: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(job.parent)
    (job.parent / "folder.svg").mkdir()
    (job.parent / "file").touch()
    before = sorted(job.parent.iterdir())

    def never(*_: object) -> None:
        raise AssertionError("the job ran")

    monkeypatch.setattr(decode, "run_decode", never)
    code, out, err = command("run", job, "--memory-report", name)
    assert (code, out) == (2, "")
    assert "--memory-report: got" in err
    assert message in err
    assert err.count("error:") == 1
    assert sorted(job.parent.iterdir()) == before


def fail_after(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the job fail, as a kernel might, once it has done some steps."""
    real = decode._write_inputs

    def write_or_fail(binding: Any, trace: Any, step: int) -> None:
        if step == num_steps:
            raise JobError("planted", found="x", accepted="y")
        real(binding, trace, step)

    monkeypatch.setattr(decode, "_write_inputs", write_or_fail)


@pytest.mark.parametrize("suffix", ["svg", "html", "jsonl"])
def test_a_run_that_fails_leaves_its_report_and_its_error(
    command: Command, job: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    fail_after(3, monkeypatch)
    path = job.parent / f"memory.{suffix}"
    code, out, err = command("run", job, "--memory-report", path)
    assert (code, out) == (2, "")
    assert "planted: got x" in err
    if suffix == "jsonl":
        assert len(path.read_text().splitlines()) == 10  # five values, reserved and given back
        return
    text = said(path)
    assert "failed after" in text
    assert "planted: got x" in text
    assert "selected_indices" in text


def test_a_refused_run_reports_the_refusal(command: Command, job: Path) -> None:
    path = job.parent / "memory.svg"
    code, _, err = command("run", job, "--budget", "host=700", "--memory-report", path)
    assert code == 2
    assert "cannot reserve" in err
    text = said(path)
    for expected in ("requests that failed", "refused", "a request failed", "cannot reserve"):
        assert expected in text


def test_a_run_that_cannot_begin_reports_that_nothing_was_reserved(
    command: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise JobError("planted", found="x", accepted="y")

    monkeypatch.setattr(decode, "select_provider", fail)
    path = job.parent / "memory.html"
    code, _, err = command("run", job, "--memory-report", path)
    assert code == 2
    assert "planted" in err
    assert "Nothing was reserved." in said(path)


def test_a_report_that_cannot_be_written_in_the_end_hides_no_error(
    command: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    path = job.parent / "memory.svg"
    monkeypatch.setattr(Path, "write_text", full)
    code, _, err = command("run", job, "--memory-report", path)
    assert code == 2
    assert "No space left on device" in err
    fail_after(1, monkeypatch)
    code, _, err = command("run", job, "--memory-report", path)
    assert "planted" in err
    assert "No space left" not in err
    assert not path.exists()
    assert list(job.parent.glob("*.part")) == []


def test_without_the_option_no_events_are_kept(
    command: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Recording] = []
    real = decode.run_decode

    def remember(*args: Any) -> Any:
        kept.append(args[-1])
        return real(*args)

    monkeypatch.setattr(decode, "run_decode", remember)
    before = sorted(job.parent.iterdir())
    command("run", job)
    assert (kept[0].history, kept[0].events) == (0, ())
    assert sorted(job.parent.iterdir()) == before
    command("run", job, "--memory-report", job.parent / "memory.svg")
    assert len(kept[1].events) == 10


@pytest.mark.gpu
@pytest.mark.fake
def test_a_device_run_has_every_phase_and_every_role(
    command: Command, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NXRT_CACHE_DIR", str(cache_dir))
    path = tmp_path / "memory.svg"
    example = Path(__file__).parents[2] / "examples" / "glm_decode.toml"
    code, _, err = command("run", example, "--provider", "cuda", "--memory-report", path)
    assert code == 0, err
    text = said(path)
    places = [
        text.index(f"\n{name}\n") for name in ("setup", "eager", "capture", "replay", "close")
    ]
    assert places == sorted(places)
    for expected in ("device:0", "pinned", "graph, peak 96.00 KiB", "workspace, peak 52.39 KiB"):
        assert expected in text
