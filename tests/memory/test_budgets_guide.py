"""What docs/budgets.md shows is what runs, and its tables name what there is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nxrt.errors import BudgetError
from nxrt.memory.budget import MemoryBudget, TierBudget
from nxrt.memory.tier import Role

GUIDE = (Path(__file__).parents[2] / "docs" / "budgets.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guide_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("budgets.toml").write_text(blocks("toml")[0], encoding="utf-8")
    names: dict[str, Any] = {}
    printed = []
    for block in blocks("python"):
        exec(block, names)  # noqa: S102  (our own guide)
        printed.append(capsys.readouterr().out.split("\n"))
    mib, gib = 2**20, 2**30
    assert printed[0][0] == str(68 * gib)
    assert printed[1][0] == str([500 * mib] * 3)
    assert printed[2][0] == f"{40 * gib} 0"
    assert printed[3][-2] == str(300 * mib)
    assert printed[4][-2].endswith(f"('engine', {40 * gib})")
    assert printed[5][0] == f"process/engine  limit {51 * gib}"
    assert printed[6][0].startswith("nxrt_memory_used_bytes{")
    events = [json.loads(line) for line in Path("events.jsonl").read_text().splitlines()]
    assert {"reserve", "commit", "watermark", "shrink", "limit", "refuse"} <= {
        event["event"] for event in events
    }


@pytest.mark.parametrize("name", [role.value for role in Role])
def test_the_guide_names_every_role(name: str) -> None:
    assert f"`{name}`" in GUIDE


@pytest.mark.parametrize("name", sorted(TierBudget.model_fields.keys() - {"nbytes", "fraction"}))
def test_the_guide_names_every_key(name: str) -> None:
    assert f"`{name}`" in GUIDE


def test_the_guide_names_every_variable() -> None:
    with pytest.raises(BudgetError) as caught:
        MemoryBudget.load(environ={"NXRT_BUDGET_NONE": "1"})
    suffixes = {
        name.split("_", 3)[3] for name in caught.value.accepted.split(", ") if name.count("_") > 2
    }
    assert suffixes
    assert [suffix for suffix in suffixes if f"`_{suffix}`" not in GUIDE] == []
