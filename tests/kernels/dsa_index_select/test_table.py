"""The contract's table of cases, on every target, byte for byte against the reference."""

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nxrt.kernels.numerics import narrow, widen
from nxrt.tensor import DType
from tests.helpers.cases import IndexSelectCase, drawn_case, no_bias, score_is_bias
from tests.helpers.lcg import Lcg, fnv1a_64
from tests.helpers.targets import Target

F32_MAX = float(np.finfo(np.float32).max)
DTYPE_CODES = {DType.F32: 1, DType.F16: 2, DType.BF16: 3}


def glm(case_id: str, num_queries: int, num_keys: int, **options: Any) -> IndexSelectCase:
    """Return the small GLM geometry: B1 H2 D8 top_k 4, causal."""
    return drawn_case(
        case_id, num_queries=num_queries, num_keys=num_keys, top_k=4, is_causal=True, **options
    )


def overflow(dtype: DType) -> IndexSelectCase:
    """Return a case in which inf * 0 makes the canonical NaN, which wins."""
    largest = {DType.F32: F32_MAX, DType.F16: 65504.0, DType.BF16: float.fromhex("0x1.fep127")}
    top = np.float32(largest[dtype])
    return IndexSelectCase(
        f"overflow-{dtype}",
        np.full((1, 1, 1, 1), top),
        np.array([[[top], [0], [top]]], np.float32),
        np.zeros((1, 1, 1), np.float32),
        no_bias(1, 1, 3),
        2,
        scale=F32_MAX,
        dtype=dtype,
    )


def ones(num_keys: int, top_k: int) -> IndexSelectCase:
    return IndexSelectCase(
        "all-equal",
        np.ones((1, 1, 2, 4), np.float32),
        np.ones((1, num_keys, 4), np.float32),
        np.ones((1, 1, 2), np.float32),
        no_bias(1, 1, num_keys),
        top_k,
    )


def masked(case_id: str, allowed: list[int], num_keys: int, top_k: int) -> IndexSelectCase:
    bias = np.full((1, 1, 1, num_keys), -np.inf, np.float32)
    bias[..., allowed] = 0
    return score_is_bias(case_id, bias, top_k)


REAL_GEOMETRY = drawn_case(
    "real-geometry-f16",
    num_queries=1,
    num_keys=2304,
    top_k=2048,
    num_heads=32,
    depth=128,
    dtype=DType.F16,
)
TABLE = [
    drawn_case("tiny-f32", num_queries=2, num_keys=5, top_k=3, depth=3, scale=0.5),
    glm("first-token", 1, 1),
    glm("prefill", 6, 6),
    glm("decode", 1, 10),
    REAL_GEOMETRY,
    glm("long-decode", 1, 20),
    glm("f16-storage", 4, 12, dtype=DType.F16),
    glm("bf16-storage", 4, 12, dtype=DType.BF16),
    *(overflow(dtype) for dtype in (DType.F32, DType.F16, DType.BF16)),
    ones(8, 4),
    masked("padding-mask", [1, 3], 5, 4),
    masked("fully-masked", [], 5, 3),
    drawn_case("grid-stride", num_queries=5, num_keys=521, top_k=4),
    glm("opset-1", 2, 9, opset=1),
    glm("opset-2", 2, 9, opset=2),
    drawn_case("batch", batch=3, num_queries=2, num_keys=70, top_k=5, num_heads=5, depth=11),
    drawn_case("heads-past-a-warp", num_queries=2, num_keys=40, top_k=7, num_heads=33, depth=65),
    drawn_case("one-head-one-depth", num_queries=1, num_keys=33, top_k=40, num_heads=1, depth=1),
]

EXPLICIT = {
    "overflow-f32": [0, 2],
    "overflow-f16": [0, 2],
    "overflow-bf16": [0, 2],
    "all-equal": [0, 1, 2, 3],
    "padding-mask": [1, 3, -1, -1],
    "fully-masked": [-1, -1, -1],
    "first-token": [0, -1, -1, -1],
}


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.id)
def test_selection_equals_the_reference(target: Target, case: IndexSelectCase) -> None:
    selected = target.run(case, repeats=3)
    assert selected.tobytes() == case.expected().tobytes()
    if case.id in EXPLICIT:
        assert selected.ravel().tolist() == EXPLICIT[case.id]


def test_every_explicit_answer_belongs_to_a_case() -> None:
    assert EXPLICIT.keys() <= {case.id for case in TABLE}


def test_other_inputs_select_other_keys(target: Target) -> None:
    first = target.run(glm("seed-1", 1, 12, seed=1))
    second = target.run(glm("seed-2", 1, 12, seed=2))
    assert first.tolist() != second.tolist()


def test_a_request_leaves_nothing_behind_for_the_next(target: Target) -> None:
    requests = [glm("a", 3, 7, seed=3), glm("b", 5, 5, seed=4), glm("a", 3, 7, seed=3)]
    first, other, again = (target.run(case) for case in requests)
    assert first.tobytes() == again.tobytes()
    assert other.tobytes() == requests[1].expected().tobytes()


@pytest.mark.parametrize("num_keys", [2048, 8192])
def test_the_generator_draws_the_contracts_inputs(num_keys: int) -> None:
    digests = {2048: 0x9B0C18EE6979F3A7, 8192: 0x92E37C6E547702B8}
    assert input_digest(num_keys) == digests[num_keys]


def input_digest(num_keys: int) -> int:
    """Return the digest of the performance inputs: H32 D128, f16, bias zero."""
    lcg = Lcg(0x20765EBA ^ num_keys)
    shapes = [(1, 1, 32, 128), (1, num_keys, 128), (1, 1, 32)]
    tensors = [(narrow(lcg.values(*shape), DType.F16), DType.F16) for shape in shapes]
    tensors.append((no_bias(1, 1, num_keys), DType.F32))
    digest = fnv1a_64(b"")
    for slot, (array, dtype) in enumerate(tensors):
        header = struct.pack("<QBBQ", slot, 1, DTYPE_CODES[dtype], array.ndim)
        sizes = struct.pack(f"<{array.ndim}QQ", *array.shape, array.nbytes)
        digest = fnv1a_64(header + sizes + array.tobytes(), digest)
    return digest


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_half_types_select_as_their_widened_values_do(target: Target, dtype: DType) -> None:
    stored = glm("half", 4, 40, dtype=dtype, seed=9)
    widened = replace(
        stored,
        dtype=DType.F32,
        query=widen(stored.inputs["query"], dtype),
        key=widen(stored.inputs["key"], dtype),
        weights=widen(stored.inputs["weights"], dtype),
    )
    assert target.run(stored).tobytes() == target.run(widened).tobytes()


def test_causal_prefill_pads_short_rows(target: Target) -> None:
    case = drawn_case("causal", num_queries=6, num_keys=6, top_k=4, is_causal=True)
    counts = (target.run(case)[0, 0] >= 0).sum(axis=1)
    assert counts.tolist() == [1, 2, 3, 4, 4, 4]
