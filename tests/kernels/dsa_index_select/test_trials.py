"""Faults that others reported of index selection, each for its whole class; on every target.

The expected positions are worked out in plain Python, never by nxrt.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nxrt.kernels.numerics import canonicalize_nan, total_order_key
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
DTYPES = [DType.F32, DType.F16, DType.BF16]


def one_row(values: Floats) -> Floats:
    return values.astype(np.float32).reshape(1, 1, 1, -1)


# B01: winners lost where a coarse bin holds more candidates than a buffer.


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 33])
@pytest.mark.parametrize("top_k", [512, 2048])
@pytest.mark.parametrize("num_keys", [65_536, 262_144])
def test_b01_no_winner_is_lost_in_a_crowded_bin(
    target: Target, num_keys: int, top_k: int, num_rows: int
) -> None:
    ranks = np.random.default_rng(num_keys + top_k).permutation(num_keys)
    keys = (1 + ranks.astype(np.float64) * 2.0**-23).astype(np.float32)
    case = score_is_key("crowded", keys, top_k, num_rows=num_rows)
    selected = target.run(case, repeats=2 if num_rows > 1 else 20)
    expected = np.flatnonzero(ranks >= num_keys - top_k)
    assert (selected == expected).all()


# B02: ties past a bounded list.


def test_b02_winners_come_with_the_lowest_ties(target: Target) -> None:
    bias = np.zeros(8320, np.float32)
    winners = 83 * np.arange(100)
    bias[winners] = 5
    selected = target.run(score_is_bias("ties", one_row(bias), 2048), repeats=20)
    zeros = [t for t in range(8320) if bias[t] == 0][:1948]
    assert selected.ravel().tolist() == sorted([*winners.tolist(), *zeros])


@pytest.mark.parametrize("width", [1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097])
def test_b02_a_plateau_across_the_cut_is_filled_from_its_lowest(target: Target, width: int) -> None:
    bias = np.arange(8320, 0, -1).astype(np.float32) - 100_000
    plateau = np.random.default_rng(width).permutation(8320)[:width]
    bias[plateau] = 7
    bias[np.setdiff1d(np.arange(8320), plateau)[::9]] = 9
    selected = target.run(score_is_bias("plateau", one_row(bias), 2048), repeats=20)
    assert selected.ravel().tolist() == best_positions(bias, 2048)


def test_b02_all_equal_gives_the_first(target: Target) -> None:
    case = score_is_bias("equal", np.zeros((1, 1, 1, 8320), np.float32), 2048)
    assert target.run(case, repeats=20).ravel().tolist() == list(range(2048))


# B04: NaN compares false, slots stay unwritten.


@pytest.mark.parametrize("dtype", DTYPES)
def test_b04_rows_of_nan_and_mixed_rows_are_complete(target: Target, dtype: DType) -> None:
    all_nan = score_is_bias("all-nan", no_bias(1, 1, 4096), 2048, dtype=dtype)
    all_nan.weights[:] = NAN
    assert target.run(all_nan, repeats=20).ravel().tolist() == list(range(2048))

    odd = infinite_keys(np.arange(4096) % 2 == 1, 1024, dtype)
    assert target.run(odd, repeats=20).ravel().tolist() == list(range(1, 2048, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_b04_one_place_left_after_the_nan_keys(target: Target, dtype: DType) -> None:
    is_nan = np.zeros(4096, np.bool_)
    is_nan[np.random.default_rng(4).permutation(4096)[:2047]] = True
    case = infinite_keys(is_nan, 2048, dtype)
    finite = [t for t in range(4096) if not is_nan[t]]
    best = max(finite, key=lambda t: (case.bias[0, 0, 0, t], -t))
    selected = target.run(case, repeats=20).ravel().tolist()
    assert selected == sorted([*np.flatnonzero(is_nan).tolist(), best])


@pytest.mark.parametrize("dtype", DTYPES)
def test_b04_a_nan_key_counts_as_a_dot_of_nothing(target: Target, dtype: DType) -> None:
    keys = np.linspace(1, 2, 4096).astype(np.float32)
    keys[[10, 2000, 4000]] = NAN
    case = score_is_key("nan-keys", keys, 2048, dtype=dtype)
    stored = np.where(np.isnan(keys), 0, case.inputs["key"].ravel())
    scores = np.where(np.isnan(keys), np.float32(0), widened(stored, dtype))
    assert target.run(case, repeats=20).ravel().tolist() == best_positions(scores, 2048)


def widened(stored: NDArray[Any], dtype: DType) -> Floats:
    if dtype is DType.BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def infinite_keys(is_nan: NDArray[Any], top_k: int, dtype: DType) -> IndexSelectCase:
    """Return a row whose score is NaN where wanted, else its integer bias (q = 1, w = 0)."""
    num_keys = is_nan.size
    bias = np.random.default_rng(1).integers(-50, 50, num_keys).astype(np.float32)
    return IndexSelectCase(
        "infinite-keys",
        np.ones((1, 1, 1, 1), np.float32),
        np.where(is_nan, INF, np.float32(1)).reshape(1, -1, 1),
        np.zeros((1, 1, 1), np.float32),
        one_row(bias),
        top_k,
        dtype=dtype,
    )


# B05: an order taken from raw bits.


def test_b05_the_sign_and_payload_of_a_nan_do_not_rank_it(target: Target) -> None:
    results = []
    for bits in (0x7FC00000, 0xFFC00123, 0x7F800001, 0xFFFFFFFF):
        weights = np.full((1, 1, 1), bits, np.uint32).view(np.float32)
        case = IndexSelectCase(
            "nan-bits",
            np.ones((1, 1, 1, 1), np.float32),
            np.arange(9, dtype=np.float32).reshape(1, 9, 1),
            weights,
            no_bias(1, 1, 9),
            4,
        )
        results.append(target.run(case).ravel().tolist())
    assert results == [[0, 1, 2, 3]] * 4


def test_b05_subnormal_biases_keep_their_order(target: Target) -> None:
    bias = (np.arange(1, 7) * 2.0**-149).astype(np.float32)
    assert target.run(score_is_bias("subnormal", one_row(bias), 3)).ravel().tolist() == [3, 4, 5]


def test_b05_f16_subnormal_keys_keep_their_order(target: Target) -> None:
    keys = (np.arange(1, 7) * 2.0**-24).astype(np.float32)
    case = score_is_key("f16-subnormal", keys, 3, dtype=DType.F16)
    assert target.run(case).ravel().tolist() == [3, 4, 5]


def test_b05_zeros_of_both_signs_tie_by_position(target: Target) -> None:
    case = score_is_bias("zeros", one_row(np.array([-0.0, 0.0, -0.0, 0.0, 0.0])), 2)
    case.weights[:] = -1
    assert target.run(case).tobytes() == case.expected().tobytes()


def test_b05_infinite_bias_ranks_below_nan_and_above_all_finite(target: Target) -> None:
    bias = np.array([1.0, INF, 3e38, INF, 0.0, INF], np.float32)
    is_nan = np.array([False, False, False, False, True, False])
    case = infinite_keys(is_nan, 3, DType.F32)
    case.bias[0, 0, 0] = bias
    assert target.run(case).ravel().tolist() == [1, 3, 4]


def test_b05_the_order_key_sorts_raw_bit_patterns() -> None:
    ascending = np.array([-INF, -1, -1e-45, -0.0, 0.0, 1e-45, 1, INF, NAN], np.float32)
    keys = total_order_key(ascending).tolist()
    assert keys == sorted(set(keys))
    odd_nans = np.array([0x7F800001, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert (canonicalize_nan(odd_nans).view(np.uint32) == 0x7FC00000).all()


# B07: rows shorter than top_k.


@pytest.mark.parametrize("num_keys", [1, 5, 2047, 2048, 2049])
@pytest.mark.parametrize("top_k", [2048, 2051])
def test_b07_short_rows_are_padded(target: Target, num_keys: int, top_k: int) -> None:
    case = drawn_case("short", num_queries=1, num_keys=num_keys, top_k=top_k)
    selected = target.run(case, repeats=20).ravel()
    num_kept = min(num_keys, top_k)
    assert selected.size == top_k
    assert (selected[num_kept:] == -1).all()
    if num_keys <= top_k:
        assert selected[:num_kept].tolist() == list(range(num_kept))
    assert selected.tobytes() == case.expected().tobytes()


# B08: rows of nothing between long rows.


@pytest.mark.parametrize("num_keys", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_b08_empty_rows_do_not_disturb_long_ones(target: Target, num_keys: int) -> None:
    top_k = 64
    bias = np.random.default_rng(8).integers(-1000, 1000, (1, 1, 64, num_keys)).astype(np.float32)
    bias[0, 0, ::2] = -INF
    selected = target.run(score_is_bias("alternating", bias, top_k), repeats=3)[0, 0]
    assert (selected[::2] == -1).all()
    alone = target.run(score_is_bias("long", np.ascontiguousarray(bias[:, :, 1::2]), top_k))
    assert selected[1::2].tobytes() == alone.tobytes()
    assert selected[1].tolist() == best_positions(bias[0, 0, 1], top_k)


def test_b08_one_visible_key(target: Target) -> None:
    bias = np.full(20_000, -INF, np.float32)
    bias[12_345] = -3
    selected = target.run(score_is_bias("one", one_row(bias), 8))
    assert selected.ravel().tolist() == [12_345] + [-1] * 7


# B13: the stride of the wrong axis.


@pytest.mark.parametrize("top_k", [1, 64])
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize(
    "batch", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (63, 64, 65, 96, 200))]
)
def test_b13_a_row_does_not_depend_on_its_batch(
    target: Target, batch: int, num_queries: int, top_k: int
) -> None:
    case = planted(batch, num_queries, top_k)
    selected = target.run(case)
    rows = selected.reshape(-1, top_k)
    positions = 7 * np.arange(batch * num_queries) % 1000
    assert (rows == positions[:, None]).any(axis=1).all()

    backwards = target.run(part(case, slice(None, None, -1)))
    assert backwards[::-1].tobytes() == selected.tobytes()
    for b in {0, batch // 2, batch - 1}:
        assert target.run(part(case, slice(b, b + 1))).tobytes() == selected[b].tobytes()


def planted(batch: int, num_queries: int, top_k: int) -> IndexSelectCase:
    """Return 64-head rows over 1,000 keys; row r wins at key (7 r) mod 1000, which only it sees."""
    rng = np.random.default_rng(batch)
    num_keys, depth = 1000, 8
    case = IndexSelectCase(
        "planted",
        rng.standard_normal((batch, num_queries, 64, depth)).astype(np.float32),
        rng.standard_normal((batch, num_keys, depth)).astype(np.float32),
        rng.standard_normal((batch, num_queries, 64)).astype(np.float32),
        no_bias(batch, num_queries, num_keys),
        top_k,
    )
    rows = np.arange(batch * num_queries)
    case.bias.reshape(-1, num_keys)[rows, 7 * rows % num_keys] = 1e6
    return case


def part(case: IndexSelectCase, batch: slice) -> IndexSelectCase:
    def taken(array: Floats) -> Floats:
        return np.ascontiguousarray(array[batch])

    return replace(
        case,
        query=taken(case.query),
        key=taken(case.key),
        weights=taken(case.weights),
        bias=taken(case.bias),
    )
