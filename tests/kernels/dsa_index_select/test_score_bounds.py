"""The radius of the CPU's filter, against sums without rounding and against any other BLAS."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nxrt.kernels.dsa_index_select import reference, score_bounds
from nxrt.kernels.dsa_index_select.cpu import select_by_filter
from nxrt.kernels.dsa_index_select.score_bounds import Approximation, Radius
from nxrt.kernels.dsa_index_select.spec import Attributes, parse_attributes
from nxrt.tensor import DType
from tests.helpers.adversarial import adversarial_case, widened
from tests.helpers.cases import Floats, IndexSelectCase

LongFloats = NDArray[np.longdouble]
TINY = np.float32(2.0**-126)
KINDS = [
    "gauss", "duplicates", "mostly_negative", "equal_heads", "large", "tiny", "subnormal",
    "subnormal_products", "subnormal_query", "subnormal_keys", "subnormal_weights", "outliers",
    "negative_weights", "near_ties", "last_bits", "permuted_depth", "integers", "negative_zeros",
]  # fmt: skip
SIZES = [(1, 1, 4000), (1, 128, 400), (32, 128, 60), (3, 7, 1000), (64, 2, 300), (2, 1000, 200)]


@dataclass(frozen=True)
class Rows:
    """Hold the rows of one batch and what is known of them without bounds."""

    query: Floats  # [R, H, D]
    key: Floats  # [T, D]
    weights: Floats  # [R, H], times weights_scale
    scale: float

    @cached_property
    def true_dots(self) -> LongFloats:
        """Return [R, H, T], not rounded to float32."""
        query, key = self.query.astype(np.longdouble), self.key.astype(np.longdouble)
        dots: LongFloats = np.einsum("rhd,td->rht", query, key)
        return dots

    @property
    def truth(self) -> LongFloats:
        """Return the scores [R, T] without bias, not rounded to float32."""
        scored = np.maximum(np.longdouble(self.scale) * self.true_dots, 0)
        total: LongFloats = np.einsum("rht,rh->rt", scored, self.weights.astype(np.longdouble))
        return total

    @property
    def contract(self) -> Floats:
        """Return the oracle's scores under a bias of 0."""
        bias = np.zeros((self.query.shape[0], self.key.shape[0]), np.float32)
        attributes = Attributes(1, self.scale, 1.0)
        depth_major_key = np.ascontiguousarray(self.key.T)
        return reference._scores(self.query, depth_major_key, self.weights, bias, attributes)

    @property
    def contract_dots(self) -> Floats:
        """Return [R, H, T]."""
        total = np.zeros((*self.query.shape[:2], self.key.shape[0]), np.float32)
        with np.errstate(all="ignore"):
            for d in range(self.key.shape[1]):
                total += self.query[:, :, d, None] * self.key[:, d]
        return total

    @property
    def radius(self) -> Radius:
        with np.errstate(all="ignore"):
            return score_bounds.radius_of(self.query, self.weights, self.scale)

    @property
    def norms(self) -> Floats:
        return score_bounds.key_norms(self.key)

    @property
    def width(self) -> NDArray[np.float64]:
        radius = self.radius
        return radius.per_norm.astype(np.float64) * self.norms + radius.floor

    @property
    def dot_width(self) -> NDArray[np.float64]:
        radius = self.radius
        return radius.dot_per_norm.astype(np.float64) * self.norms + radius.dot_floor


def rows_of(case: IndexSelectCase) -> Rows:
    query, key, weights = widened(case)
    attributes = parse_attributes(case.node)
    products = weights[0] * np.float32(attributes.weights_scale)
    return Rows(query[0], key[0], products, attributes.scale)


def drawn_rows(kind: str, size: tuple[int, int, int], dtype: DType = DType.F32) -> Rows:
    H, D, T = size
    return rows_of(adversarial_case(kind, dtype, 1, B=1, S=2, T=T, H=H, D=D, seed=5))


def another_blas(rows: Rows, order: str) -> Approximation:
    """Multiply as some other BLAS might: other orders, everything subnormal flushed to zero."""

    def flushed(values: Floats) -> Floats:
        return np.where(np.abs(values) < TINY, np.float32(0), values)

    def added(terms: list[Floats]) -> Floats:
        if order == "pairwise" and len(terms) > 2:
            middle = len(terms) // 2
            return flushed(added(terms[:middle]) + added(terms[middle:]))
        first, *others = terms[::-1] if order == "backwards" else terms
        for term in others:
            first = flushed(first + term)
        return first

    query, key, weights = flushed(rows.query), flushed(rows.key), flushed(rows.weights)
    with np.errstate(all="ignore"):
        depths = range(key.shape[1])
        dots = added([flushed(query[:, :, d, None] * key[:, d]) for d in depths])
        heads = range(weights.shape[1])
        scored = np.maximum(dots, 0)
        total = added([flushed(scored[:, h] * weights[:, h, None]) for h in heads])
        return Approximation(flushed(total * np.float32(rows.scale)), dots.max(axis=1))


