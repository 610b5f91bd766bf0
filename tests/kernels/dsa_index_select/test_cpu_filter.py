"""The CPU's filter: the oracle's bytes, whatever the data, without the oracle's work."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxrt import MemoryGovernor
from nxrt.kernels.dsa_index_select import cpu, score_bounds
from nxrt.kernels.dsa_index_select.cpu import DsaIndexSelectCpu, select_by_filter
from nxrt.kernels.dsa_index_select.reference import select_indices
from nxrt.kernels.dsa_index_select.spec import Attributes, parse_attributes
from nxrt.providers.cpu import CpuProvider
from nxrt.tensor import DType, TensorView
from tests.helpers.adversarial import KINDS, adversarial_case, widened
from tests.helpers.cases import Floats, IndexSelectCase, drawn_case
from tests.helpers.targets import Target

DTYPES = [DType.F32, DType.F16, DType.BF16]
SHAPES = [
    {"B": 1, "S": 1, "T": 1500, "H": 32, "D": 128, "top_k": 200},
    {"B": 1, "S": 3, "T": 600, "H": 16, "D": 64, "top_k": 100},
    {"B": 2, "S": 2, "T": 400, "H": 3, "D": 7, "top_k": 399},
    {"B": 1, "S": 4, "T": 300, "H": 1, "D": 1, "top_k": 1},
]
SIZES = {"B": 1, "S": 4, "T": 2000, "H": 32, "D": 128}


def filtered(case: IndexSelectCase) -> Any:
    return select_by_filter(*widened(case), case.bias, parse_attributes(case.node))


@contextmanager
def counted_exact_scores() -> Iterator[list[int]]:
    """Yield how many keys each row scores exactly, as they come."""
    counts: list[int] = []
    real = cpu._exact_scores

    def counting(rows: Any, row: int, key: Floats, positions: Any, scale: float) -> Floats:
        counts.append(positions.size)
        return real(rows, row, key, positions, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_exact_scores", counting)
        yield counts


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"T{shape['T']}-H{shape['H']}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_unkind_inputs_give_the_oracles_bytes(
    kind: str, dtype: DType, shape: dict[str, int]
) -> None:
    case = adversarial_case(kind, dtype, **shape)
    assert filtered(case).tobytes() == case.expected().tobytes()


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(*(st.integers(0, limit) for limit in (2, 3, 40, 5, 9))),
    top_k=st.integers(1, 45),
    scales=st.tuples(*(st.sampled_from([1.0, 0.3, 1e-40, 1e-30, 1e30]) for _ in range(2))),
    seed=st.integers(0, 2**32),
)
def test_any_sizes_and_scales_give_the_oracles_bytes(
    kind: str,
    dtype: DType,
    sizes: tuple[int, ...],
    top_k: int,
    scales: tuple[float, float],
    seed: int,
) -> None:
    named = dict(zip("BSTHD", sizes, strict=True))
    case = adversarial_case(kind, dtype, top_k, **named, seed=seed)
    attributes = Attributes(top_k, *(float(np.float32(value)) for value in scales))
    inputs = (*widened(case), case.bias, attributes)
    assert select_by_filter(*inputs).tobytes() == select_indices(*inputs).tobytes()


@pytest.mark.parametrize("name", "BSTHD")
def test_a_size_of_zero_gives_the_oracles_bytes(name: str) -> None:
    sizes = {"B": 2, "S": 3, "T": 9, "H": 2, "D": 4, name: 0}
    case = adversarial_case("gauss", DType.F32, 4, **sizes)
    found = filtered(case)
    assert found.shape == case.output_shape
    assert found.tobytes() == case.expected().tobytes()


@pytest.mark.parametrize("num_allowed", [0, 1, 49, 50, 51, 400])
def test_rows_around_top_k_allowed_keys(num_allowed: int) -> None:
    case = adversarial_case("gauss", DType.F32, 50, B=1, S=3, T=400, H=4, D=16)
    case.bias[0, 0, 1] = -np.inf
    case.bias[0, 0, 1, np.random.default_rng(1).permutation(400)[:num_allowed]] = 0
    assert filtered(case).tobytes() == case.expected().tobytes()


def test_a_late_nan_beats_infinities_that_have_bounds() -> None:
    case = adversarial_case("zero_weights", DType.F32, 5, B=1, S=2, T=50, H=2, D=4)
    case.bias[..., :20] = np.inf
    case.query[:] = 1
    case.key[:, 40] = np.inf  # times a weight of 0
    assert filtered(case).tobytes() == case.expected().tobytes()
    assert filtered(case)[0, 0, 0].tolist() == [0, 1, 2, 3, 40]


@pytest.mark.parametrize("name", ["query", "key", "weights", "bias"])
def test_a_signalling_nan_warns_of_nothing(name: str) -> None:
    """Memory that nobody has written may hold one; warnings are errors here."""
    case = adversarial_case("gauss", DType.F32, 5, B=1, S=2, T=50, H=2, D=4)
    getattr(case, name).view(np.uint32).ravel()[7 % getattr(case, name).size] = 0x7F800001
    assert filtered(case).tobytes() == case.expected().tobytes()


def test_rows_of_at_most_top_k_keys_take_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "bound_scores", None)
    case = drawn_case("short", num_queries=5, num_keys=64, top_k=64, is_causal=True)
    assert filtered(case).tobytes() == case.expected().tobytes()


@pytest.mark.parametrize("kind", ["gauss", "nan_weight", "duplicates", "causal"])
def test_blocks_do_not_change_the_result(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = adversarial_case(kind, DType.F32, 30, B=1, S=7, T=211, H=5, D=12)
    whole = case.expected()
    for max_cells, block_cells, max_exact_cells in ((1, 1, 1), (500, 300, 64), (10**6, 77, 10**6)):
        monkeypatch.setattr(cpu, "_MAX_CELLS", max_cells)
        monkeypatch.setattr(score_bounds, "_BLOCK_CELLS", block_cells)
        monkeypatch.setattr(cpu, "_MAX_EXACT_CELLS", max_exact_cells)
        assert filtered(case).tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_keys_of_gaussian_rows_are_scored_exactly(dtype: DType) -> None:
    case = adversarial_case("gauss", dtype, 500, **SIZES)
    with counted_exact_scores() as counts:
        assert filtered(case).tobytes() == case.expected().tobytes()
    assert sum(counts) <= 100, "the filter does not filter"


def test_a_plateau_of_certain_zeros_is_not_scored() -> None:
    case = adversarial_case("mostly_negative", DType.F32, 500, **SIZES)
    with counted_exact_scores() as counts:
        assert filtered(case).tobytes() == case.expected().tobytes()
    assert sum(counts) == 0


def test_a_row_without_bounds_scores_every_key() -> None:
    case = adversarial_case("nan_weight", DType.F32, 500, **SIZES)
    with counted_exact_scores() as counts:
        assert filtered(case).tobytes() == case.expected().tobytes()
    assert counts == [2000] * 4


def test_a_row_without_bounds_keeps_its_mask() -> None:
    case = adversarial_case("masked", DType.F32, 50, B=1, S=2, T=400, H=4, D=16)
    case.weights[0, 0, 0] = np.nan
    assert filtered(case).tobytes() == case.expected().tobytes()


@pytest.mark.parametrize("kind", ["gauss", "nan_weight"])
def test_temporaries_are_bounded(kind: str) -> None:
    case = adversarial_case(kind, DType.F32, 64, B=1, S=24, T=65_536, H=8, D=32)
    inputs = (*widened(case), case.bias, parse_attributes(case.node))
    tracemalloc.start()
    try:
        select_by_filter(*inputs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_the_cpu_provider_runs_the_filter() -> None:
    case = drawn_case("served", num_queries=2, num_keys=40, top_k=4)
    target = Target(CpuProvider(), "eager")
    with target.bound(case, MemoryGovernor()) as (session, _, _):
        assert isinstance(session.kernels[0], DsaIndexSelectCpu)


def test_tensors_of_any_strides_are_read() -> None:
    case = adversarial_case("gauss", DType.BF16, 20, B=2, S=3, T=80, H=4, D=8)
    turned = [TensorView.of_array(np.ascontiguousarray(array.T)) for array in case.inputs.values()]
    inputs = [
        TensorView(view.storage, view.dtype, view.shape[::-1], view.strides[::-1])
        for view in turned
    ]
    inputs[:3] = [
        TensorView(view.storage, DType.BF16, view.shape, view.strides) for view in inputs[:3]
    ]
    output = np.zeros(case.output_shape, np.int64)
    kernel = DsaIndexSelectCpu(parse_attributes(case.node))
    kernel.execute(inputs, [TensorView.of_array(output)], stream=None)
    kernel.close()
    assert output.tobytes() == case.expected().tobytes()
