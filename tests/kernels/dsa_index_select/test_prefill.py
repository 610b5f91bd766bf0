"""The prefill route gives the oracle's bytes by warpgroups' products and by warps'."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from nxrt import CudaProvider, DType, MemoryGovernor, TensorView
from nxrt.kernels.dsa_index_select import prefill_route
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelect
from nxrt.kernels.dsa_index_select.prefill import prefill_layout
from nxrt.kernels.dsa_index_select.prefill.prefill_layout import (
    NOT_COLLECTED,
    RECORD_FIELDS,
    RECORD_WORDS,
    Sample,
)
from nxrt.kernels.dsa_index_select.spec import Shape
from tests.helpers.cases import IndexSelectCase
from tests.helpers.sessions import kernel_of, running
from tests.helpers.targets import Target
from tests.kernels.dsa_index_select.test_filter import KINDS as KINDS_OF_DATA
from tests.kernels.dsa_index_select.test_filter import biased, check, drawn

pytestmark = [pytest.mark.gpu, pytest.mark.fake(is_quick_only=True)]

SAMPLED = Shape(1, 17, 2300, 32, 64, 40)
"""More keys than a list holds, so that thresholds are guessed; the last tile is not full."""

SHAPES = {
    "8 heads": Shape(1, 16, 2200, 8, 64, 20),
    "24 heads": Shape(2, 19, 1200, 24, 128, 30),
    "64 heads": Shape(1, 18, 2100, 64, 128, 50),
    "40 heads": Shape(1, 16, 1300, 40, 64, 50),
    "one key": Shape(1, 16, 1, 32, 64, 5),
    "few keys": Shape(2, 16, 70, 32, 64, 90),
    "large top_k": Shape(1, 16, 2000, 32, 64, 1000),
}

KINDS = [
    *("gauss", "near", "relu", "duplicates", "masked", "nearly all masked", "all masked"),
    *("causal", "nan keys", "infinite keys", "nan weight", "huge", "tiny", "zero queries"),
    *("bias -1e9", "bias inf", "bias nan", "bias 1000", "outliers", "negative weights"),
]

QUICK = ("gauss", "masked", "causal", "nan keys", "bias -1e9", "duplicates")
"""What the test double, which is slow, runs too."""


@pytest.fixture(autouse=True)
def _few_rows_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows that the decode route would be faster for take the route that is tested here."""
    monkeypatch.setattr(prefill_route, "LEAST_SHARE_OF_A_WAVE", 0)


