"""Every key of a budget, through the command line: as an option, in a file, in the environment."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxrt.cli.budget_options import parse_budgets
from nxrt.errors import InvalidInputError

Command = Callable[..., tuple[int, str, str]]
KEY_NBYTES = 40 * 8 * 2


def append(job: Path, text: str) -> None:
    job.write_text(job.read_text() + text)


def host_of(out: str) -> dict[str, Any]:
    tiers = json.loads(out)["memory"]
    host: dict[str, Any] = next(tier for tier in tiers if tier["tier"] == "host")
    return host


def test_every_key_can_be_an_option(command: Command, job: Path) -> None:
    options = [
        "host=64KiB",
        "host.headroom=1KiB",
        "host.watermark=10%",
        "host.roles.kv_cache=50%",
        "host.holders.key=30KiB",
        "host.requests.*=1KiB",
    ]
    given = [part for option in options for part in ("--budget", option)]
    code, out, err = command("run", job, "--json", *given)
    assert code == 0, err
    host = host_of(out)
    assert (host["limit"], host["watermark"]) == (65_536, 6553)
    caps = {cap["cap"]: (cap["limit"], cap["used"]) for cap in host["caps"]}
    assert caps == {
        "role kv_cache": (32_768, KEY_NBYTES),
        "holder key": (30_720, KEY_NBYTES),
    }


def test_a_job_file_and_the_environment_have_every_key_too(
    command: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = '\n[budget.host]\nlimit = "64 KiB"\nwatermark = "50%"\nroles.kv_cache = "20 KiB"\n'
    append(job, table)
    monkeypatch.setenv("NXRT_BUDGET_HOST_WATERMARK", "10%")
    monkeypatch.setenv("NXRT_BUDGET_HOST_HOLDERS", "key=10KiB")
    monkeypatch.setenv("NXRT_BUDGET_HOST_ROLES", "kv_cache=30KiB, activation=40KiB")
    host = host_of(command("run", job, "--json")[1])
    caps = {cap["cap"]: cap["limit"] for cap in host["caps"]}
    assert (host["limit"], host["watermark"]) == (65_536, 32_768)
    assert caps == {"role kv_cache": 20_480, "role activation": 40_960, "holder key": 10_240}
    out = command("run", job, "--json", "--budget", "host.roles.kv_cache=5KiB")[1]
    caps = {cap["cap"]: cap["limit"] for cap in host_of(out)["caps"]}
    assert caps["role kv_cache"] == 5120


@pytest.mark.parametrize("option", ["host.roles.kv_cache=639", "host.holders.key=639"])
def test_a_cap_refuses_what_would_pass_it(command: Command, job: Path, option: str) -> None:
    code, _, err = command("run", job, "--budget", option)
    assert code == 2
    assert "cannot reserve" in err
    grown = option.replace("639", "640")
    assert command("run", job, "--json", "--budget", grown)[0] == 0


WRONG = {
    "option": (("host.watermark=110%",), "", {}, "budget.host.watermark: got '110%'", "--budget"),
    "role in an option": (("host.roles.caches=1KiB",), "", {}, "budget.host.roles", "--budget"),
    "file": ((), 'headroom = "much"\n', {}, "budget.host.headroom: got 'much'", "job.toml"),
    "role in the file": (
        (),
        'roles.kv_cache = "0%"\n',
        {},
        "budget.host.roles.kv_cache: got '0%'",
        "job.toml",
    ),
    "environment": (
        (),
        "",
        {"NXRT_BUDGET_HOST_ROLES": "kv_cache=some"},
        "budget.host.roles.kv_cache: got 'some'",
        "the environment variable NXRT_BUDGET_HOST_ROLES",
    ),
    "unknown variable": (
        (),
        "",
        {"NXRT_BUDGET_HOST_SLACK": "1"},
        "a variable nobody reads",
        "HOST",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_value_is_refused_with_its_key_and_its_source(
    command: Command, job: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    options, table, environ, message, source = WRONG[fault]
    append(job, "\n[budget.host]\n" + table if table else "")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    given = [part for option in options for part in ("--budget", option)]
    code, out, err = command("run", job, *given)
    assert (code, out) == (2, "")
    assert message in err
    assert source in err
    assert err.count("error:") == 1


BAD = ["host", "hose=1", "host.=1", "host.limits=1", "host.roles=1", "host.roles.=1", "host.x.y=1"]


@pytest.mark.parametrize("option", [*BAD, "host.watermark.x=1", "=1", "x.toml"])
def test_what_is_no_key_is_refused(command: Command, job: Path, option: str) -> None:
    with pytest.raises(InvalidInputError, match="TIER"):
        parse_budgets([option])
    code, _, err = command("run", job, "--budget", option)
    assert code == 2
    assert f"--budget: got {option!r}" in err


def test_names_may_have_dots_and_equals_signs() -> None:
    options = ["device.holders.layer.3=x=1KiB", "device=2", "device.limit=3", "host=4"]
    assert parse_budgets(options) == {
        "device": {"holders": {"layer.3=x": "1KiB"}, "limit": "3"},
        "host": {"limit": "4"},
    }


def test_the_table_shows_caps_and_the_watermark_at_80_columns(
    command: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = (
        "host=1MiB",
        "host.watermark=512",
        "host.roles.kv_cache=2KiB",
        "host.holders.key=3KiB",
    )
    given = [part for option in options for part in ("--budget", option)]
    out = command("run", job, *given)[1]
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in out.splitlines()
        if line.startswith("│ host")
    ]
    assert all(len(line) <= 80 for line in out.splitlines())
    assert ["host", "kv_cache", "all", "640 B", "640 B", "2.0 KiB"] in rows
    assert ["host", "all", "key", "640 B", "640 B", "3.0 KiB"] in rows
    assert ["host", "watermark", "reached", "", "", "512 B"] in rows
    assert rows[-1][-1] == "1.0 MiB"


def test_a_plan_keeps_to_the_caps_of_roles(command: Command) -> None:
    model = ("plan", "--model", "glm-5.2", "--context", 2048)
    cap = ("--budget", "device=1GiB", "--budget", "device.roles.workspace=1MiB")
    # Each of 21 kernels holds a row's outcome, 256 B, and control words, 53,392 B.
    lacking = 21 * (256 + 53_392) - 2**20
    code, out, _ = command(*model, *cap)
    assert code == 1
    assert f"it does not fit: role workspace of device:0 lacks {lacking / 2**10:.2f} KiB" in out
    data = json.loads(command(*model, *cap, "--json")[1])
    assert data["budget_line"] == 'device.roles.workspace = "2 MiB"'
    assert command(*model, *cap[:3], "device.roles.workspace=2MiB")[0] == 0


def test_a_plan_measures_what_a_headroom_needs(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nxrt.cli.plan.measured_host_capacity", lambda: 3 * 2**20)
    model = ("plan", "--model", "glm-5.2", "--context", 2048, "--json")
    totals = json.loads(command(*model, "--budget", "pinned.headroom=1MiB")[1])["totals"]
    assert [total["limit"] for total in totals] == [None, 2 * 2**20]
