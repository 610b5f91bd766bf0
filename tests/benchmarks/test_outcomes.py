"""Counts of what a filter left: read from a kernel that tells, and from data as promised."""

from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.cases import IndexSelectShape
from benchmarks.outcomes import (
    Outcome,
    OutcomeCase,
    OutcomeRow,
    as_table,
    outcome_cases,
    outcomes,
    text_cases,
)
from benchmarks.troubles import TROUBLES, drawn
from nxrt import CpuProvider
from nxrt.kernels.dsa_index_select.cpu import DsaIndexSelectCpu
from nxrt.kernels.numerics import widen

SMALL = IndexSelectShape(2, 1, 64, H=8, D=16, K=4)


def gaussian() -> dict[str, Any]:
    inputs = drawn(2, 1, 64, 8, 16, seed=1)
    half = {name: getattr(inputs, name) for name in ("query", "key", "weights")}
    stored = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in half.items()}
    return stored | {"attention_bias": inputs.bias}


CASE = OutcomeCase("Gaussian", SMALL, gaussian)


def test_a_kernel_that_cannot_tell_gives_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DsaIndexSelectCpu, "outcomes", raising=False)
    with CpuProvider() as provider:
        assert outcomes(provider, CASE) is None


def test_a_kernels_rows_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(self: object) -> list[tuple[int, bool]]:
        return [(5, False), (64, True), (7, False)]

    monkeypatch.setattr(DsaIndexSelectCpu, "outcomes", told, raising=False)
    with CpuProvider() as provider:
        assert outcomes(provider, CASE) == Outcome(3, 12, 1, 7)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([], Outcome(0, 0, 0)), ([(9, True)], Outcome(1, 0, 1)), ([(0, False)], Outcome(1, 0, 0))],
)
def test_rows_that_fell_back_have_no_band(rows: list[tuple[int, bool]], expected: Outcome) -> None:
    assert Outcome.of(rows) == expected


def test_every_kind_of_data_comes_as_decode_and_as_prefill() -> None:
    cases = list(outcome_cases())
    for data in {case.data for case in cases}:
        kinds = {case.shape.S > 1 for case in cases if case.data == data}
        assert kinds == {False, True}, data
    assert set(TROUBLES) < {case.data for case in cases}


def test_inputs_have_the_sizes_of_their_shape() -> None:
    for case in text_cases():
        arrays, shape = case.make(), case.shape
        assert arrays["query"].shape == (shape.B, shape.S, shape.H, shape.D)
        assert arrays["key"].shape == (shape.B, shape.T, shape.D)
        assert arrays["weights"].shape == (shape.B, shape.S, shape.H)
        assert arrays["attention_bias"].shape == (shape.B, 1, shape.S, shape.T)
        assert arrays["query"].dtype == np.uint16
        assert np.isfinite(widen(arrays["key"], shape.dtype)).all()


def test_real_text_is_causal() -> None:
    decode, prefill = (case.make()["attention_bias"] for case in text_cases())
    num_keys = prefill.shape[-1]
    allowed = np.count_nonzero(prefill == 0, axis=-1).reshape(-1)
    assert allowed.tolist() == list(range(num_keys - allowed.size + 1, num_keys + 1))
    assert np.array_equal(decode.reshape(-1, num_keys), prefill[0, 0, -len(decode) :])


@pytest.mark.parametrize("name", TROUBLES)
def test_troubles_are_float32_and_change_something(name: str) -> None:
    before, inputs = (drawn(2, 3, 512, 8, 16, seed=5) for _ in range(2))
    TROUBLES[name](inputs)
    names = ("query", "key", "weights", "bias")
    pairs = [(getattr(before, field), getattr(inputs, field)) for field in names]
    assert all((old.shape, old.dtype) == (new.shape, new.dtype) for old, new in pairs)
    assert any(not np.array_equal(old, new, equal_nan=True) for old, new in pairs)


def test_the_plateau_is_at_the_top() -> None:
    """The cut must fall inside it, or it would test nothing."""
    inputs = drawn(1, 1, 4096, 8, 64, seed=5)
    TROUBLES["a fifth ties at the top"](inputs)
    dots = np.einsum("hd,td->th", inputs.query[0, 0], inputs.key[0])
    scores = np.maximum(dots, 0) @ inputs.weights[0, 0]
    best = np.sort(scores)[::-1][:512]
    assert np.ptp(best) <= 1e-3 * best[0]


def test_a_table_tells_what_is_not_known() -> None:
    rows = [
        OutcomeRow("a", 8, 16_384, Outcome(8, 40, 0, 9)),
        OutcomeRow("b", 8, 16_384, Outcome(8, 0, 8)),
        OutcomeRow("c", 8, 16_384, None),
    ]
    console = Console(width=140)
    with console.capture() as captured:
        console.print(as_table(rows))
    assert cells_of(captured.get()) == [
        ["a", "8", "16k", "5.0", "9", "0"],
        ["b", "8", "16k", "-", "-", "8"],
        ["c", "8", "16k", "not told", "not told", "not told"],
    ]


def cells_of(printed: str) -> list[list[str]]:
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in rows]
