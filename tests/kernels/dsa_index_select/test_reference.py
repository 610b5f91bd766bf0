"""The oracle itself, against a second one: scalar loops in plain Python over float32 scalars."""

import numpy as np
import pytest

from nxrt.kernels.dsa_index_select import reference
from tests.helpers.cases import IndexSelectCase, drawn_case


def scalar_row(case: IndexSelectCase, b: int, s: int) -> list[int]:
    """Return what one row selects, computed scalar by scalar."""
    with np.errstate(all="ignore"):
        scored = [
            (float_key(scalar_score(case, b, s, t)), t)
            for t in range(case.key.shape[1])
            if case.bias[b, 0, s, t] > np.float32(-1e30)
        ]
    best = sorted(scored, key=lambda pair: (-pair[0], pair[1]))[: case.top_k]
    chosen = sorted(t for _, t in best)
    return chosen + [-1] * (case.top_k - len(chosen))


def scalar_score(case: IndexSelectCase, b: int, s: int, t: int) -> np.float32:
    total = np.float32(0)
    for h in range(case.query.shape[2]):
        dot = np.float32(0)
        for d in range(case.query.shape[3]):
            dot = dot + case.query[b, s, h, d] * case.key[b, t, d]
        scaled = np.float32(case.scale) * dot
        scored = scaled if scaled > 0 else np.float32(0)
        total = total + scored * (case.weights[b, s, h] * np.float32(case.weights_scale))
    return np.float32(total + case.bias[b, 0, s, t])


def float_key(value: np.float32) -> float:
    """Return a number that sorts as the total order does where only +NaN can occur."""
    return float("inf") if np.isnan(value) else float(np.arctan(np.float64(value)))


@pytest.mark.parametrize("seed", range(40))
def test_random_instances_equal_the_scalar_oracle(seed: int) -> None:
    case = drawn_case(
        "random", batch=2, num_queries=3, num_keys=5, top_k=3, depth=4, seed=seed,
        is_causal=bool(seed % 2),
    )  # fmt: skip
    expected = [[scalar_row(case, b, s) for s in range(3)] for b in range(2)]
    assert case.expected()[:, 0].tolist() == expected


def test_selection_is_ascending_and_in_range() -> None:
    case = drawn_case("range", num_queries=4, num_keys=50, top_k=20)
    selected = case.expected()[0, 0]
    assert (np.diff(selected, axis=1) > 0).all()
    assert selected.min() >= 0
    assert selected.max() < 50


def test_the_order_of_heads_and_depth_is_the_contracts() -> None:
    """1e8 + 1 - 1e8 is 0 in float32 from the left and 1 from the right: the order shows."""
    one_way = np.array([1e8, 1.0, -1e8], np.float32)
    key = np.stack([one_way, one_way[[0, 2, 1]]])[None]
    case = IndexSelectCase(
        "order",
        np.ones((1, 1, 1, 3), np.float32),
        key,
        np.ones((1, 1, 1), np.float32),
        np.zeros((1, 1, 1, 2), np.float32),
        1,
    )
    assert case.expected().ravel().tolist() == [1]


def test_blocks_of_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn_case("blocks", num_queries=7, num_keys=40, top_k=9, is_causal=True)
    whole = case.expected()
    monkeypatch.setattr(reference, "_MAX_CELLS", 80)
    assert case.expected().tobytes() == whole.tobytes()
