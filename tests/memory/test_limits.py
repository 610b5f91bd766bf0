"""Check limits inside a tier, and limits that change while they are in use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nxrt.errors import BudgetError, InvalidInputError, LeaseRefusedError
from nxrt.memory.budget import MemoryBudget, TierBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, PINNED, Role, device_tier
from nxrt.tensor import MAX_SIZE
from tests.helpers.reserving import close_all, reserve, used

LIMIT = 1000
DEVICE = device_tier(0)


def with_budget(**host: object) -> MemoryGovernor:
    return MemoryGovernor(MemoryBudget.of(host=host))


@pytest.fixture
def governor() -> Iterator[MemoryGovernor]:
    governor = MemoryGovernor(MemoryBudget.of(host=LIMIT))
    yield governor
    assert governor.outstanding() == ()


@pytest.mark.parametrize("role", Role)
def test_a_cap_holds_for_its_role_over_all_holders(role: Role) -> None:
    governor = with_budget(limit=LIMIT, roles={role.value: 300})
    other = next(other for other in Role if other is not role)
    with reserve(governor, 200, "a", role=role), reserve(governor, 500, "a", role=other):
        with pytest.raises(LeaseRefusedError) as caught:
            reserve(governor, 101, "b", role=role)
        reserve(governor, 100, "b", role=role).close()
    error = caught.value
    assert (error.available, error.limit, error.cap) == (100, 300, f"role {role.value}")
    assert error.largest_holders == (("a", 200),)


def test_a_cap_holds_for_its_holder_over_all_roles() -> None:
    governor = with_budget(holders={"cache": 300})
    with (
        reserve(governor, 200, "cache"),
        reserve(governor, 500, "other"),
        pytest.raises(LeaseRefusedError) as caught,
    ):
        reserve(governor, 101, "cache", role=Role.KV_CACHE)
    assert (caught.value.available, caught.value.cap) == (100, "holder cache")


def test_a_star_caps_each_one_that_is_not_named() -> None:
    governor = with_budget(requests={"*": 100, "vip": 500})
    with (
        reserve(governor, 100, request="1"),
        reserve(governor, 100, request="2"),
        reserve(governor, 500, request="vip"),
        reserve(governor, 5000),
    ):
        for request in ("1", "2", "vip"):
            with pytest.raises(LeaseRefusedError) as caught:
                reserve(governor, 1, request=request)
            assert caught.value.cap == f"request {request}"


def test_a_share_of_a_cap_is_one_of_the_limit() -> None:
    governor = with_budget(limit=LIMIT, roles={"kv_cache": "60%"})
    with pytest.raises(LeaseRefusedError) as caught:
        reserve(governor, 601, role=Role.KV_CACHE)
    assert caught.value.limit == 600


def test_a_share_of_a_cap_without_a_limit_is_an_error_that_says_so() -> None:
    governor = with_budget(roles={"kv_cache": "60%"})
    with pytest.raises(BudgetError, match="roles of host: got 60% of a limit that is not set"):
        reserve(governor, 1)
    assert governor.snapshot() == ()


def test_caps_above_the_limit_do_not_raise_it() -> None:
    governor = with_budget(limit=LIMIT, roles={"kv_cache": 5000})
    with pytest.raises(LeaseRefusedError) as caught:
        reserve(governor, LIMIT + 1, role=Role.KV_CACHE)
    assert caught.value.cap == ""


def test_caps_are_reported_while_somebody_is_under_them() -> None:
    governor = with_budget(roles={"kv_cache": 300}, holders={"*": 200})
    with reserve(governor, 150, "a", role=Role.KV_CACHE):
        caps = [(cap.cap, cap.limit, cap.used) for cap in governor.usage(HOST).caps]
    assert caps == [("holder a", 200, 150), ("role kv_cache", 300, 150)]
    assert governor.usage(HOST).caps == ()


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"headroom": 400}, 600),
        ({"limit": "90%", "headroom": 400}, 600),
        ({"limit": "50%", "headroom": 400}, 500),
        ({"limit": 300, "headroom": "10%"}, 300),
        ({"limit": 950, "headroom": "10%"}, 900),
        ({"headroom": 1000}, 0),
    ],
    ids=str,
)
def test_headroom_is_left_to_others(budget: dict[str, object], expected: int) -> None:
    governor = MemoryGovernor(MemoryBudget.of(device=budget), capacities={DEVICE: 1000})
    assert governor.usage(DEVICE).limit == expected


def test_headroom_of_what_nobody_measured_is_an_error_that_says_so() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device={"limit": 5, "headroom": 1}))
    with pytest.raises(BudgetError, match="headroom of device:0: got 1 B of a capacity nobody"):
        governor.usage(DEVICE)


def test_headroom_above_what_was_measured_is_an_error_that_says_so() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device={"headroom": 11}), capacities={DEVICE: 10})
    with pytest.raises(BudgetError, match="headroom of device:0: got 11 B of a capacity of 10 B"):
        governor.usage(DEVICE)


def test_lowering_a_limit_takes_nothing_and_says_what_it_would_take(
    governor: MemoryGovernor,
) -> None:
    with reserve(governor, 600, "a"), reserve(governor, 300, "b"):
        change = governor.set_limit(HOST, 500)
        assert used(governor) == 900
        assert (change.previous, change.limit, change.used, change.overage) == (1000, 500, 900, 400)
        assert change.largest_holders == (("a", 600), ("b", 300))
        assert governor.usage(HOST).oversubscribed == 400
        with pytest.raises(LeaseRefusedError):
            reserve(governor, 1)
    reserve(governor, 500).close()


def test_raising_a_limit_admits_more_at_once(governor: MemoryGovernor) -> None:
    change = governor.set_limit(HOST, "2 kB")
    assert (change.previous, change.limit, change.overage) == (1000, 2000, 0)
    reserve(governor, 2000).close()


def test_a_limit_can_be_lifted(governor: MemoryGovernor) -> None:
    assert governor.set_limit(HOST, None).limit is None
    reserve(governor, MAX_SIZE).close()


def test_a_share_as_a_new_limit_is_one_of_the_capacity() -> None:
    governor = MemoryGovernor(capacities={DEVICE: 1000})
    assert governor.set_limit(DEVICE, "85%").limit == 850


def test_a_limit_that_is_not_accepted_changes_nothing(governor: MemoryGovernor) -> None:
    values: tuple[Any, ...] = ("lots", -1, True, 2**63, 1.5)
    for value in values:
        with pytest.raises(BudgetError, match="limit of host: got"):
            governor.set_limit(HOST, value)
    with pytest.raises(BudgetError, match="budget of device:0"):
        governor.set_limit(DEVICE, "85%")
    assert governor.usage(HOST).limit == LIMIT
    assert governor.usage(DEVICE).limit is None


def test_what_names_two_caps_is_refused(governor: MemoryGovernor) -> None:
    with pytest.raises(InvalidInputError, match="one of role, holder and request"):
        governor.set_limit(HOST, 1, role=Role.GRAPH, holder="x")


def test_a_cap_set_while_it_is_passed_refuses_more(governor: MemoryGovernor) -> None:
    with reserve(governor, 300, "a", role=Role.KV_CACHE) as lease:
        change = governor.set_limit(HOST, 200, role=Role.KV_CACHE)
        assert (change.cap, change.previous, change.overage) == ("role kv_cache", None, 100)
        with pytest.raises(LeaseRefusedError):
            lease.grow(1)
        lease.shrink(150)
        lease.grow(50)
        assert governor.set_limit(HOST, None, role=Role.KV_CACHE).previous == 200
        lease.grow(800)


@pytest.mark.parametrize("label", ["holder", "request"])
def test_caps_of_holders_and_requests_can_be_set(governor: MemoryGovernor, label: str) -> None:
    labels: dict[str, Any] = {"holder": "h", "request": "r"}
    named: dict[str, Any] = {label: labels[label]}
    governor.set_limit(HOST, 100, **named)
    with reserve(governor, 100, **labels):
        with pytest.raises(LeaseRefusedError, match=f"the cap of {label} {labels[label]} in"):
            reserve(governor, 1, **labels)
        other = {**labels, label: "other"}
        reserve(governor, 900, **other).close()


def test_shares_follow_a_limit_that_changes() -> None:
    governor = with_budget(limit=LIMIT, roles={"kv_cache": "50%"}, watermark="90%")
    with reserve(governor, 400, role=Role.KV_CACHE) as lease:
        governor.set_limit(HOST, 2000)
        lease.grow(600)
        assert governor.usage(HOST).watermark == 1800
        with pytest.raises(LeaseRefusedError):
            lease.grow(1)
    assert governor.outstanding() == ()


def test_a_limit_cannot_be_lifted_where_shares_are_taken_of_it() -> None:
    governor = with_budget(limit=LIMIT, roles={"kv_cache": "50%"})
    with pytest.raises(BudgetError, match="a limit that is not set"):
        governor.set_limit(HOST, None)
    assert governor.usage(HOST).limit == LIMIT


def test_changing_one_limit_leaves_the_others(governor: MemoryGovernor) -> None:
    child = governor.child("child", MemoryBudget.of(host=50))
    leases = [reserve(child, 10), reserve(governor, 20, tier=PINNED), reserve(governor, 30)]
    governor.set_limit(HOST, 35)
    assert (child.usage(HOST).limit, used(child), used(governor)) == (50, 10, 40)
    assert used(governor, PINNED) == 20
    close_all(*leases)
    child.close()


FILE = """
[budget]
pinned = "1 MiB"
[budget.device]
limit = "24 GiB"
headroom = "1 GiB"
watermark = "90%"
[budget.device.roles]
kv_cache = "60%"
workspace = 5
[budget.device.requests]
"*" = "2 GiB"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_a_file_says_all_of_a_tier(file: Path) -> None:
    device = MemoryBudget.load(toml=file, environ={}).device
    assert device.nbytes == 24 * 2**30
    assert device.watermark is not None
    assert device.watermark.fraction == 0.9
    assert {role.value: cap.nbytes or cap.fraction for role, cap in device.roles.items()} == {
        "kv_cache": 0.6,
        "workspace": 5,
    }
    assert device.requests["*"].nbytes == 2 * 2**30


