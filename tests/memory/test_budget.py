"""Check budgets: sources and their precedence, sizes and shares, errors that name the key."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nxrt.errors import BudgetError
from nxrt.memory.budget import MemoryBudget, TierBudget, measured_host_capacity
from nxrt.memory.tier import HOST, PINNED, Tier, device_tier
from nxrt.tensor import MAX_SIZE

KIB, MIB, GIB = 2**10, 2**20, 2**30
KEYS = ("device", "pinned", "host")
TIERS = {"device": device_tier(3), "pinned": PINNED, "host": HOST}


def limits(budget: MemoryBudget) -> tuple[int | None, ...]:
    return tuple(budget.limit(TIERS[key], None) for key in KEYS)


def toml_file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_budget_without_sources_has_no_limits() -> None:
    assert limits(MemoryBudget.load(environ={})) == (None, None, None)


def test_code_wins_over_toml_and_toml_over_environment_key_by_key(tmp_path: Path) -> None:
    environ = {"NXRT_BUDGET_DEVICE": "1", "NXRT_BUDGET_PINNED": "1", "NXRT_BUDGET_HOST": "1"}
    toml = toml_file(tmp_path, "[budget]\ndevice = 2\npinned = 2\n")
    assert limits(MemoryBudget.load(device=3, toml=toml, environ=environ)) == (3, 2, 1)


def test_overruled_source_is_not_judged(tmp_path: Path) -> None:
    toml = toml_file(tmp_path, "[budget]\ndevice = 'nonsense'\n")
    budget = MemoryBudget.load(device=3, toml=toml, environ={"NXRT_BUDGET_DEVICE": "worse"})
    assert budget.device.nbytes == 3


def test_environment_of_the_process_is_read_when_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NXRT_BUDGET_HOST", "7 KiB")
    assert MemoryBudget.load().host.nbytes == 7 * KIB


def test_a_variable_that_nobody_reads_is_refused() -> None:
    with pytest.raises(BudgetError, match="NXRT_BUDGET_HOSTT: got a variable nobody reads"):
        MemoryBudget.load(environ={"NXRT_BUDGET_HOSTT": "1"})


def test_environment_of_others_is_ignored() -> None:
    environ = {"BUDGET_HOST": "1", "nxrt_budget_host": "1"}
    assert limits(MemoryBudget.load(environ=environ)) == (None, None, None)


def test_toml_without_a_budget_table_sets_nothing(tmp_path: Path) -> None:
    toml = toml_file(tmp_path, "[other]\ndevice = 1\n")
    assert limits(MemoryBudget.load(toml=toml, environ={})) == (None, None, None)


def test_toml_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=re.escape(str(tmp_path / "none.toml"))):
        MemoryBudget.load(toml=tmp_path / "none.toml", environ={})


@pytest.mark.parametrize("text", ["[budget", "budget = 3", "budget = ['device']"])
def test_toml_without_a_readable_table_is_named(tmp_path: Path, text: str) -> None:
    toml = toml_file(tmp_path, text)
    with pytest.raises(BudgetError, match=re.escape(str(toml))):
        MemoryBudget.load(toml=toml, environ={})


def test_toml_that_is_not_text_is_named(tmp_path: Path) -> None:
    toml = tmp_path / "job.toml"
    toml.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BudgetError, match=re.escape(str(toml))):
        MemoryBudget.load(toml=toml, environ={})


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (MAX_SIZE, MAX_SIZE),
        ("0", 0),
        ("123", 123),
        ("24 GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        (" 0.5 MiB ", MIB // 2),
        ("1 GB", 10**9),
        ("7B", 7),
    ],
)
def test_size_is_read_as_bytes(size: object, expected: int) -> None:
    assert MemoryBudget.of(host=size).limit(HOST, None) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [("100%", 1000), ("85%", 850), (" 12.5 % ", 125), ("29%", 290), ("0.1%", 1), ("57%", 570)],
)
def test_share_is_taken_of_the_measured_capacity(share: str, expected: int) -> None:
    assert MemoryBudget.of(host=share).limit(HOST, 1000) == expected


def test_whole_percents_of_100_bytes_are_exact() -> None:
    shares = range(1, 101)
    assert [MemoryBudget.of(host=f"{n}%").limit(HOST, 100) for n in shares] == list(shares)


def test_share_never_exceeds_the_capacity() -> None:
    assert MemoryBudget.of(host="100%").limit(HOST, MAX_SIZE - 1) == MAX_SIZE - 1


MALFORMED: tuple[Any, ...] = (
    -1, True, False, None, 1.5, float("nan"), 2**63, 2**64, "", " ", "-1", "GiB", "1 XB", "1e3",
    "1,5 GiB", "24 GiB extra", "0x10", "0%", "-5%", "100.1%", "nan%", "50 % of it", "%",
    "99999999999 EiB", [1], b"1",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("size", MALFORMED, ids=repr)
def test_malformed_size_names_its_key(key: str, size: object) -> None:
    with pytest.raises(BudgetError, match=rf"^budget\.{key}\b") as caught:
        MemoryBudget.of(**{key: size})
    assert caught.value.accepted


@pytest.mark.parametrize("key", KEYS)
def test_malformed_size_in_the_environment_names_its_key(key: str) -> None:
    with pytest.raises(BudgetError, match=rf"budget\.{key}: got 'lots'"):
        MemoryBudget.load(environ={f"NXRT_BUDGET_{key.upper()}": "lots"})


@pytest.mark.parametrize("key", KEYS)
def test_malformed_size_in_toml_names_its_key(tmp_path: Path, key: str) -> None:
    toml = toml_file(tmp_path, f"[budget]\n{key} = 'lots'\n")
    with pytest.raises(BudgetError, match=rf"budget\.{key}: got 'lots'"):
        MemoryBudget.load(toml=toml, environ={})


@pytest.mark.parametrize("key", ["devise", "cls", "toml", "model_config"])
def test_unknown_key_is_refused_and_the_known_ones_listed(tmp_path: Path, key: str) -> None:
    toml = toml_file(tmp_path, f"[budget]\n{key} = 1\n")
    with pytest.raises(BudgetError, match=rf"budget\.{key}: .*known: device, pinned, host"):
        MemoryBudget.load(toml=toml, environ={})


def test_unknown_key_of_one_tier_lists_the_keys_of_a_tier() -> None:
    with pytest.raises(BudgetError, match=r"budget\.host\.bytes: .*known: nbytes, fraction"):
        MemoryBudget.of(host={"bytes": 1})


@pytest.mark.parametrize("value", [True, -1, 1.5, 2**63], ids=repr)
def test_malformed_bytes_of_a_table_name_their_key(value: object) -> None:
    with pytest.raises(BudgetError, match=r"budget\.host\.nbytes"):
        MemoryBudget.of(host={"nbytes": value})


def test_bytes_and_share_together_are_refused() -> None:
    with pytest.raises(BudgetError, match=r"budget\.host"):
        MemoryBudget.of(host={"nbytes": 5, "fraction": 0.5})


def test_share_of_a_capacity_nobody_measured_is_an_error_that_says_what_to_do() -> None:
    budget = MemoryBudget.of(device="85%")
    with pytest.raises(BudgetError, match=r"device:3: got 85% of .* write device = \"8 GiB\""):
        budget.limit(device_tier(3), None)


@pytest.mark.parametrize("ordinal", [0, 7])
def test_device_limit_holds_for_each_device_by_itself(ordinal: int) -> None:
    assert MemoryBudget.of(device=5).limit(device_tier(ordinal), None) == 5


@pytest.mark.parametrize("key", KEYS)
def test_limit_is_that_of_its_tier_only(key: str) -> None:
    expected = tuple(9 if other == key else None for other in KEYS)
    assert limits(MemoryBudget.of(**{key: 9})) == expected


def test_budget_cannot_be_changed() -> None:
    budget = MemoryBudget.of(host=1)
    with pytest.raises(ValidationError):
        budget.host = TierBudget(nbytes=2)


def test_host_capacity_is_measured_here() -> None:
    capacity = measured_host_capacity()
    assert capacity is None or capacity > MIB


def test_tiers_are_spoken_of_by_kind_and_ordinal() -> None:
    assert [str(tier) for tier in (HOST, PINNED, device_tier(2))] == ["host", "pinned", "device:2"]


def test_tiers_are_equal_by_value() -> None:
    assert {device_tier(1): "found"}[Tier(device_tier(0).kind, 1)] == "found"
