"""The planner: its sizes are those of the contracts, and its answers are the largest that fit."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxrt.errors import BudgetError, InvalidInputError, SizeOverflowError
from nxrt.kernels.dsa_index_select.routes import planned_nbytes
from nxrt.kernels.dsa_index_select.spec import Shape
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import PINNED, Role
from nxrt.planning.geometry import known_models, load_geometry
from nxrt.planning.planner import DEVICE, STAGING_NBYTES, Plan, PlanLine, plan
from nxrt.providers.cuda_session import GRAPH_NBYTES
from nxrt.runtime.staging import StagingRing
from nxrt.tensor import DType

MILLION = 2**20
KIB, MIB, GIB = 2**10, 2**20, 2**30
NO_LIMIT = MemoryBudget()
OUTCOMES_NBYTES = 256
"""What each kernel holds for few rows: 8 B a row, rounded up to a segment."""
CONTROL_NBYTES = 53_392
"""Of a row that is split over several thread blocks."""


def planned(model: str, context: Any = MILLION, batch: Any = 1, **limits: Any) -> Plan:
    budget = MemoryBudget.of(**limits)
    return plan(load_geometry(model), context=context, batch=batch, budget=budget)


def sizes(result: Plan) -> dict[tuple[str, str], int]:
    return {(line.holder, line.what): line.nbytes for line in result.lines}


def device_nbytes(result: Plan) -> int:
    return next(total.nbytes for total in result.totals if total.tier == DEVICE)


def test_v4_flash_at_a_million_is_as_its_contract_says() -> None:
    found = sizes(planned("deepseek-v4-flash"))
    four, many = "21 layers of ratio 4", "20 layers of ratio 128"
    assert found[four, "compressed records"] == 21 * 145.75 * MIB
    assert found[four, "index records"] == 21 * 17 * MIB
    assert found[many, "compressed records"] == 20 * 4664 * KIB
    assert found[four, "compression carries"] == 21 * 64 * KIB
    assert found[four, "index carries"] == 21 * 16 * KIB
    assert found[many, "compression carries"] == 20 * 512 * KIB
    assert found["all 43 layers", "dense window, 128 tokens"] == 43 * 128 * 583


def test_v4_flash_sums_to_the_published_figures() -> None:
    found = sizes(planned("deepseek-v4-flash"))
    records = sum(nbytes for (_, what), nbytes in found.items() if what.endswith("records"))
    carries = sum(nbytes for (_, what), nbytes in found.items() if what.endswith("carries"))
    window = sum(nbytes for (_, what), nbytes in found.items() if "window" in what)
    assert round(records / GIB, 2) == 3.43
    assert round(carries / MIB, 1) == 11.6
    assert round(window / MIB, 1) == 3.1


def test_glm_at_a_million_caches_every_token_and_scores_in_every_indexer() -> None:
    result = planned("glm-5.2")
    by_holder = {line.holder: line.nbytes for line in result.lines}
    assert by_holder == {
        "latent cache": 78 * MILLION * 1152,
        "indexer keys": 21 * MILLION * 256,
        "DsaIndexSelect": 21 * OUTCOMES_NBYTES,
        "DsaIndexSelect control": 21 * CONTROL_NBYTES,
        "captured graph": GRAPH_NBYTES,
        "staging": STAGING_NBYTES,
    }


def test_v32_at_its_limit() -> None:
    by_holder = {line.holder: line.nbytes for line in planned("deepseek-v3.2", 163_840).lines}
    assert by_holder["latent cache"] == 61 * 163_840 * 1152
    assert by_holder["indexer keys"] == 61 * 163_840 * 132
    assert by_holder["DsaIndexSelect"] == 61 * OUTCOMES_NBYTES
    assert by_holder["DsaIndexSelect control"] == 61 * CONTROL_NBYTES


def test_where_one_block_takes_a_row_no_control_words_are_held() -> None:
    by_holder = {line.holder: line.nbytes for line in planned("glm-5.2", 200, batch=3).lines}
    assert by_holder["DsaIndexSelect"] == 21 * OUTCOMES_NBYTES
    assert "DsaIndexSelect control" not in by_holder


@pytest.mark.parametrize("context", [1, 12, 2304, 8192])
def test_the_workspace_is_the_kernels_own_arithmetic(context: int) -> None:
    lines = planned("glm-5.2", context, batch=3).lines
    nbytes = sum(line.nbytes for line in lines if line.role is Role.WORKSPACE)
    assert nbytes == 21 * sum(planned_nbytes(Shape(3, 1, context, 32, 128, 2048), DType.BF16))


def test_staging_is_what_a_session_takes() -> None:
    defaults = inspect.signature(StagingRing).parameters
    slots, slot = defaults["num_slots"].default, defaults["slot_nbytes"].default
    assert slots * slot == STAGING_NBYTES == MIB


@pytest.mark.parametrize("model", known_models())
@pytest.mark.parametrize(("context", "batch"), [(1, 1), (127, 3), (4097, 2)])
def test_totals_are_the_sums_of_the_lines(model: str, context: int, batch: int) -> None:
    result = planned(model, context, batch)
    for total in result.totals:
        assert total.nbytes == sum(ln.nbytes for ln in result.lines if ln.tier == total.tier)
    assert [total.tier for total in result.totals] == [DEVICE, PINNED]


@pytest.mark.parametrize("model", known_models())
def test_a_governor_admits_exactly_what_is_planned(model: str) -> None:
    result = planned(model, 5000, 2)
    needed = device_nbytes(result)
    assert planned(model, 5000, 2, device=needed).fits
    assert not planned(model, 5000, 2, device=needed - 1).fits
    governor = MemoryGovernor(MemoryBudget.of(device=needed))
    leases = [
        governor.reserve(line.tier, line.nbytes, role=line.role, holder=line.holder)
        for line in result.lines
    ]
    usage = next(tier for tier in governor.snapshot() if tier.tier == DEVICE)
    assert (usage.used, usage.available) == (needed, 0)
    for lease in leases:
        lease.close()


@pytest.mark.parametrize("model", known_models())
def test_one_sequence_more_than_the_largest_batch_does_not_fit(model: str) -> None:
    largest = planned(model, 100_000, device="60 GiB").largest_batch
    assert largest is not None
    assert largest > 0
    assert planned(model, 100_000, largest, device="60 GiB").fits
    assert not planned(model, 100_000, largest + 1, device="60 GiB").fits


@pytest.mark.parametrize("model", known_models())
@pytest.mark.parametrize("batch", [1, 7])
def test_one_token_more_than_the_longest_context_does_not_fit(model: str, batch: int) -> None:
    longest = planned(model, 100, batch, device="900 MiB").longest_context
    assert 0 < longest < load_geometry(model).max_context
    assert planned(model, longest, batch, device="900 MiB").fits
    assert not planned(model, longest + 1, batch, device="900 MiB").fits


@pytest.mark.parametrize("model", known_models())
def test_what_is_needed_never_shrinks_with_the_context_or_the_batch(model: str) -> None:
    # The binary searches rest on it.
    contexts = [*range(1, 300), *np.linspace(300, 163_840, 60).astype(int).tolist()]
    needed = [device_nbytes(planned(model, context)) for context in contexts]
    assert needed == sorted(needed)
    needed = [device_nbytes(planned(model, 1000, batch)) for batch in range(1, 50)]
    assert needed == sorted(needed)


def test_the_longest_context_ends_at_the_models_limit() -> None:
    assert planned("deepseek-v3.2", 5, device="100 TiB").longest_context == 163_840


def test_without_a_limit_every_batch_fits() -> None:
    result = planned("glm-5.2")
    assert result.fits
    assert result.largest_batch is None
    assert result.longest_context == MILLION
    assert result.budget_line == ""


def test_where_nothing_fits_the_answers_are_0() -> None:
    result = planned("glm-5.2", 10, device=1000)
    assert (result.largest_batch, result.longest_context) == (0, 0)
    result = planned("glm-5.2", 10, pinned=1000)
    assert (result.largest_batch, result.longest_context) == (0, 0)


def test_a_batch_without_a_limit_in_sight_is_found_too() -> None:
    largest = planned("glm-5.2", MILLION, device=2**63 - 1).largest_batch
    assert largest is not None
    assert planned("glm-5.2", MILLION, largest, device=2**63 - 1).fits
    with pytest.raises(SizeOverflowError):
        planned("glm-5.2", MILLION, largest + 1, device=2**63 - 1)


@pytest.mark.parametrize(
    ("model", "context", "batch", "line"),
    [
        ("glm-5.2", MILLION, 1, 'device = "94 GiB"'),
        ("deepseek-v3.2", 163_840, 8, 'device = "96 GiB"'),
        # Caches of exactly 186 MiB, 21 times 256 + 53,392 B, and a graph of 96 KiB.
        ("glm-5.2", 2048, 1, 'device = "188 MiB"'),
    ],
)
def test_a_plan_that_does_not_fit_names_a_line_that_does(
    model: str, context: int, batch: int, line: str
) -> None:
    result = planned(model, context, batch, device="1 KiB")
    assert not result.fits
    assert result.budget_line == line
    tier, size = (part.strip(' "') for part in line.split("="))
    assert planned(model, context, batch, **{tier: size}).fits


@pytest.mark.parametrize("model", known_models())
def test_each_tier_that_is_too_small_gets_a_line(model: str) -> None:
    result = planned(model, 77, device=1, pinned="1000 KiB", host=1)
    lines: dict[str, Any] = dict(line.split(" = ") for line in result.budget_line.splitlines())
    assert list(lines) == ["device", "pinned"]
    assert planned(model, 77, **{tier: size.strip('"') for tier, size in lines.items()}).fits


@pytest.mark.parametrize("context", [0, -1, MILLION + 1, 2**70])
def test_a_context_out_of_range_is_refused(context: int) -> None:
    with pytest.raises(InvalidInputError, match="1,048,576, the limit of GLM") as refusal:
        planned("glm-5.2", context)
    assert refusal.value.subject == "context"


@pytest.mark.parametrize("value", [True, 1.5, "4"])
def test_what_is_no_integer_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="context"):
        planned("glm-5.2", value)
    with pytest.raises(InvalidInputError, match="batch"):
        planned("glm-5.2", 10, value)


def test_numbers_of_numpy_are_numbers() -> None:
    result = planned("deepseek-v4-pro", np.int64(9), np.int32(2))
    assert (type(result.context), type(result.batch)) == (int, int)


@pytest.mark.parametrize("batch", [0, -3, 2**31])
def test_a_batch_out_of_range_is_refused(batch: int) -> None:
    with pytest.raises(InvalidInputError, match="batch: got"):
        planned("glm-5.2", 10, batch)


def test_an_indexer_by_itself_is_planned_value_by_value() -> None:
    geometry = load_geometry(str(Path(__file__).with_name("glm_decode_geometry.toml")))
    result = plan(geometry, context=1000, batch=2, budget=NO_LIMIT)
    assert {(line.role, line.holder): line.nbytes for line in result.lines} == {
        (Role.KV_CACHE, "key"): 2 * 1000 * 128 * 2,
        (Role.ACTIVATION, "query"): 2 * 32 * 128 * 2,
        (Role.ACTIVATION, "weights"): 2 * 32 * 2,
        (Role.ACTIVATION, "attention_bias"): 2 * 1000 * 4,
        (Role.ACTIVATION, "selected_indices"): 2 * 2048 * 8,
        (Role.WORKSPACE, "DsaIndexSelect"): OUTCOMES_NBYTES,
        (Role.WORKSPACE, "DsaIndexSelect control"): 2 * CONTROL_NBYTES,
        (Role.GRAPH, "captured graph"): GRAPH_NBYTES,
        (Role.STAGING, "staging"): STAGING_NBYTES,
    }


def test_a_cap_of_a_role_counts_as_a_limit_does() -> None:
    needed = sum(ln.nbytes for ln in planned("glm-5.2", 4096).lines if ln.role is Role.KV_CACHE)
    device: dict[str, Any] = {"limit": "100 GiB", "roles": {"kv_cache": needed}}
    result = planned("glm-5.2", 4096, device=device)
    assert (result.fits, result.largest_batch, result.longest_context) == (True, 1, 4096)
    assert [(cap.role, cap.nbytes, cap.limit) for cap in result.caps] == [
        (Role.KV_CACHE, needed, needed)
    ]
    device["roles"] = {"kv_cache": needed - 1}
    result = planned("glm-5.2", 4096, device=device)
    assert (result.fits, result.largest_batch, result.longest_context) == (False, 0, 4095)


def test_lines_for_a_tier_and_its_roles_are_one_table(tmp_path: Path) -> None:
    device = {"limit": "1 MiB", "roles": {"kv_cache": "50%", "graph": "50%"}}
    lines = planned("glm-5.2", 4096, device=device).budget_line
    assert [line.split(" =")[0] for line in lines.splitlines()] == [
        "device.limit",
        "device.roles.kv_cache",
    ]
    path = tmp_path / "budget.toml"
    path.write_text(f"[budget]\n{lines}\n")
    budget = MemoryBudget.load(toml=path, environ={})
    assert plan(load_geometry("glm-5.2"), context=4096, batch=1, budget=budget).fits


def test_a_cap_without_a_limit_bounds_the_batch() -> None:
    device = {"roles": {"kv_cache": "4 GiB"}}
    result = planned("glm-5.2", 4096, device=device)
    assert result.totals[0].limit is None
    assert result.largest_batch is not None
    assert planned("glm-5.2", 4096, result.largest_batch, device=device).fits
    assert not planned("glm-5.2", 4096, result.largest_batch + 1, device=device).fits


def test_a_share_needs_a_capacity() -> None:
    with pytest.raises(BudgetError):
        planned("glm-5.2", 10, device="50%")
    result = plan(
        load_geometry("glm-5.2"),
        context=10,
        batch=1,
        budget=MemoryBudget.of(device="50%"),
        capacities={DEVICE: 3 * GIB},
    )
    assert (result.totals[0].limit, result.totals[0].capacity) == (3 * GIB // 2, 3 * GIB)


def test_a_short_sequence_has_a_short_window() -> None:
    lines = planned("deepseek-v4-flash", 5).lines
    window = next(line for line in lines if "window" in line.what)
    expected = PlanLine(
        DEVICE, Role.STATE_GROUP, "all 43 layers", 43 * 5 * 583, "dense window, 5 tokens"
    )
    assert window == expected
