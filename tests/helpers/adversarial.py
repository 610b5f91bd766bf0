"""Inputs of DsaIndexSelect that are unkind to bounds: ties, near ties, masks, NaN, infinities."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nxrt.kernels.numerics import widen
from nxrt.tensor import DType
from tests.helpers.cases import Floats, IndexSelectCase

Doubles = NDArray[np.float64]


class Draw:
    """Hold one Gaussian draw, float64, for a kind of trouble to change."""

    def __init__(self, rng: np.random.Generator, sizes: dict[str, int], dtype: DType) -> None:
        B, S, T, H, D = (sizes[name] for name in "BSTHD")
        self.rng, self.T, self.dtype = rng, T, dtype
        self.q = rng.standard_normal((B, S, H, D))
        self.k = rng.standard_normal((B, T, D))
        self.w = rng.standard_normal((B, S, H))
        self.bias = np.zeros((B, 1, S, T))

    def some(self, count: int) -> NDArray[np.int64]:
        return self.rng.integers(0, self.T, count if self.T else 0)

    def is_rare(self, share: float) -> NDArray[np.bool_]:
        return self.rng.random(self.bias.shape) < share


def _gauss(draw: Draw) -> None:
    """Leave it as it is."""


def _zero_query(draw: Draw) -> None:
    draw.q *= 0


def _zero_weights(draw: Draw) -> None:
    draw.w *= 0


def _duplicates(draw: Draw) -> None:
    draw.k[:] = draw.k[:, draw.rng.integers(0, min(5, draw.T), draw.T)] if draw.T else 0


def _mostly_negative(draw: Draw) -> None:
    draw.k[:], draw.q[:] = -np.abs(draw.k), np.abs(draw.q)
    draw.k[:, draw.some(20)] *= -1


def _equal_heads(draw: Draw) -> None:
    draw.q[:] = draw.q[:, :, :1]


def _nan_keys(draw: Draw) -> None:
    draw.k[:, draw.some(5)] = np.nan


def _nan_query(draw: Draw) -> None:
    draw.q[..., :1, :1] = np.nan


def _nan_weight(draw: Draw) -> None:
    draw.w[..., :1] = np.nan


def _infinite_keys(draw: Draw) -> None:
    draw.k[:, draw.some(5), :1] = np.inf


def _infinite_weight(draw: Draw) -> None:
    draw.w[..., :1] = np.inf


def _huge(draw: Draw) -> None:
    draw.k *= 12_000 if draw.dtype is DType.F16 else 1e30
    draw.q *= 1e4 if draw.dtype is DType.F16 else 1e8


def _largest(draw: Draw) -> None:
    """Have norms beyond float32, which no value is."""
    draw.k[:] = np.sign(draw.k) * (65_504 if draw.dtype is DType.F16 else 3.3e38)


def _large(draw: Draw) -> None:
    draw.k *= 1e3 if draw.dtype is DType.F16 else 1e20


def _tiny(draw: Draw) -> None:
    draw.k *= 1e-6 if draw.dtype is DType.F16 else 1e-30
    draw.q *= 1e-6 if draw.dtype is DType.F16 else 1e-12


def _subnormal(draw: Draw) -> None:
    draw.k *= 1e-7 if draw.dtype is DType.F16 else 1e-38


def _subnormal_products(draw: Draw) -> None:
    draw.k *= 1e-7 if draw.dtype is DType.F16 else 1e-20
    draw.q *= 1e-7 if draw.dtype is DType.F16 else 1e-20


def _subnormal_query(draw: Draw) -> None:
    _flush_most(draw.q, draw.k, draw.w)


def _subnormal_keys(draw: Draw) -> None:
    _flush_most(draw.k, draw.q, draw.w)


def _subnormal_weights(draw: Draw) -> None:
    _flush_most(draw.w, draw.q, draw.k)


def _flush_most(low: Doubles, *others: Doubles) -> None:
    """Make one operand subnormal as float32, and no product: whoever flushes it loses all."""
    low[:] = 1e-38
    for values in others:
        np.abs(values * 1e4, out=values)


def _masked(draw: Draw) -> None:
    draw.bias[draw.is_rare(0.7)] = -np.inf


def _at_the_threshold(draw: Draw) -> None:
    draw.bias[:] = np.where(draw.is_rare(0.97), -1e30, -9e29)


def _causal(draw: Draw) -> None:
    num_queries = draw.bias.shape[2]
    last = np.arange(num_queries)[:, None] + draw.T - num_queries - draw.T // 2
    draw.bias[:] = np.where(np.arange(draw.T) > last, -np.inf, 0)


def _finite_mask(draw: Draw) -> None:
    draw.bias[draw.is_rare(0.9)] = -1e9


def _infinite_bias(draw: Draw) -> None:
    draw.bias[draw.is_rare(0.01)] = np.inf


def _nan_bias(draw: Draw) -> None:
    draw.bias[draw.is_rare(0.5)] = np.nan


def _offset(draw: Draw) -> None:
    draw.bias[:] = 1000


def _huge_bias(draw: Draw) -> None:
    draw.bias[draw.is_rare(0.2)] = np.finfo(np.float32).max


def _negative_zeros(draw: Draw) -> None:
    draw.bias[:] = -0.0
    draw.w[:] = -np.abs(draw.w)
    draw.k[:, draw.some(draw.T // 2)] = -0.0


def _outliers(draw: Draw) -> None:
    draw.k[:, draw.some(7)] *= 1000


def _negative_weights(draw: Draw) -> None:
    draw.w[:] = -np.abs(draw.w)


def _near_ties(draw: Draw) -> None:
    draw.k[:] = draw.k[:, :1]
    draw.k[:, :, :1] += 0.01 * draw.rng.integers(0, 3, (*draw.k.shape[:2], 1))


def _last_bits(draw: Draw) -> None:
    """Differ in the last place of f32: a half type makes ties of it."""
    draw.k[:] = draw.k[:, :1] * (1 + 2.0**-23 * draw.rng.integers(-3, 4, draw.k.shape))


def _permuted_depth(draw: Draw) -> None:
    """Give every key the same products in another order: scores differ by rounding alone."""
    draw.q[:] = 1
    draw.k[:] = draw.rng.permuted(np.broadcast_to(draw.k[:, :1], draw.k.shape), axis=2)


def _integers(draw: Draw) -> None:
    for values in (draw.q, draw.k, draw.w):
        np.round(values, out=values)


def _all_masked(draw: Draw) -> None:
    draw.bias[:] = -np.inf


_KINDS: tuple[Callable[[Draw], None], ...] = (
    _gauss, _zero_query, _zero_weights, _duplicates, _mostly_negative, _equal_heads, _nan_keys,
    _nan_query, _nan_weight, _infinite_keys, _infinite_weight, _huge, _largest, _large, _tiny,
    _subnormal, _subnormal_products, _subnormal_query, _subnormal_keys, _subnormal_weights, _masked,
    _at_the_threshold, _causal, _finite_mask, _infinite_bias, _nan_bias, _offset, _huge_bias,
    _negative_zeros, _outliers, _negative_weights, _near_ties, _last_bits, _permuted_depth,
    _integers, _all_masked,
)  # fmt: skip
KINDS = {kind.__name__.removeprefix("_"): kind for kind in _KINDS}


def adversarial_case(
    kind: str, dtype: DType, top_k: int, *, B: int, S: int, T: int, H: int, D: int, seed: int = 0
) -> IndexSelectCase:
    """Return a case of a kind; every size may be 0."""
    rng = np.random.default_rng([seed, list(KINDS).index(kind), B, S, T, H, D])
    draw = Draw(rng, {"B": B, "S": S, "T": T, "H": H, "D": D}, dtype)
    if draw.k.size and draw.q.size:
        KINDS[kind](draw)

    def single(values: Doubles) -> Floats:
        with np.errstate(all="ignore"):
            return values.astype(np.float32)

    return IndexSelectCase(
        f"{kind}-{dtype}", single(draw.q), single(draw.k), single(draw.w), single(draw.bias),
        top_k, scale=max(1, D) ** -0.5, weights_scale=max(1, H) ** -0.5, dtype=dtype,
    )  # fmt: skip


def widened(case: IndexSelectCase) -> tuple[Floats, Floats, Floats]:
    """Return query, key and weights as the operator reads them."""
    query, key, weights = (
        widen(case.inputs[name], case.dtype) for name in ("query", "key", "weights")
    )
    return query, key, weights
