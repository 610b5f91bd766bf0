"""The sizes that are measured, and when a size is fast enough."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.cases import (
    CURVE,
    EVERYTHING,
    GOALS,
    INDEX_SELECT,
    Goal,
    IndexSelectShape,
    short_count,
)
from benchmarks.index_select import judged
from benchmarks.inputs import KeyPool, num_sets, opened
from nxrt import CpuProvider
from nxrt.tensor import DType
from tests.benchmarks.made_up import row

MANY = IndexSelectShape(64, 1, 65_536)
F16 = IndexSelectShape(64, 1, 65_536, dtype=DType.F16)
F32 = IndexSelectShape(64, 1, 65_536, dtype=DType.F32)


@pytest.mark.parametrize(
    ("number", "text"),
    [(5, "5"), (1500, "1500"), (1024, "1k"), (65_536, "64k"), (2**20, "1M"), (3 * 2**19, "1536k")],
)
def test_numbers_of_keys_are_short(number: int, text: str) -> None:
    assert short_count(number) == text


def test_labels_tell_decode_from_prefill() -> None:
    assert MANY.label == "64 x 64k H32 bf16"
    assert IndexSelectShape(1, 1024, 16_384, H=64).label == "prefill 1024 x 16k H64 bf16"


def test_every_input_and_the_output_count_as_bytes() -> None:
    shape = IndexSelectShape(2, 3, 5, H=7, D=11, K=13)
    inputs = 2 * (2 * 3 * 7 * 11 + 2 * 5 * 11 + 2 * 3 * 7)
    assert shape.input_nbytes == inputs
    assert shape.nbytes == inputs + 4 * 2 * 3 * 5 + 8 * 2 * 3 * 13
    assert shape.operations == 2 * 2 * 3 * 5 * 7 * 11


def test_the_curve_goes_from_2k_to_the_most_keys_of_each_batch() -> None:
    for batch, most in ((1, 2**20), (8, 2**18), (64, 2**17)):
        keys = [shape.T for shape in CURVE if batch == shape.B]
        assert (keys[0], keys[-1]) == (2048, most)
        assert all(after == 2 * before for before, after in pairwise(keys))


def test_nothing_is_measured_twice() -> None:
    assert len({shape.id for shape in EVERYTHING}) == len(EVERYTHING)
    assert {*INDEX_SELECT, *CURVE} == set(EVERYTHING)
    assert EVERYTHING[: len(INDEX_SELECT)] == INDEX_SELECT


def test_aims_are_below_what_must_be() -> None:
    both = [(g.aim_us, g.must_us) for g in GOALS.values() if g.aim_us and g.must_us]
    assert len(both) == 9
    assert all(aim < must for aim, must in both)


@pytest.mark.parametrize(("median_us", "is_met"), [(315.0, True), (315.1, False)])
def test_a_row_is_judged_by_what_it_must_reach(median_us: float, is_met: bool) -> None:
    (found,) = judged([row(MANY, median_us)], "NVIDIA H200")
    assert (found.must_us, found.aim_us, found.public_us) == (315, 300, 178)
    assert found.is_met is is_met


def test_f16_is_judged_by_bf16_of_the_same_run() -> None:
    found = judged([row(F16, 209), row(MANY, 200)], "NVIDIA H200")[0]
    assert found.must_us == pytest.approx(210)
    assert found.is_met


def test_f16_alone_is_not_judged() -> None:
    assert judged([row(F16, 209)], "NVIDIA H200")[0].is_met is None


def test_f32_is_judged_by_its_own_floor() -> None:
    found = judged([row(F32, 141, floor_us=100)], "NVIDIA H200")[0]
    assert found.must_us == pytest.approx(140)
    assert found.is_met is False


def test_another_device_is_not_judged() -> None:
    assert judged([row(MANY, 1)], "NVIDIA GeForce RTX 4090") == [row(MANY, 1)]


def test_a_row_without_a_goal_is_not_judged() -> None:
    (found,) = judged([row(CURVE[0], 1)], "NVIDIA H200")
    assert (found.must_us, found.is_met) == (None, None)
    assert CURVE[0] not in GOALS
    assert Goal() not in GOALS.values()


@pytest.mark.parametrize(
    ("nbytes", "num_runs", "expected"),
    [(10, 45, 41), (10, 20, 20), (30, 45, 14), (400, 45, 2), (401, 45, 2), (10**9, 45, 2)],
)
def test_sets_in_turn_exceed_four_caches(nbytes: int, num_runs: int, expected: int) -> None:
    count = num_sets(nbytes, 100, num_runs)
    assert count == expected
    assert count * nbytes > 400 or count >= num_runs


def test_keys_are_stretches_of_what_was_drawn_once() -> None:
    shape = IndexSelectShape(3, 1, 64, D=8, dtype=DType.F32)
    pool = KeyPool([shape, IndexSelectShape(1, 1, 32, D=8)])
    keys = list(pool.stretches(shape, np.random.default_rng(1)))
    assert [stretch.shape for stretch in keys] == [(64, 8)] * 3
    assert {stretch.dtype for stretch in keys} == {np.dtype(np.float32)}
    assert len({stretch.tobytes() for stretch in keys}) == 3
    half = IndexSelectShape(1, 1, 32, D=8)
    (narrowed,) = pool.stretches(half, np.random.default_rng(1))
    assert narrowed.shape == (32, 8)
    assert narrowed.dtype == np.uint16


def test_every_batch_gets_keys_of_its_own() -> None:
    shape = IndexSelectShape(3, 1, 64, H=8, D=8, dtype=DType.F32)
    pool = KeyPool([shape])
    with CpuProvider() as provider, opened(provider, shape, 2, pool) as (_, bindings):
        written = [binding.read("key") for binding in bindings]
    batches = [batch for keys in written for batch in keys]
    assert len({batch.tobytes() for batch in batches}) > 3
    assert all(batch.any(axis=1).all() for batch in batches)
