"""DsaIndexSelect in NumPy: the oracle that every other kernel is compared with, byte for byte.

It follows the contract step by step and is not meant to be fast. Vectorised over rows and keys,
which are independent; sequential over heads and depth, whose order the contract fixes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import InvalidInputError
from nxrt.graph import Node
from nxrt.kernels.api import Kernel, KernelFactory, KernelMatch
from nxrt.kernels.dsa_index_select.spec import (
    MASK_THRESHOLD,
    Attributes,
    check_execution,
    check_node,
)
from nxrt.kernels.numerics import canonicalize_nan, total_order_key, widen
from nxrt.tensor import TensorSpec, TensorView

_MAX_CELLS = 1 << 21
"""Rows are taken in blocks of at most so many cells, which bounds the temporaries."""


def select_indices(
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
        [B, 1, S, top_k].

    Source: docs/operators/dsa_index_select.md.
    """
    batch, num_queries = query.shape[:2]
    selected = np.full((batch, 1, num_queries, attributes.top_k), -1, np.int64)
    for b in range(batch):
        depth_major_key = np.ascontiguousarray(key[b].T)
        for rows in _row_blocks(num_queries, key.shape[1]):
            bias = attention_bias[b, 0, rows]
            scores = _scores(query[b, rows], depth_major_key, weights[b, rows], bias, attributes)
            allowed = bias > MASK_THRESHOLD
            for s, row in enumerate(range(rows.start, rows.stop)):
                chosen = _select_row(scores[s], allowed[s], attributes.top_k)
                selected[b, 0, row, : chosen.size] = chosen
    return selected


def _row_blocks(num_rows: int, num_keys: int) -> Iterator[slice]:
    step = max(1, _MAX_CELLS // max(1, num_keys))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _scores(
    query: NDArray[np.float32],
    key: NDArray[np.float32],
    weights: NDArray[np.float32],
    bias: NDArray[np.float32],
    attributes: Attributes,
) -> NDArray[np.float32]:
    """Return the final scores [S, T] of query [S, H, D] and key [D, T], NaN canonical."""
    num_heads, depth = query.shape[1:]
    total = np.zeros(bias.shape, np.float32)
    with np.errstate(all="ignore"):
        weight_products = weights * np.float32(attributes.weights_scale)
        product = np.empty_like(total)
        for h in range(num_heads):
            dot = np.zeros_like(total)
            for d in range(depth):
                np.multiply(query[:, h, d, None], key[d], out=product)
                dot += product
            # fmax, because a NaN dot counts as 0; maximum would keep it.
            scored = np.fmax(np.float32(attributes.scale) * dot, np.float32(0))
            total += scored * weight_products[:, h, None]
        return canonicalize_nan(total + bias)


def _select_row(
    scores: NDArray[np.float32], allowed: NDArray[np.bool_], top_k: int
) -> NDArray[np.int64]:
    """Return the positions of the best allowed scores, equal ones lowest position first."""
    positions = np.flatnonzero(allowed)
    descending = np.argsort(~total_order_key(scores[positions]), kind="stable")
    return np.sort(positions[descending[:top_k]])


class DsaIndexSelectReference(Kernel[None]):
    """Run the oracle on host tensors of any strides."""

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
        query, key, weights, bias = (widen(_dense(view), view.dtype) for view in views)
        outputs[0].to_array()[...] = select_indices(query, key, weights, bias, self._attributes)

    def close(self) -> None:
        """Do nothing: there is nothing to give up."""


def _dense(view: TensorView) -> NDArray[Any]:
    return np.ascontiguousarray(view.to_array())


class DsaIndexSelectReferenceFactory(KernelFactory[None]):
    """Claim what the contract accepts."""

    def claim(self, node: Node, inputs: Sequence[TensorSpec | None]) -> KernelMatch:
        """Answer by the rules of spec.py."""
        try:
            return KernelMatch.supported(check_node(node, inputs)[1])
        except InvalidInputError as refusal:
            return KernelMatch.declined(str(refusal))

    def create(
        self,
        node: Node,
        inputs: Sequence[TensorSpec | None],
        context: None,  # noqa: ARG002  (there is none on the CPU)
    ) -> Kernel[Any]:
        """Create the kernel. Raises InvalidNodeError for a node that `claim` declines."""
        return DsaIndexSelectReference(check_node(node, inputs)[0])
