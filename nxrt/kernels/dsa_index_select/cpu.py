"""DsaIndexSelect on the CPU: bounds from a matrix product, exact sums where they leave a doubt.

The same bytes as reference.py, whatever the data: a key is kept or dropped by its bounds only where
they prove what its score would do. Where bounds thin out nothing, every key is scored exactly. It
shares no arithmetic with the oracle, so that comparing the two says something.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxrt.graph import Node
from nxrt.kernels.api import Kernel
from nxrt.kernels.dsa_index_select.reference import DsaIndexSelectReferenceFactory
from nxrt.kernels.dsa_index_select.score_bounds import blocks, bound_scores, key_norms
from nxrt.kernels.dsa_index_select.spec import (
    MASK_THRESHOLD,
    Attributes,
    check_execution,
    check_node,
)
from nxrt.kernels.numerics import canonicalize_nan, total_order_key, widen
from nxrt.tensor import TensorSpec, TensorView

_MAX_CELLS = 1 << 20
"""Rows are taken in blocks of at most so many keys, and of so many query values."""
_MAX_EXACT_CELLS = 1 << 17
"""Keys that are scored exactly are taken in blocks of so many dots, which stay in a near cache."""
_ABOVE_ALL = np.uint32(0xFFFFFFFF)
"""As an order key: above NaN, and so an upper bound of every score."""


def select_by_filter(
    query: NDArray[np.float32],
    key: NDArray[np.float32],
    weights: NDArray[np.float32],
    attention_bias: NDArray[np.float32],
    attributes: Attributes,
) -> NDArray[np.int64]:
    """Return for every query the positions of its top_k keys, ascending, padded with -1.

    Args:
        query: [B, S, H, D].
        key: [B, T, D].
        weights: [B, S, H].
        attention_bias: [B, 1, S, T]; a key is allowed where it is > -1e30.
        attributes: top_k and the two scales.

    Returns:
        [B, 1, S, top_k], what reference.select_indices returns.

    Source: docs/operators/dsa_index_select.md.
    """
    batch, num_queries, num_heads, depth = query.shape
    num_keys = key.shape[1]
    selected = np.full((batch, 1, num_queries, attributes.top_k), -1, np.int64)
    num_rows = _MAX_CELLS // max(1, num_keys, num_heads * max(1, depth))
    with np.errstate(all="ignore"):
        weight_products = weights * np.float32(attributes.weights_scale)
        for b in range(batch):
            keys = _Keys(key[b], key_norms(key[b]) if num_keys > attributes.top_k else None)
            for rows in blocks(num_queries, num_rows):
                part = _Rows(query[b, rows], weight_products[b, rows], attention_bias[b, 0, rows])
                _select_rows(part, keys, attributes, selected[b, 0, rows])
    return selected


@dataclass(frozen=True)
class _Keys:
    values: NDArray[np.float32]  # [T, D]
    norms: NDArray[np.float32] | None  # [T], None where no row has keys to choose from


@dataclass(frozen=True)
class _Rows:
    query: NDArray[np.float32]  # [R, H, D]
    weights: NDArray[np.float32]  # [R, H], times weights_scale
    bias: NDArray[np.float32]  # [R, T]


def _select_rows(
    rows: _Rows, keys: _Keys, attributes: Attributes, selected: NDArray[np.int64]
) -> None:
    """Write the chosen positions of each row to `selected` [R, top_k], which holds -1."""
    top_k = attributes.top_k
    allowed = rows.bias > MASK_THRESHOLD
    has_choice = np.count_nonzero(allowed, axis=1) > top_k
    for row in np.flatnonzero(~has_choice):
        positions = np.flatnonzero(allowed[row])
        selected[row, : positions.size] = positions
    if keys.norms is None or not has_choice.any():
        return
    chosen = np.flatnonzero(has_choice)
    part = _Rows(rows.query[chosen], rows.weights[chosen], rows.bias[chosen])
    lower, upper = bound_scores(
        part.query, keys.values, keys.norms, part.weights, part.bias, attributes.scale
    )
    lower[~allowed[chosen]] = -np.inf
    num_below = lower.shape[1] - top_k
    thresholds = np.partition(lower, num_below, axis=1)[:, num_below]
    for i, row in enumerate(chosen):
        # At least top_k scores reach the threshold, which those below it cannot do.
        positions = np.flatnonzero((upper[i] >= thresholds[i]) & allowed[row])
        candidates = _Candidates(positions, lower[i, positions], upper[i, positions])
        selected[row] = _settle(part, i, keys.values, candidates, attributes)


@dataclass(frozen=True)
class _Candidates:
    positions: NDArray[np.int64]  # ascending
    lower: NDArray[np.float32]
    upper: NDArray[np.float32]


def _settle(
    rows: _Rows, row: int, key: NDArray[np.float32], found: _Candidates, attributes: Attributes
) -> NDArray[np.int64]:
    """Return the best top_k positions of one row, scoring exactly what its bounds leave open.

    There are at least top_k candidates. Of two equal scores the lower position wins: what is
    compared is (order key, ~place), and no two are equal.
    """
    num_below = found.positions.size - attributes.top_k
    if num_below == 0:
        return found.positions
    is_unknown = found.lower == -np.inf
    low_keys = np.where(is_unknown, np.uint32(0), total_order_key(found.lower))
    high_keys = np.where(is_unknown, _ABOVE_ALL, total_order_key(found.upper))
    low, high = _ranked(low_keys), _ranked(high_keys)
    threshold = np.partition(low, num_below)[num_below]
    # Whoever beats a key above the best of the rest is one of the top_k at the threshold.
    is_certain = low > high[low < threshold].max()
    is_open = ~is_certain & (high >= threshold)
    doubtful = np.flatnonzero(is_open & (low_keys != high_keys))
    scores = _exact_scores(rows, row, key, found.positions[doubtful], attributes.scale)
    low_keys[doubtful] = total_order_key(scores)
    places = np.flatnonzero(is_open)
    descending = np.argsort(~_ranked(low_keys)[places])
    num_wanted = attributes.top_k - np.count_nonzero(is_certain)
    is_certain[places[descending[:num_wanted]]] = True
    chosen: NDArray[np.int64] = found.positions[is_certain]
    return chosen


def _ranked(order_keys: NDArray[np.uint32]) -> NDArray[np.uint64]:
    places = np.arange(order_keys.size, dtype=np.uint32)
    return order_keys.astype(np.uint64) << np.uint64(32) | ~places


def _exact_scores(
    rows: _Rows, row: int, key: NDArray[np.float32], positions: NDArray[np.int64], scale: float
) -> NDArray[np.float32]:
    """Return one row's scores of some keys as the contract computes them, NaN canonical.

    Heads are independent up to their sum: only depth, and then heads, are taken one by one.
    """
    query, weights = rows.query[row], rows.weights[row, :, None]
    num_heads, depth = query.shape
    scores = np.empty(positions.size, np.float32)
    for part in blocks(positions.size, _MAX_EXACT_CELLS // max(1, num_heads, depth // 8)):
        depth_major_key = np.ascontiguousarray(key[positions[part]].T)
        dots = np.zeros((num_heads, depth_major_key.shape[1]), np.float32)
        product = np.empty_like(dots)
        for d in range(depth):
            np.multiply(query[:, d, None], depth_major_key[d], out=product)
            dots += product
        # fmax, because a NaN dot counts as 0; maximum would keep it.
        terms = np.fmax(np.float32(scale) * dots, np.float32(0)) * weights
        total = np.zeros(dots.shape[1], np.float32)
        for h in range(num_heads):
            total += terms[h]
        scores[part] = canonicalize_nan(total + rows.bias[row, positions[part]])
    return scores


class DsaIndexSelectCpu(Kernel[None]):
    """Run the filter on host tensors of any strides."""

    def __init__(self, attributes: Attributes) -> None:
        self._attributes = attributes

    def execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorView],
        *,
        stream: None,  # noqa: ARG002  (there is none on the CPU)
    ) -> None:
        """Check, widen to float32, compute, write. Raises InvalidNodeError."""
        views = check_execution(self._attributes, inputs, outputs, must_be_contiguous=False)[1]
        query, key, weights, bias = (
            widen(np.ascontiguousarray(view.to_array()), view.dtype) for view in views
        )
        outputs[0].to_array()[...] = select_by_filter(query, key, weights, bias, self._attributes)

    def close(self) -> None:
        """Do nothing: there is nothing to give up."""


class DsaIndexSelectCpuFactory(DsaIndexSelectReferenceFactory):
    """Claim what the oracle claims."""

    def create(
        self,
        node: Node,
        inputs: Sequence[TensorSpec | None],
        context: None,  # noqa: ARG002  (there is none on the CPU)
    ) -> Kernel[Any]:
        """Create the kernel. Raises InvalidNodeError for a node that `claim` declines."""
        return DsaIndexSelectCpu(check_node(node, inputs)[0])