def test_sources_are_merged_key_by_key(file: Path) -> None:
    environ = {
        "NXRT_BUDGET_DEVICE": "1",
        "NXRT_BUDGET_DEVICE_WATERMARK": "1",
        "NXRT_BUDGET_DEVICE_ROLES": "kv_cache = 1, graph = 2",
        "NXRT_BUDGET_DEVICE_HOLDERS": "a=3",
        "NXRT_BUDGET_PINNED_HEADROOM": "7",
    }
    budget = MemoryBudget.load(toml=file, environ=environ, device={"limit": 9, "roles": {}})
    device = budget.device
    assert (device.nbytes, device.fraction) == (9, None)
    assert device.watermark is not None
    assert device.watermark.fraction == 0.9
    roles = {role.value: cap.nbytes or cap.fraction for role, cap in device.roles.items()}
    assert roles == {"kv_cache": 0.6, "workspace": 5, "graph": 2}
    assert device.holders["a"].nbytes == 3
    assert budget.pinned.headroom is not None
    assert (budget.pinned.nbytes, budget.pinned.headroom.nbytes) == (2**20, 7)


def test_a_limit_of_one_kind_replaces_one_of_another_kind(file: Path) -> None:
    device = MemoryBudget.load(toml=file, environ={}, device="50%").device
    assert (device.nbytes, device.fraction) == (None, 0.5)


