"""What the contract says of masks, special values, sizes and adversarial keys; on every target."""

from collections.abc import Sequence

import numpy as np
import pytest

from nxrt.tensor import DType
from tests.helpers.cases import (
    Floats,
    IndexSelectCase,
    best_positions,
    drawn_case,
    no_bias,
    score_is_bias,
    score_is_key,
)
from tests.helpers.targets import Target

INF = np.float32(np.inf)
NAN = np.float32(np.nan)
THRESHOLD = np.float32(-1e30)


def as_bias(values: Sequence[float | np.float32]) -> Floats:
    return np.array(values, np.float32).reshape(1, 1, 1, -1)


def test_mask_boundary_is_strict_and_nan_masks(target: Target) -> None:
    lowest = np.finfo(np.float32).min
    above = np.nextafter(THRESHOLD, np.float32(0))
    bias = as_bias([-INF, lowest, THRESHOLD, above, NAN, INF, 0.0, -9.9e29])
    assert target.run(score_is_bias("mask", bias, 8)).ravel().tolist() == [3, 5, 6, 7] + [-1] * 4


@pytest.mark.parametrize("top_k", [1, 9, 10, 4096])
def test_width_is_always_top_k(target: Target, top_k: int) -> None:
    case = drawn_case("width", num_queries=2, num_keys=9, top_k=top_k)
    selected = target.run(case)
    assert selected.shape == (1, 1, 2, top_k)
    assert selected.tobytes() == case.expected().tobytes()


@pytest.mark.parametrize(
    ("batch", "num_queries", "num_keys", "num_heads", "depth"),
    [(1, 2, 0, 2, 3), (1, 0, 5, 2, 3), (0, 2, 5, 2, 3), (1, 2, 5, 0, 3), (1, 2, 5, 2, 0)],
    ids=["T=0", "S=0", "B=0", "H=0", "D=0"],
)
def test_zero_sizes(
    target: Target, batch: int, num_queries: int, num_keys: int, num_heads: int, depth: int
) -> None:
    case = drawn_case(
        "zero", batch=batch, num_queries=num_queries, num_keys=num_keys, top_k=3,
        num_heads=num_heads, depth=depth,
    )  # fmt: skip
    selected = target.run(case)
    assert selected.shape == (batch, 1, num_queries, 3)
    assert (selected == (-1 if num_keys == 0 else np.arange(3))).all()


def test_without_depth_a_nan_weight_still_wins(target: Target) -> None:
    case = IndexSelectCase(
        "no-depth",
        np.zeros((1, 1, 2, 0), np.float32),
        np.zeros((1, 4, 0), np.float32),
        np.array([[[1.0, np.inf]]], np.float32),
        as_bias([5.0, 6.0, 7.0, 8.0]),
        2,
    )
    assert target.run(case).ravel().tolist() == [0, 1]


def test_relu_counts_a_negative_dot_as_nothing(target: Target) -> None:
    keys = np.array([-5.0, -1.0, 0.0, 2.0], np.float32)
    assert target.run(score_is_key("relu", keys, 2)).ravel().tolist() == [0, 3]


def test_negative_weights_turn_the_order_round(target: Target) -> None:
    case = IndexSelectCase(
        "negative",
        np.ones((1, 1, 1, 1), np.float32),
        np.array([[[3.0], [1.0], [2.0]]], np.float32),
        np.full((1, 1, 1), -1, np.float32),
        no_bias(1, 1, 3),
        2,
    )
    assert target.run(case).ravel().tolist() == [1, 2]


def test_nan_weight_makes_every_key_win_by_position(target: Target) -> None:
    case = drawn_case("nan-weight", num_queries=1, num_keys=9, top_k=3)
    case.weights[0, 0, 1] = np.nan
    assert target.run(case).ravel().tolist() == [0, 1, 2]


def test_infinite_keys_rank_below_nan_and_above_the_rest(target: Target) -> None:
    """inf - inf is NaN before the relu, which makes it 0; inf * 0 is NaN after it, and wins."""
    query = np.ones((1, 1, 1, 2), np.float32)
    key = np.array([[[1, 1], [INF, 1], [INF, -INF], [-INF, 0]]], np.float32)
    case = IndexSelectCase(
        "infinite", query, key, np.ones((1, 1, 1), np.float32), no_bias(1, 1, 4), 2
    )
    assert target.run(case).ravel().tolist() == [0, 1]


def test_subnormal_dots_are_not_flushed(target: Target) -> None:
    tiny = np.float32(2.0**-149)
    keys = np.array([0, 3, 1, 2, 5, 4], np.float32) * tiny
    assert target.run(score_is_key("subnormal", keys, 3)).ravel().tolist() == [1, 4, 5]


@pytest.mark.parametrize("shared_bits", [8, 11, 16, 22, 24])
def test_keys_that_share_their_leading_bits(target: Target, shared_bits: int) -> None:
    rng = np.random.default_rng(shared_bits)
    low = rng.integers(0, 2 ** (32 - shared_bits), 3000, dtype=np.uint32)
    keys = (np.uint32(0x3F800000) & ~np.uint32(2 ** (32 - shared_bits) - 1) | low).view(np.float32)
    keys = np.where(np.isfinite(keys), keys, np.float32(1))
    selected = target.run(score_is_key("prefix", keys, 700))
    assert selected.ravel().tolist() == best_positions(keys, 700)


@pytest.mark.parametrize("num_keys", [1, 31, 32, 33, 4095, 4096, 4097, 20_000])
def test_two_valued_scores_are_filled_from_the_lowest_position(
    target: Target, num_keys: int
) -> None:
    rng = np.random.default_rng(num_keys)
    keys = rng.integers(0, 2, num_keys).astype(np.float32)
    selected = target.run(score_is_key("two-valued", keys, 512))
    assert selected.ravel().tolist() == best_positions(keys, 512)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 2048])
def test_a_million_keys(target: Target, top_k: int) -> None:
    rng = np.random.default_rng(7)
    keys = rng.permutation(1 << 20).astype(np.float32)
    selected = target.run(score_is_key("million", keys, top_k))
    assert selected.ravel().tolist() == best_positions(keys, top_k)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_random_instances(target: Target, dtype: DType) -> None:
    rng = np.random.default_rng(dtype.onnx_code)
    for index in range(12):
        batch, num_queries, num_heads, depth = rng.integers(1, 6, 4).tolist()
        num_keys, top_k = int(rng.integers(1, 300)), int(rng.integers(1, 80))
        case = drawn_case(
            f"random-{index}", batch=batch, num_queries=num_queries, num_keys=num_keys,
            top_k=top_k, num_heads=num_heads * 9, depth=depth * 17, seed=index, dtype=dtype,
            is_causal=bool(index % 2) and num_keys >= num_queries,
        )  # fmt: skip
        assert target.run(case).tobytes() == case.expected().tobytes()
