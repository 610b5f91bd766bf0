"""Bounds of DsaIndexSelect's scores from one float32 matrix product, with a proof of their radius.

It decides nothing and computes no score as the contract wants it; cpu.py does, where bounds do not
settle a key. Nothing here depends on the order in which a BLAS adds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNIT = 2.0**-24
"""The largest relative error of one rounding to float32."""
TINY = 2.0**-126
"""The largest error of one result, or one operand, that underflows or is flushed to zero."""
LARGE = 2.0**100
"""No partial sum of a key that has bounds gets so large, in whatever order it is taken."""
MAX_GAMMA = 0.01
"""Where rounding may cost more than this share of a sum, no key has bounds."""
INFLATE = 1.05
"""For what is of second order: products of errors, underflow times rounding, and these formulas'
own roundings."""

_BLOCK_CELLS = 1 << 21
"""Dots of a row, a head and a key that are held at once."""


@dataclass(frozen=True)
class Radius:
    """Hold what each row adds to its radius; every array is [R, 1] float32, rounded up.

    With u = UNIT, n = D + H + 2, gamma = n u / (1 - n u), w = weights * weights_scale as float32,
    c = scale, v[d] = sum over h of |w[h]| |q[h,d]|, A[h] = sum over d of |q[h,d] k[d]|, and
    s = sum over h of w[h] max(c q[h].k, 0) without any rounding:

    * Contract: a product is rounded once and then at most D - 1 times as part of a sum, scaled,
      weighted, and added up over heads: D + 1 + 1 + (H - 1) factors 1 + delta, |delta| <= u.
      max(., 0) widens no error, so the total is within gamma_(D+H+1) * sum |w| c A of s.
    * BLAS: whatever the order of additions, blocked or not, fused or not, a product of f32 values
      is rounded at most once and meets at most D - 1 additions, and likewise over heads; then the
      scale: the same gamma_(D+H+1). Zeros that an accumulator starts from add exactly.
    * total -+ radius is rounded once: 2 u covers it. gamma_(n+1) - gamma_n >= u, hence the n above.
    * sum over h of |w[h]| c A[h] = c sum over d of v[d] |k[d]| <= c ||v|| ||k||: Cauchy-Schwarz.

    So |total - score| <= 2 gamma c ||v|| ||k|| + underflow. An operation that underflows, and one
    that a BLAS flushes, costs at most TINY; an operand that is taken as zero costs TINY times the
    other one. With W = sum |w|, Q = largest ||q[h]||: a dot costs 3 D of the first kind (products
    of either side, sums of one) and TINY (sum |q| + sum |k|) <= TINY sqrt(D) (Q + ||k||) of the
    second; over heads 2 H c + W + H of the first, and c W and TINY c sum of ||q[h]|| ||k|| of the
    second. That is doubled too, so that half of the radius holds what either side alone may do.
    Adding the bias afterwards, to nearest, keeps order.

    Args:
        per_norm: of a score, times the key's norm.
        floor: of a score.
        dot_per_norm: of any head's dot, times the key's norm.
        dot_floor: of any head's dot.
        norm_limit: keys that do not stay below it have no bounds.
        is_zero: bool; every score below the limit is 0 but for the bias.
    """

    per_norm: NDArray[np.float32]
    floor: NDArray[np.float32]
    dot_per_norm: NDArray[np.float32]
    dot_floor: NDArray[np.float32]
    norm_limit: NDArray[np.float32]
    is_zero: NDArray[np.bool_]


@dataclass(frozen=True)
class Approximation:
    """Hold what the matrix product says of each row and key, both [R, T] float32.

    Args:
        total: the sum over heads, without bias.
        largest_dot: over heads; -inf without heads.
    """

    total: NDArray[np.float32]
    largest_dot: NDArray[np.float32]


def bound_scores(
    query: NDArray[np.float32],
    key: NDArray[np.float32],
    norms: NDArray[np.float32],
    weights: NDArray[np.float32],
    bias: NDArray[np.float32],
    scale: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return lower and upper bounds [R, T] of every score, bias included.

    Where nothing is known they are -inf and +inf, and +inf then stands for NaN as well. Of an
    allowed key no other lower bound is -inf. Neither is ever -0 or NaN where the bias is a number.

    Args:
        query: [R, H, D].
        key: [T, D].
        norms: [T], what `key_norms` returns.
        weights: [R, H], already times weights_scale.
        bias: [R, T].
        scale: as float32 holds it.
    """
    lower, upper = np.empty_like(bias), np.empty_like(bias)
    with np.errstate(all="ignore"):
        radius = radius_of(query, weights, scale)
        num_rows, num_heads = weights.shape
        for keys in blocks(key.shape[0], _BLOCK_CELLS // max(1, num_rows * num_heads)):
            found = approximate(query, key[keys], weights, scale)
            low, high = bounds_of(radius, found, norms[keys])
            np.add(low, bias[:, keys], out=lower[:, keys])
            np.add(high, bias[:, keys], out=upper[:, keys])
            is_unknown = ~(norms[keys] < radius.norm_limit)
            lower[:, keys][is_unknown] = -np.inf
            upper[:, keys][is_unknown] = np.inf
    return lower, upper


def blocks(size: int, step: int) -> Iterator[slice]:
    """Yield slices that cover a range, each of `step` elements or at least one."""
    for start in range(0, size, max(1, step)):
        yield slice(start, min(start + max(1, step), size))


def key_norms(key: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the norm of each key [T], rounded up; not finite where the key is not.

    Args:
        key: [T, D].
    """
    squares = np.empty(key.shape[0])
    # A key that nobody has written may hold any bits, a signalling NaN among them.
    with np.errstate(all="ignore"):
        for keys in blocks(key.shape[0], _BLOCK_CELLS // (4 * max(1, key.shape[1]))):
            # Squares of float32 values neither overflow nor underflow in float64.
            part = key[keys].astype(np.float64)
            squares[keys] = np.einsum("td,td->t", part, part)
        return _rounded_up(np.sqrt(squares))


def radius_of(query: NDArray[np.float32], weights: NDArray[np.float32], scale: float) -> Radius:
    """Return the radii of rows.

    Args:
        query: [R, H, D].
        weights: [R, H], already times weights_scale.
        scale: as float32 holds it.
    """
    num_heads, depth = query.shape[1:]
    magnitudes = np.abs(query.astype(np.float64))
    weight = np.abs(weights.astype(np.float64))
    v = _norm(np.matmul(weight[:, None, :], magnitudes)[:, 0])
    head_norms = _norm(magnitudes)
    total_weight = weight.sum(axis=1)
    q = head_norms.max(axis=1, initial=0.0)
    gamma, dot_gamma = _gamma(depth + num_heads + 2), _gamma(depth + 2)
    root = depth**0.5
    dot_flush = 3 * depth + 2 + root * q
    flush = scale * (total_weight * (dot_flush + 1) + 2 * num_heads) + total_weight + num_heads + 2
    flush_per_norm = scale * (total_weight * root + head_norms.sum(axis=1)) + 1
    per_norm = 2 * INFLATE * (gamma * scale * v + TINY * flush_per_norm)
    floor = 2 * INFLATE * TINY * flush
    widest = np.stack([np.ones_like(v), q, scale * q, v, scale * v, per_norm]).max(axis=0)
    is_safe = (np.maximum(floor, total_weight) < LARGE) & (widest < LARGE) & (gamma < MAX_GAMMA)
    return Radius(
        per_norm=_rounded_up(per_norm)[:, None],
        floor=_rounded_up(floor)[:, None],
        dot_per_norm=_rounded_up(2 * INFLATE * (dot_gamma * q + TINY * root))[:, None],
        dot_floor=_rounded_up(2 * INFLATE * TINY * dot_flush)[:, None],
        norm_limit=np.where(is_safe, LARGE / widest, -1.0).astype(np.float32)[:, None],
        is_zero=(v == 0)[:, None],
    )


def approximate(
    query: NDArray[np.float32],
    key: NDArray[np.float32],
    weights: NDArray[np.float32],
    scale: float,
) -> Approximation:
    """Return the scores without bias as a BLAS computes them.

    Args:
        query: [R, H, D].
        key: [T, D].
        weights: [R, H], already times weights_scale.
        scale: as float32 holds it.
    """
    num_rows, num_heads, depth = query.shape
    dots = query.reshape(num_rows * num_heads, depth) @ key.T
    dots = dots.reshape(num_rows, num_heads, key.shape[0])
    largest_dot = dots.max(axis=1, initial=-np.inf)
    np.maximum(dots, np.float32(0), out=dots)
    total = (weights[:, None, :] @ dots)[:, 0]
    total *= np.float32(scale)
    return Approximation(total, largest_dot)


def bounds_of(
    radius: Radius, found: Approximation, norms: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return lower and upper bounds [R, T] of what the contract adds up, before the bias.

    They hold for keys whose norm is below the row's limit. Both are +0 where the score is certain
    to be: no head's dot is positive, or no product differs from 0.
    """
    width = radius.per_norm * norms
    width += radius.floor
    low, high = found.total - width, found.total + width
    dot_width = radius.dot_per_norm * norms
    dot_width += radius.dot_floor
    is_zero = found.largest_dot < -dot_width
    is_zero |= radius.is_zero
    low[is_zero] = 0
    high[is_zero] = 0
    return low, high


def _gamma(num_roundings: int) -> float:
    """Return the relative error of so many roundings; infinity where it has no bound."""
    share = num_roundings * UNIT
    return share / (1 - share) if share < 0.5 else np.inf


def _norm(values: NDArray[np.float64]) -> NDArray[np.float64]:
    squares: NDArray[np.float64] = np.einsum("...d,...d->...", values, values)
    return np.sqrt(squares)


def _rounded_up(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return float32 values that are normal and not below; TINY more where values are tiny."""
    return (values * (1 + 2.0**-20) + TINY).astype(np.float32)