def test_a_model_from_code_replaces_all_that_others_say(file: Path) -> None:
    budget = MemoryBudget.load(toml=file, environ={}, device=TierBudget())
    assert budget.device == TierBudget()


@pytest.mark.parametrize("source", ["code", "file", "environment"])
@pytest.mark.parametrize("key", ["", "headroom", "watermark"])
def test_a_value_that_is_not_accepted_names_its_key_and_where_it_is_written(
    tmp_path: Path, source: str, key: str
) -> None:
    path = tmp_path / "job.toml"
    table = {key or "limit": "lots"}
    variable = f"NXRT_BUDGET_HOST{f'_{key.upper()}' if key else ''}"
    path.write_text(f"[budget.host]\n{key or 'limit'} = 'lots'\n" if source == "file" else "")
    sources = {"code": "code", "file": str(path), "environment": f"environment variable {variable}"}
    with pytest.raises(BudgetError) as caught:
        MemoryBudget.load(
            toml=path,
            environ={variable: "lots"} if source == "environment" else {},
            **({"host": table} if source == "code" else {}),
        )
    assert caught.value.subject == f"budget.host{f'.{key}' if key else ''}"
    assert sources[source] in str(caught.value)


@pytest.mark.parametrize(
    ("axis", "name", "value", "key"),
    [
        ("roles", "kv_cash", 1, "budget.host.roles.kv_cash"),
        ("roles", "kv_cache", "lots", "budget.host.roles.kv_cache"),
        ("holders", "a b", -1, "budget.host.holders.a b"),
        ("requests", "*", {"nbytes": 1, "fraction": 0.5}, "budget.host.requests.*"),
        ("requests", "*", {"bytes": 1}, "budget.host.requests.*.bytes"),
    ],
)
def test_a_cap_that_is_not_accepted_names_its_key(
    axis: str, name: str, value: object, key: str
) -> None:
    with pytest.raises(BudgetError) as caught:
        MemoryBudget.of(host={axis: {name: value}})
    assert caught.value.subject == key
    assert "it comes from code" in str(caught.value)


def test_caps_that_are_no_table_name_their_key() -> None:
    with pytest.raises(BudgetError, match=r"budget\.host\.roles: got 5"):
        MemoryBudget.of(host={"roles": 5})


@pytest.mark.parametrize("text", ["kv_cache", "=5", "kv_cache=1,graph"])
def test_a_list_of_caps_that_cannot_be_read_names_its_variable(text: str) -> None:
    with pytest.raises(BudgetError, match="NXRT_BUDGET_HOST_ROLES: got"):
        MemoryBudget.load(environ={"NXRT_BUDGET_HOST_ROLES": text})


def test_two_ways_to_write_one_limit_are_refused() -> None:
    with pytest.raises(BudgetError, match=r"budget\.host: .* not two of them"):
        MemoryBudget.of(host={"limit": 1, "nbytes": 1})
