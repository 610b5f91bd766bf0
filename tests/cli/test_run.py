"""`nxrt run`: the job end to end, and one clear error for everything that can be wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxrt.cli import app, decode
from nxrt.cli.decode import oracle_rows, run_decode
from nxrt.cli.job import load_job
from nxrt.cli.trace import Trace, load_trace
from nxrt.errors import BudgetError, JobError, NxrtError
from nxrt.memory.governor import MemoryGovernor
from nxrt.runtime import driver

EXAMPLE = Path(__file__).parents[2] / "examples" / "glm_decode.toml"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command and gives exit code, output and error output."""

    def invoke(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nxrt", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            app.main()
        streams = capsys.readouterr()
        return int(done.value.code or 0), streams.out, streams.err

    return invoke


def small_arrays(num_steps: int = 5, capacity: int = 40) -> dict[str, Any]:
    rng = np.random.default_rng(5)

    def bits(*shape: int) -> Any:
        return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )  # fmt: skip

    return {
        "query": bits(num_steps, 4, 8),
        "key": bits(capacity, 8),
        "weights": bits(num_steps, 4),
        "tokens": np.array([f"t{i}" for i in range(capacity)]),
    }


def write_job(folder: Path, text: str = "", **arrays: Any) -> Path:
    """Write a small job; `text` replaces its tables."""
    np.savez(folder / "trace.npz", **(small_arrays() | arrays))
    path = folder / "job.toml"
    path.write_text(text or SMALL_JOB, encoding="utf-8")
    return path


SMALL_JOB = """
[job]
op = "pkg.nxrt::DsaIndexSelect"
trace = "trace.npz"
provider = "cpu"

[attributes]
top_k = 3
scale = 0.5

[budget]
host = "64 KiB"
"""


