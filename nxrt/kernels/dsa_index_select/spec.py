"""What DsaIndexSelect accepts: attributes, dtypes, shapes; the same rules for claim and execution.

Both back ends check with this file, so that they cannot drift. It computes no scores. The contract
is docs/operators/dsa_index_select.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nxrt.errors import InvalidNodeError
from nxrt.graph import Node
from nxrt.kernels.api import OpKey
from nxrt.tensor import MAX_SIZE, Dim, DType, TensorSpec, TensorView, checked_product

KEY = OpKey("pkg.nxrt", "DsaIndexSelect", 1)
INPUT_NAMES = ("query", "key", "weights", "attention_bias")
FLOAT_DTYPES = (DType.F32, DType.F16, DType.BF16)
OUTPUT_DTYPE = DType.I64
ATTRIBUTE_NAMES = ("top_k", "scale", "weights_scale")
MASK_THRESHOLD = np.float32(-1e30)
"""A key is allowed where its bias is strictly above this; NaN is not."""

_RANKS = {"query": 4, "key": 3, "weights": 3, "attention_bias": 4}
_LAYOUTS = {
    "query": "[B, S, H, D]",
    "key": "[B, T, D]",
    "weights": "[B, S, H]",
    "attention_bias": "[B, 1, S, T]",
}
# (dimension, axis of query, other input, its axis), in the order in which they are reported.
_QUERY_MATCHES = (
    ("B", 0, "key", 0),
    ("B", 0, "weights", 0),
    ("B", 0, "attention_bias", 0),
    ("S", 1, "weights", 1),
    ("H", 2, "weights", 2),
    ("D", 3, "key", 2),
)


def input_specs(dtype: DType, *, B: Dim, S: Dim, T: Dim, H: Dim, D: Dim) -> dict[str, TensorSpec]:
    """Return the specs of the four inputs, by name; every dimension may be a name."""
    return {
        "query": TensorSpec(dtype, (B, S, H, D)),
        "key": TensorSpec(dtype, (B, T, D)),
        "weights": TensorSpec(dtype, (B, S, H)),
        "attention_bias": TensorSpec(DType.F32, (B, 1, S, T)),
    }


@dataclass(frozen=True)
class Attributes:
    """Hold the checked attributes; both scales are already rounded to float32."""

    top_k: int
    scale: float
    weights_scale: float


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of one execution, each product checked against the 63-bit range."""

    B: int
    S: int
    T: int
    H: int
    D: int
    K: int

    @property
    def num_rows(self) -> int:
        """Return B * S."""
        return checked_product("row count", self.B, self.S)

    @property
    def num_cells(self) -> int:
        """Return B * S * T."""
        return checked_product("cell count", self.B, self.S, self.T)

    @property
    def output(self) -> tuple[int, int, int, int]:
        """Return the shape of selected_indices."""
        return (self.B, 1, self.S, self.K)


def parse_attributes(node: Node) -> Attributes:
    """Return the node's attributes.

    Raises:
        InvalidNodeError: in this order: an unknown name, top_k, scale, weights_scale.
    """
    for name in node.attributes:
        if name not in ATTRIBUTE_NAMES:
            raise InvalidNodeError(
                f"attribute {name}",
                found="a name that is not part of the frozen v1 ABI",
                accepted=", ".join(ATTRIBUTE_NAMES),
            )
    top_k = node.attributes.get("top_k")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 0 < top_k <= MAX_SIZE:
        raise InvalidNodeError(
            "attribute top_k", found=_shown(top_k), accepted=f"an integer from 1 to {MAX_SIZE}"
        )
    return Attributes(
        top_k,
        _positive_f32("scale", node.attributes.get("scale")),
        _positive_f32("weights_scale", node.attributes.get("weights_scale", 1.0)),
    )


def _positive_f32(name: str, value: object) -> float:
    accepted = "a number that is finite and > 0 as float32"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not _fits_f32(value):  # type: ignore[arg-type]  # a number by now
        raise InvalidNodeError(f"attribute {name}", found=_shown(value), accepted=accepted)
    return float(np.float32(value))  # type: ignore[arg-type]


def _fits_f32(value: float) -> bool:
    if isinstance(value, int) and abs(value) >= 2**128:
        return False
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    return math.isfinite(rounded) and rounded > 0


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)


def check_node(
    node: Node, inputs: Sequence[TensorSpec | None]
) -> tuple[Attributes, tuple[TensorSpec, ...]]:
    """Check a node before it is created: attributes, arity, dtypes, ranks, known dimensions.

    Args:
        node: the node.
        inputs: specs by slot; None is an omitted input; dimensions may be symbolic.

    Returns:
        The attributes and the output specs.

    Raises:
        InvalidNodeError, SizeOverflowError: naming the input, what came and what is accepted.
    """
    attributes = parse_attributes(node)
    _check_count("inputs", len(inputs), len(INPUT_NAMES))
    _check_count("outputs", len(node.outputs), 1)
    specs = _present(inputs)
    _check_dtypes(specs)
    _check_shapes(specs)
    batch, num_queries = specs["query"].shape[:2]
    output = TensorSpec(OUTPUT_DTYPE, (batch, 1, num_queries, attributes.top_k))
    _check_sizes(specs, output)
    return attributes, (output,)