def approximated(rows: Rows, how: str) -> Approximation:
    if how != "numpy":
        return another_blas(rows, how)
    with np.errstate(all="ignore"):
        return score_bounds.approximate(rows.query, rows.key, rows.weights, rows.scale)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize("how", ["numpy", "forwards", "backwards", "pairwise"])
def test_errors_stay_within_half_the_radius(how: str, dtype: DType, record_property: Any) -> None:
    """The radius is of a difference: half for the contract's error, half for the product's."""
    shares: dict[str, float] = {}
    for kind in KINDS:
        for size in SIZES:
            rows = drawn_rows(kind, size, dtype)
            assert (rows.norms < rows.radius.norm_limit).all()
            found, truth, contract, width = (
                approximated(rows, how), rows.truth, rows.contract, rows.width,
            )  # fmt: skip
            true_dot, dot_width = rows.true_dots.max(axis=1), rows.dot_width
            contract_dot = rows.contract_dots.max(axis=1)
            for name, errors in (
                ("product", np.abs(found.total - truth) / width),
                ("contract", np.abs(contract - truth) / width),
                ("difference", np.abs(found.total - contract.astype(np.float64)) / width),
                ("dot", np.abs(found.largest_dot - true_dot) / dot_width),
                ("contract's dot", np.abs(contract_dot - true_dot) / dot_width),
            ):
                shares[name] = max(shares.get(name, 0.0), float(errors.max()))
    for name, share in shares.items():
        record_property(f"largest {name} error / radius", share)
    assert max(shares.values()) <= 0.5, shares
    assert min(shares.values()) > 0, "nothing was rounded: the inputs show nothing"


@pytest.mark.parametrize("sign", [-1, 1, 0])
@pytest.mark.parametrize("kind", [*KINDS, "masked", "finite_mask", "huge_bias", "nan_keys"])
def test_any_approximation_within_the_radius_gives_the_oracles_bytes(
    kind: str, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sign` 0 draws one for every key."""
    rng = np.random.default_rng(3)

    def rogue(query: Floats, key: Floats, weights: Floats, scale: float) -> Approximation:
        rows = Rows(query, key, weights, scale)
        exact, dot = rows.contract.astype(np.float64), rows.contract_dots.max(axis=1)
        with np.errstate(all="ignore"):
            push = 0.97 * (sign or rng.choice([-1.0, 1.0], exact.shape))
            total = (exact + push * rows.width).astype(np.float32)
            largest_dot = (dot + push * rows.dot_width).astype(np.float32)
        return Approximation(total, largest_dot)

    monkeypatch.setattr(score_bounds, "approximate", rogue)
    for seed in range(3):
        case = adversarial_case(kind, DType.F32, 60, B=1, S=2, T=300, H=4, D=16, seed=seed)
        inputs = (*widened(case), case.bias, parse_attributes(case.node))
        assert select_by_filter(*inputs).tobytes() == case.expected().tobytes()


def test_bounds_hold_the_score_with_its_bias() -> None:
    for kind in KINDS:
        rows = drawn_rows(kind, (3, 7, 1000))
        bias = np.random.default_rng(1).standard_normal((2, 1000)).astype(np.float32) * 100
        lower, upper = score_bounds.bound_scores(
            rows.query, rows.key, rows.norms, rows.weights, bias, rows.scale
        )
        scores = rows.contract + bias
        assert (lower <= scores).all()
        assert (scores <= upper).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1.0, 3e38])
def test_norms_are_rounded_up(value: float) -> None:
    key = np.full((3, 5), value, np.float32)
    norms = score_bounds.key_norms(key).astype(np.longdouble)
    true = np.sqrt(np.sum(np.square(key.astype(np.longdouble)), axis=1))
    assert (norms >= true).all()
    assert (norms <= true * np.longdouble(1.00001) + TINY * 2).all() or np.isinf(norms).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e31, 3e38])
@pytest.mark.parametrize("name", ["query", "key", "weights"])
def test_what_is_not_finite_or_might_overflow_has_no_bounds(name: str, value: float) -> None:
    case = adversarial_case("gauss", DType.F32, 1, B=1, S=2, T=9, H=2, D=4)
    array = {"query": case.query[0, 0], "key": case.key[0], "weights": case.weights[0]}[name]
    array[0] = value
    rows = rows_of(case)
    bias = np.zeros((2, 9), np.float32)
    lower, upper = score_bounds.bound_scores(
        rows.query, rows.key, rows.norms, rows.weights, bias, rows.scale
    )
    is_unknown = np.zeros((2, 9), bool)
    is_unknown[(slice(None), 0) if name == "key" else (0, slice(None))] = True
    assert (np.isneginf(lower) == is_unknown).all()
    assert (np.isposinf(upper) == is_unknown).all()


def test_sums_too_long_for_the_proof_have_no_bounds() -> None:
    query, weights = np.ones((1, 1, 200_000), np.float32), np.ones((1, 1), np.float32)
    assert score_bounds.radius_of(query, weights, 1.0).norm_limit.item() == -1
    assert score_bounds.radius_of(query[..., :80_000], weights, 1.0).norm_limit.item() > 1e20