def test_the_example_ends_with_every_row_equal(run: Run) -> None:
    code, out, _ = run("run", EXAMPLE, "--provider", "cpu", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["rows"] == {"checked": 64, "equal": 64}
    assert report["steps"]["total"] == 64
    assert report["released"] is True
    host = next(tier for tier in report["memory"] if tier["tier"] == "host")
    assert host["used"] == sum(holder["used"] for holder in host["holders"])
    assert {"kv_cache", "activation"} == {holder["role"] for holder in host["holders"]}
    assert len(report["last_selection"]) == 2048


@pytest.mark.gpu
def test_the_example_replays_one_graph_on_a_device(
    run: Run, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NXRT_CACHE_DIR", str(cache_dir))
    code, out, _ = run("run", EXAMPLE, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["provider"]["name"] == "cuda"
    assert report["rows"] == {"checked": 64, "equal": 64}
    assert report["graph"] == {"captures": 1, "replays": 62, "nodes": 1, "declined": ""}
    assert (report["steps"]["eager"]["count"], report["steps"]["replayed"]["count"]) == (2, 62)
    assert report["released"] is True


def test_a_person_sees_the_selection_and_the_table(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("run", write_job(tmp_path))
    assert code == 0
    for expected in ("3 of 40 positions selected", "5 of 5", "not captured", "64.0 KiB", "«t"):
        assert expected in out


def test_top_k_can_be_chosen_on_the_command_line(run: Run, tmp_path: Path) -> None:
    out = run("run", write_job(tmp_path), "--json", "--top-k", "7")[1]
    assert len(json.loads(out)["last_selection"]) == 7


def test_a_wrong_row_is_exit_code_1(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = oracle_rows

    def other_rows(trace: Trace, attributes: Any) -> Any:
        rows = real(trace, attributes)
        rows[2] += 1
        return rows

    monkeypatch.setattr(decode, "oracle_rows", other_rows)
    code, out, _ = run("run", write_job(tmp_path), "--json")
    assert code == 1
    assert json.loads(out)["rows"] == {"checked": 5, "equal": 4}


BAD_JOBS = {
    "no file": ("", "job.toml: got No such file"),
    "no TOML": ("[job", "job.toml"),
    "no op": (SMALL_JOB.replace("op =", "# op ="), "job.toml.job.op: got nothing"),
    "bare op": (SMALL_JOB.replace("pkg.nxrt::", ""), "domain::Operator"),
    "unknown op": (SMALL_JOB.replace("DsaIndexSelect", "Softmax"), "pkg.nxrt::Softmax is not"),
    "unknown key": (SMALL_JOB.replace("[attributes]", "steps = 3\n[attributes]"), "job.steps"),
    "unknown table": (SMALL_JOB + "\n[extra]\na = 1\n", "job.toml.extra"),
    "unknown provider": (SMALL_JOB.replace('"cpu"', '"tpu"'), "'tpu'; accepted: auto, cuda, cpu"),
    "unknown attribute": (SMALL_JOB.replace("scale", "scales"), "attribute scales"),
    "top_k 0": (SMALL_JOB.replace("top_k = 3", "top_k = 0"), "attribute top_k: got 0"),
    "no warm-up": (SMALL_JOB.replace("[attr", "warmup_steps = 0\n[attr"), "warmup_steps: got 0"),
    "bad size": (SMALL_JOB.replace("64 KiB", "many"), "budget.host: got 'many'"),
    "unknown tier": (SMALL_JOB.replace("host =", "hose ="), "budget.hose"),
    "small budget": (SMALL_JOB.replace("64 KiB", "600 B"), "cannot reserve"),
    "no trace": (SMALL_JOB.replace("trace.npz", "gone.npz"), "gone.npz: got No such file"),
    "bool as number": (SMALL_JOB.replace("top_k = 3", "top_k = true"), "attributes.top_k"),
    "folder": ("folder = '/x'\n" + SMALL_JOB, "job.toml.folder"),
    "deep": (SMALL_JOB + "x = " + "[" * 5000, "accepted: TOML"),
    "long integer": (SMALL_JOB.replace("top_k = 3", "top_k = " + "9" * 5000), "accepted: TOML"),
    "0%": (SMALL_JOB.replace("64 KiB", "0%"), "budget.host: got '0%'"),
    "bits": (SMALL_JOB.replace("64 KiB", "8 Mbit"), "budget.host: got '8 Mbit'"),
    "half a byte": (SMALL_JOB.replace("64 KiB", "1.5"), "budget.host: got '1.5'"),
    "budget no table": ("budget = 3\n" + SMALL_JOB.split("[budget]", maxsplit=1)[0], "[budget]"),
}


@pytest.mark.parametrize("fault", BAD_JOBS)
def test_a_bad_job_is_one_clear_error(run: Run, tmp_path: Path, fault: str) -> None:
    text, message = BAD_JOBS[fault]
    path = write_job(tmp_path, text)
    if not text:
        path.unlink()
    code, out, err = run("run", path)
    assert code == 2
    assert message in err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert out == ""


BAD_TRACES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"query": np.zeros((5, 4, 8), np.float32)}, "query: got float32"),
    "rank": ({"key": np.zeros((40, 8, 1), np.uint16)}, "key: got uint16 [40, 8, 1]"),
    "depth": ({"key": np.zeros((40, 9), np.uint16)}, "key shape"),
    "heads": ({"weights": np.zeros((5, 3), np.uint16)}, "weights shape"),
    "tokens": ({"tokens": np.array(["a"])}, "tokens shape"),
    "numbers as tokens": ({"tokens": np.arange(40)}, "tokens: got int64"),
    "more queries than keys": (small_arrays(41, 40), "number of queries"),
    "pickled": ({"tokens": np.array([{}] * 40, object)}, "trace"),
}


@pytest.mark.parametrize("fault", BAD_TRACES)
def test_a_bad_trace_is_one_clear_error(run: Run, tmp_path: Path, fault: str) -> None:
    arrays, message = BAD_TRACES[fault]
    code, _, err = run("run", write_job(tmp_path, **arrays))
    assert code == 2
    assert message in err


def test_a_trace_without_an_array_names_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    np.savez(path, **{k: v for k, v in small_arrays().items() if k != "weights"})
    with pytest.raises(JobError, match="weights: got no such array"):
        load_trace(path)


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(b"not an archive")
    with pytest.raises(JobError, match=r"readable \.npz"):
        load_trace(path)


def test_options_win_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    environ = {"NXRT_BUDGET_HOST": "1 KiB", "NXRT_BUDGET_PINNED": "2 KiB"}
    job = load_job(path, environ=environ)
    assert (job.budget.host.nbytes, job.budget.pinned.nbytes) == (65_536, 2048)
    job = load_job(path, environ=environ, budgets={"host": "3 KiB"}, top_k=9, provider="auto")
    assert job.budget.host.nbytes == 3072
    assert (job.attributes["top_k"], job.job.provider) == (9, "auto")


@pytest.mark.parametrize("option", ["device", "device=x", "disk=1GiB", "toml=1", "cls=1"])
def test_a_bad_budget_option_is_refused(run: Run, tmp_path: Path, option: str) -> None:
    code, _, err = run("run", write_job(tmp_path), "--budget", option)
    assert code == 2
    assert "accepted" in err


def test_cuda_without_a_device_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    if driver.probe().is_available:
        pytest.skip("this machine has a device")
    code, _, err = run("run", write_job(tmp_path), "--provider", "cuda")
    assert code == 2
    assert "no CUDA device can be used" in err


def test_what_could_steer_a_terminal_is_not_passed_on(run: Run, tmp_path: Path) -> None:
    tokens = np.array(["\x1b[31mred\x1b[0m\x07"] * 40)
    out = run("run", write_job(tmp_path, tokens=tokens))[1]
    assert "\x1b[31m" not in out
    assert "·[31mred" in out


def test_a_reader_that_leaves_ends_the_command_quietly(tmp_path: Path) -> None:
    command = f"{sys.executable} -m nxrt run {write_job(tmp_path)} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], check=True, capture_output=True, timeout=60, text=True
    )
    assert done.stdout.strip() in {"141", "0"}  # 0 where the output fitted the pipe in time
    assert done.stderr == ""


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nxrt", "run", str(write_job(tmp_path))],
            check=False, stdout=full, stderr=subprocess.PIPE, timeout=60, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_defect_is_not_mistaken_for_a_differing_row(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr(decode, "oracle_rows", fail)
    code, _, err = run("run", write_job(tmp_path))
    assert code == app.DEFECT
    assert "planted" in err


def test_a_job_that_fails_midway_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_job(write_job(tmp_path))
    trace = load_trace(job.trace_path)
    governors: list[Any] = []
    real = MemoryGovernor

    def remembered(*args: Any, **kwargs: Any) -> Any:
        governors.append(real(*args, **kwargs))
        return governors[-1]

    def fail(state: Any) -> None:
        if state.done == 3:
            raise JobError("planted", found="x", accepted="y")

    monkeypatch.setattr(decode, "MemoryGovernor", remembered)
    with pytest.raises(NxrtError, match="planted"):
        run_decode(job, trace, fail)
    assert all(tier.used == 0 for tier in governors[0].snapshot())


def test_budget_errors_are_typed(tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        load_job(write_job(tmp_path), budgets={"host": "-1"})


def test_a_terminal_without_unicode_is_served() -> None:
    command = [sys.executable, "-m", "nxrt", "run", str(EXAMPLE), "--provider", "cpu"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
    assert b"64 of 64" in done.stdout
    assert done.stderr == b""


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "nxrt", "run", str(EXAMPLE), "--provider", "cpu", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=120, text=True)
    assert json.loads(done.stdout)["rows"]["equal"] == 64