def check_execution(
    attributes: Attributes,
    inputs: Sequence[TensorView | None],
    outputs: Sequence[TensorView],
    *,
    must_be_contiguous: bool,
) -> tuple[Shape, tuple[TensorView, ...]]:
    """Check tensors before anything is computed or enqueued; return the sizes and the inputs.

    Args:
        attributes: of the node.
        inputs: query, key, weights, attention_bias.
        outputs: selected_indices.
        must_be_contiguous: refuse strided tensors.

    Raises:
        InvalidNodeError, SizeOverflowError: in the order of the contract: counts, dtypes, layout,
            ranks and dimensions, element counts, output shape.
    """
    _check_count("inputs", len(inputs), len(INPUT_NAMES))
    _check_count("outputs", len(outputs), 1)
    specs = _present([None if view is None else view.spec for view in inputs])
    views = tuple(view for view in inputs if view is not None)
    _check_dtypes(specs)
    if outputs[0].dtype is not OUTPUT_DTYPE:
        found, accepted = str(outputs[0].dtype), f"{OUTPUT_DTYPE} (Int64)"
        raise InvalidNodeError("selected_indices dtype", found=found, accepted=accepted)
    if must_be_contiguous:
        _check_contiguous(views, outputs)
    _check_shapes(specs)
    batch, num_queries, num_heads, depth = specs["query"].sizes
    num_keys = specs["key"].sizes[1]
    shape = Shape(batch, num_queries, num_keys, num_heads, depth, attributes.top_k)
    _check_sizes(specs, TensorSpec(OUTPUT_DTYPE, shape.output))
    if outputs[0].shape != shape.output:
        found, accepted = str(list(outputs[0].shape)), f"{list(shape.output)}, [B, 1, S, top_k]"
        raise InvalidNodeError("selected_indices shape", found=found, accepted=accepted)
    return shape, views


def _check_count(what: str, found: int, accepted: int) -> None:
    if found != accepted:
        names = ", ".join(INPUT_NAMES) if what == "inputs" else "selected_indices"
        raise InvalidNodeError(
            f"DsaIndexSelect {what}", found=f"{found}", accepted=f"{accepted}: {names}"
        )


def _present(inputs: Sequence[TensorSpec | None]) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for name, spec in zip(INPUT_NAMES, inputs, strict=True):
        if spec is None:
            raise InvalidNodeError(
                name, found="an omitted input", accepted=f"a tensor {_LAYOUTS[name]}; all four are"
                " required",
            )  # fmt: skip
        specs[name] = spec
    return specs


def _check_dtypes(specs: dict[str, TensorSpec]) -> None:
    query_dtype = specs["query"].dtype
    if query_dtype not in FLOAT_DTYPES:
        accepted = ", ".join(map(str, FLOAT_DTYPES))
        raise InvalidNodeError("query dtype", found=str(query_dtype), accepted=accepted)
    for name in ("key", "weights"):
        if specs[name].dtype is not query_dtype:
            found, accepted = str(specs[name].dtype), f"{query_dtype}, the dtype of query"
            raise InvalidNodeError(f"{name} dtype", found=found, accepted=accepted)
    if specs["attention_bias"].dtype is not DType.F32:
        # A half type's lowest value lies above the mask threshold: it would mask nothing.
        raise InvalidNodeError(
            "attention_bias dtype",
            found=str(specs["attention_bias"].dtype),
            accepted="f32 (Float32) only",
            remedy="write the mask in float32; half types cannot hold its -1e30 threshold",
        )


def _check_contiguous(inputs: Sequence[TensorView], outputs: Sequence[TensorView]) -> None:
    names = (*INPUT_NAMES, "selected_indices")
    for name, view in zip(names, (*inputs, *outputs), strict=True):
        if not view.is_contiguous:
            found = f"strides {view.strides} for shape {view.shape}"
            accepted = "a contiguous row-major tensor"
            raise InvalidNodeError(f"{name} layout", found=found, accepted=accepted)


def _check_shapes(specs: dict[str, TensorSpec]) -> None:
    for name, rank in _RANKS.items():
        if specs[name].rank != rank:
            found, accepted = f"{specs[name]}", f"rank {rank}, {_LAYOUTS[name]}"
            raise InvalidNodeError(f"{name} rank", found=found, accepted=accepted)
    query = specs["query"].shape
    for dim, axis, name, other_axis in _QUERY_MATCHES:
        _check_dim(dim, specs[name].shape[other_axis], query[axis], name, "query")
    bias = specs["attention_bias"].shape
    _check_dim("dimension 1", bias[1], 1, "attention_bias", "the contract")
    _check_dim("S", bias[2], query[1], "attention_bias", "query")
    _check_dim("T", bias[3], specs["key"].shape[1], "attention_bias", "key")


def _check_dim(dim: str, found: Dim, expected: Dim, name: str, source: str) -> None:
    if isinstance(found, int) and isinstance(expected, int) and found != expected:
        raise InvalidNodeError(
            f"{name} {dim}", found=f"{found}", accepted=f"{expected}, as {source} says"
        )


def _check_sizes(specs: dict[str, TensorSpec], output: TensorSpec) -> None:
    """Refuse element counts and byte sizes past the 63-bit range, where the shape is known."""
    for name, spec in {**specs, "selected_indices": output}.items():
        if not spec.symbols:
            spec.nbytes(name)
