"""A plan and a run of the same job agree to the byte, line by line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "glm_decode.toml"
GEOMETRY = ROOT / "tests" / "planning" / "glm_decode_geometry.toml"
Command = Callable[..., tuple[int, str, str]]
Lines = dict[tuple[str, str, str], int]

ONLY_ON_A_DEVICE = {
    ("device:0", "workspace", "DsaIndexSelect"),  # the reference needs none that is charged
    ("device:0", "workspace", "DsaIndexSelect control"),  # nor has it thread blocks that meet
    ("device:0", "graph", "captured graph"),  # the CPU captures nothing
    ("pinned", "staging", "staging"),  # and copies without page-locked memory
}


def planned(command: Command) -> Lines:
    out = command("plan", "--model", GEOMETRY, "--context", 4096, "--batch", 1, "--json")[1]
    lines: Lines = {}
    for line in json.loads(out)["lines"]:
        key = (line["tier"], line["role"], line["holder"])
        lines[key] = lines.get(key, 0) + line["nbytes"]
    return lines


def charged(command: Command, provider: str) -> tuple[Lines, dict[str, int]]:
    """Return the peaks of the run by tier, role and holder, and by tier."""
    code, out, err = command("run", EXAMPLE, "--provider", provider, "--json")
    assert code == 0, err
    memory: list[dict[str, Any]] = json.loads(out)["memory"]
    lines = {
        (tier["tier"], holder["role"], holder["holder"]): holder["peak"]
        for tier in memory
        for holder in tier["holders"]
    }
    return lines, {tier["tier"]: tier["peak"] for tier in memory}


def by_tier(lines: Lines) -> dict[str, int]:
    sums: dict[str, int] = {}
    for (tier, _, _), nbytes in lines.items():
        sums[tier] = sums.get(tier, 0) + nbytes
    return sums


@pytest.mark.gpu
@pytest.mark.fake
def test_on_a_device_every_line_and_every_peak_is_as_planned(
    command: Command, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NXRT_CACHE_DIR", str(cache_dir))
    plan = planned(command)
    lines, peaks = charged(command, "cuda")
    assert lines == plan
    assert peaks == by_tier(plan)


def test_on_the_cpu_the_values_are_as_planned_and_the_rest_is_named(command: Command) -> None:
    plan = planned(command)
    lines, peaks = charged(command, "cpu")
    values = {key: nbytes for key, nbytes in plan.items() if key not in ONLY_ON_A_DEVICE}
    # What a device would hold, the CPU provider holds in host memory.
    on_host = {("host", role, holder): nbytes for (_, role, holder), nbytes in values.items()}
    assert plan.keys() >= ONLY_ON_A_DEVICE
    assert lines == on_host
    assert peaks == by_tier(on_host)


def test_a_budget_of_what_was_planned_admits_the_run(command: Command) -> None:
    host = sum(n for key, n in planned(command).items() if key not in ONLY_ON_A_DEVICE)
    run = ("run", EXAMPLE, "--provider", "cpu", "--json")
    assert command(*run, "--budget", f"host={host}")[0] == 0
    code, _, err = command(*run, "--budget", f"host={host - 1}")
    assert code == 2
    assert "cannot reserve" in err
