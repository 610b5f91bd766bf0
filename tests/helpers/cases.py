"""Inputs of DsaIndexSelect, as frozen cases that tests and benchmarks share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxrt.graph import AttributeValue, Graph, Node
from nxrt.kernels.dsa_index_select.reference import select_indices
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES, input_specs, parse_attributes
from nxrt.kernels.numerics import narrow, widen
from nxrt.tensor import Dim, DType
from tests.helpers.lcg import Lcg

OUTPUT = "selected"
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class IndexSelectCase:
    """Hold one set of inputs as float32; `inputs` are what the operator is given.

    Args:
        id: for the test's name.
        query: [B, S, H, D].
        key: [B, T, D].
        weights: [B, S, H].
        bias: [B, 1, S, T].
        top_k: how many to select.
        dtype: what query, key and weights are stored as.
    """

    id: str
    query: Floats
    key: Floats
    weights: Floats
    bias: Floats
    top_k: int
    scale: float = 1.0
    weights_scale: float = 1.0
    dtype: DType = DType.F32
    opset: int = 1
    extra_attributes: Mapping[str, AttributeValue] = field(default_factory=dict)

    @cached_property
    def inputs(self) -> dict[str, NDArray[Any]]:
        floats = (self.query, self.key, self.weights)
        stored = [narrow(values, self.dtype) for values in floats]
        return dict(zip(INPUT_NAMES, (*stored, self.bias), strict=True))

    @cached_property
    def node(self) -> Node:
        attributes = {
            "top_k": self.top_k,
            "scale": self.scale,
            "weights_scale": self.weights_scale,
            **self.extra_attributes,
        }
        return Node(
            "DsaIndexSelect", INPUT_NAMES, (OUTPUT,), domain="pkg.nxrt", attributes=attributes
        )

    @cached_property
    def graph(self) -> Graph:
        return self.graph_of(self.key.shape[1])

    def graph_of(self, num_keys: Dim) -> Graph:
        """Return the graph with another number of keys, which may be a name."""
        B, S, H, D = self.query.shape
        specs = input_specs(self.dtype, B=B, S=S, T=num_keys, H=H, D=D)
        return Graph((self.node,), specs, (OUTPUT,), {"pkg.nxrt": self.opset})

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        batch, num_queries = self.query.shape[:2]
        return (batch, 1, num_queries, self.top_k)

    def expected(self) -> NDArray[np.int64]:
        """Return what the reference selects."""
        stored = list(self.inputs.values())[:3]
        query, key, weights = (widen(array, self.dtype) for array in stored)
        return select_indices(query, key, weights, self.bias, parse_attributes(self.node))


def causal(num_queries: int, num_keys: int, batch: int = 1) -> Floats:
    """Return [B, 1, S, T]: the last query sees every key, each earlier one a key less."""
    last_seen = np.arange(num_queries)[:, None] + (num_keys - num_queries)
    row = np.where(np.arange(num_keys) <= last_seen, np.float32(0), np.float32(-np.inf))
    return np.ascontiguousarray(np.broadcast_to(row, (batch, 1, num_queries, num_keys)))


def no_bias(batch: int, num_queries: int, num_keys: int) -> Floats:
    return np.zeros((batch, 1, num_queries, num_keys), np.float32)


def drawn_case(
    case_id: str,
    *,
    num_queries: int,
    num_keys: int,
    top_k: int,
    batch: int = 1,
    num_heads: int = 2,
    depth: int = 8,
    seed: int = 1,
    is_causal: bool = False,
    **options: Any,
) -> IndexSelectCase:
    """Return a case drawn from the contract's generator, in the order query, key, weights."""
    lcg = Lcg(seed)
    query = lcg.values(batch, num_queries, num_heads, depth)
    key = lcg.values(batch, num_keys, depth)
    weights = lcg.values(batch, num_queries, num_heads)
    bias = no_bias(batch, num_queries, num_keys)
    if is_causal:
        bias = causal(num_queries, num_keys, batch)
    options.setdefault("scale", depth**-0.5 if depth else 1.0)
    options.setdefault("weights_scale", num_heads**-0.5 if num_heads else 1.0)
    return IndexSelectCase(case_id, query, key, weights, bias, top_k, **options)


def score_is_bias(case_id: str, bias: Floats, top_k: int, **options: Any) -> IndexSelectCase:
    """Return a case whose every score is exactly its bias (recipe: q = 0, w = 1)."""
    batch, _, num_queries, num_keys = bias.shape
    return IndexSelectCase(
        case_id,
        np.zeros((batch, num_queries, 1, 1), np.float32),
        np.ones((batch, num_keys, 1), np.float32),
        np.ones((batch, num_queries, 1), np.float32),
        bias,
        top_k,
        **options,
    )


def score_is_key(
    case_id: str, keys: Floats, top_k: int, *, num_rows: int = 1, **options: Any
) -> IndexSelectCase:
    """Return a case whose score is relu(k_t) in every row (recipe: H = D = q = w = 1)."""
    ones = np.ones((1, num_rows, 1, 1), np.float32)
    return IndexSelectCase(
        case_id,
        ones,
        keys.reshape(1, -1, 1),
        ones[..., 0],
        no_bias(1, num_rows, keys.size),
        top_k,
        **options,
    )


def best_positions(scores: Floats, top_k: int) -> list[int]:
    """Return what one row must select, in plain Python: no nxrt code, no NaN among the scores."""
    order = sorted(range(len(scores)), key=lambda t: (-float(scores[t]), t))
    chosen = sorted(order[:top_k])
    return chosen + [-1] * (top_k - len(chosen))