@pytest.fixture(params=["warpgroups", "warps"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "warps":
        monkeypatch.setattr(prefill_route, "has_warpgroups", lambda _: False)
    return str(request.param)


@pytest.fixture
def eager(cuda_provider: CudaProvider) -> Target:
    return Target(cuda_provider, "eager")


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_every_kind_of_data_with_thresholds(eager: Target, kind: str) -> None:
    check(eager, drawn(kind, SAMPLED, DType.BF16), repeats=1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(eager: Target, shape: Shape) -> None:
    # One dtype for each depth: every pair is another piece of code to build.
    dtype = DType.BF16 if shape.D == 64 else DType.F16
    check(eager, drawn("gauss", shape, dtype), repeats=1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["gauss", "causal"])
def test_captured(cuda_provider: CudaProvider, kind: str) -> None:
    check(Target(cuda_provider, "captured"), drawn(kind, SAMPLED, DType.BF16))


@pytest.mark.usefixtures("way")
def test_rows_in_several_launches(eager: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_layout, "MAX_LISTS_NBYTES", 5 * 12 * 2048)
    check(eager, drawn("gauss", replace(SAMPLED, B=2), DType.BF16), repeats=1)


@pytest.mark.parametrize("limit", [1, 3], ids=["whole blocks", "part of a block"])
def test_blocks_of_several_rows(eager: Target, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    def plan(*sizes: object) -> object:
        planned = prefill_layout.plan_warpgroups(*sizes)  # type: ignore[arg-type]
        assert planned is not None
        return replace(planned, rows_per_block=8 // limit)

    monkeypatch.setattr(prefill_route, "plan_warpgroups", plan)
    check(eager, drawn("masked", replace(SAMPLED, B=2), DType.BF16), repeats=1)


WRONG = {
    "too high": (Sample(), Sample(4, 2)),
    "much too high": (Sample(), Sample(2, 1)),
    "too low": (Sample(), Sample(2, 700)),
    "none": (Sample(), Sample(20, 2000)),
    "of a sample": (Sample(8, 5), Sample(2, 35)),
    "of a wrong sample": (Sample(8, 1), Sample(2, 35)),
}


@pytest.mark.parametrize("samples", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("kind", ["gauss", pytest.param("masked", marks=pytest.mark.slow)])
def test_guesses_that_fail(
    eager: Target,
    monkeypatch: pytest.MonkeyPatch,
    samples: tuple[Sample, Sample],
    kind: str,
) -> None:
    monkeypatch.setattr(prefill_layout, "warpgroup_samples", lambda *_: samples)
    check(eager, drawn(kind, SAMPLED, DType.BF16), repeats=1)


@pytest.mark.parametrize("num_keys", [1 << 10, 5200, 1 << 14, 1 << 16, 70_001, 1 << 20])
@pytest.mark.parametrize("top_k", [1, 40, 512, 2048, 4096])
def test_samples_fit(num_keys: int, top_k: int) -> None:
    capacity = prefill_layout.warpgroup_list_capacity(top_k)
    samples = prefill_layout.warpgroup_samples(num_keys, top_k, capacity)
    assert samples is not None
    first, second = samples
    if num_keys <= capacity:
        assert second.stride == 0
        return
    assert second.stride >= 2
    assert second.rank * second.stride >= top_k
    assert first.stride % second.stride == 0
    num_tiles = -(-num_keys // 64)
    assert 64 * -(-num_tiles // (first.stride or second.stride)) <= 3072


def test_a_launch_holds_a_wave_and_workspaces_stay_small() -> None:
    shape = prefill_layout.PrefillShape(1 << 20, 32, 128, 2048, 16)
    plan = prefill_layout.plan_warpgroups(shape, 4096, 132, 232_448)
    assert plan is not None
    assert plan.rows_per_launch == 132 * 8
    assert plan.lists_nbytes <= 48 << 20
    assert 2 * (plan.settle_shared_nbytes + 1024) <= 228 * 1024


def records_of(target: Target, case: IndexSelectCase, shape: Shape) -> dict[str, NDArray[np.int32]]:
    """Run once and return what the kernels say of each row, by RECORD_FIELDS."""
    offset, _ = prefill_route.records_segment(shape)
    words = np.empty((shape.num_rows, RECORD_WORDS), np.int32)
    with target.bound(case, MemoryGovernor()) as (session, binding, guarded):
        session.run(binding)
        assert guarded.read().tobytes() == case.expected().tobytes()
        [kernel] = session.kernels
        assert isinstance(kernel, DsaIndexSelect)
        block = kernel.workspace.block
        assert block is not None
        view = TensorView(block, DType.I32, words.shape, byte_offset=offset)
        session._backend.download(words, view)
    return dict(zip(RECORD_FIELDS, words.T, strict=False))


@pytest.mark.usefixtures("way")
def test_bounds_leave_little_to_score(eager: Target) -> None:
    found = records_of(eager, drawn("gauss", SAMPLED, DType.BF16), SAMPLED)
    assert not found["is_exact"].any()
    assert (found["length"] >= SAMPLED.K).all()
    assert (found["num_scored"] < SAMPLED.K // 2).all()


RETRIED = {
    "too high": (Sample(), Sample(4, 6)),
    "too low": (Sample(), Sample(2, 1100)),
    "without a sample": (Sample(), Sample()),
}


@pytest.mark.parametrize("samples", RETRIED.values(), ids=RETRIED)
def test_a_guess_that_fails_is_corrected(
    eager: Target, monkeypatch: pytest.MonkeyPatch, samples: tuple[Sample, Sample]
) -> None:
    monkeypatch.setattr(prefill_layout, "warpgroup_samples", lambda *_: samples)
    found = records_of(eager, drawn("gauss", SAMPLED, DType.BF16), SAMPLED)
    assert not found["is_exact"].any()


@pytest.mark.parametrize("kind", ["zero queries", "bias -1e9 but few"])
def test_a_plateau_that_is_known_is_cut_by_position(
    eager: Target, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(KINDS_OF_DATA, "bias -1e9 but few", biased(0.99, -1e9))
    found = records_of(eager, drawn(kind, SAMPLED, DType.BF16), SAMPLED)
    assert not found["is_exact"].any()


def test_a_plateau_in_doubt_is_scored_exactly(eager: Target) -> None:
    found = records_of(eager, drawn("relu", SAMPLED, DType.BF16), SAMPLED)
    assert (found["length"] == np.int32(NOT_COLLECTED - 2**32)).any()
    assert found["is_exact"].any()


def test_rows_that_fill_little_of_a_device_are_left_to_the_decode_route(
    cuda_provider: CudaProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = drawn("gauss", replace(SAMPLED, T=300), DType.BF16)
    for share, launches in ((3 / 8, (1, 0)), (0, (0, 1))):
        monkeypatch.setattr(prefill_route, "LEAST_SHARE_OF_A_WAVE", share)
        with running(cuda_provider, case) as (session, binding, guarded):
            session.run(binding)
            assert guarded.read().tobytes() == case.expected().tobytes()
            stats = kernel_of(session).stats
            assert (stats.filter_launches, stats.prefill_launches) == launches
