"""What DsaIndexSelect refuses, at claim and at execution; the same on both providers (B14)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nxrt import (
    CpuProvider,
    InvalidNodeError,
    KernelRegistry,
    MemoryGovernor,
    Node,
    Session,
    SizeOverflowError,
    TensorSpec,
    TensorView,
    UnsupportedGraphError,
)
from nxrt.graph import Graph
from nxrt.kernels.api import KernelFactory
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelectFactory
from nxrt.kernels.dsa_index_select.reference import (
    DsaIndexSelectReference,
    DsaIndexSelectReferenceFactory,
)
from nxrt.kernels.dsa_index_select.routes import WorkspaceLayout
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES, Attributes, Shape, check_execution
from nxrt.providers.cuda import KERNELS
from nxrt.tensor import DType


class CudaTable:
    """The CUDA provider's table, which needs no device."""

    def __init__(self) -> None:
        self.registry = KernelRegistry()
        self.registry.register(KERNELS)


CUDA_TABLE = CudaTable()
FACTORIES = [DsaIndexSelectReferenceFactory(), DsaIndexSelectFactory()]
BIG = 2**40


def specs(
    dtype: DType = DType.F32,
    *,
    query: tuple[int | str, ...] = (1, 2, 4, 8),
    key: tuple[int | str, ...] = (1, 9, 8),
    weights: tuple[int | str, ...] = (1, 2, 4),
    bias: tuple[int | str, ...] = (1, 1, 2, 9),
    dtypes: dict[str, DType] | None = None,
) -> list[TensorSpec | None]:
    chosen = dict.fromkeys(INPUT_NAMES, dtype) | {"attention_bias": DType.F32} | (dtypes or {})
    shapes = dict(zip(INPUT_NAMES, (query, key, weights, bias), strict=True))
    return [TensorSpec(chosen[name], shapes[name]) for name in INPUT_NAMES]


def node(outputs: tuple[str, ...] = ("selected",), **attributes: Any) -> Node:
    values = {"top_k": 3, "scale": 0.5} | attributes
    kept = {name: value for name, value in values.items() if value is not None}
    return Node("DsaIndexSelect", INPUT_NAMES, outputs, domain="pkg.nxrt", attributes=kept)


@dataclass(frozen=True)
class Refusal:
    """A node or inputs that are refused, and what the message must name."""

    id: str
    node: Node
    inputs: list[TensorSpec | None]
    names: tuple[str, ...]


def without(slot: int) -> list[TensorSpec | None]:
    inputs = specs()
    inputs[slot] = None
    return inputs


REFUSALS = [
    Refusal("unknown attribute", node(block=4), specs(), ("block", "frozen v1 ABI", "top_k")),
    Refusal("unknown before top_k", node(block=4, top_k=0), specs(), ("attribute block",)),
    Refusal("top_k missing", node(top_k=None), specs(), ("top_k", "nothing")),
    Refusal("top_k 0", node(top_k=0), specs(), ("top_k", "got 0")),
    Refusal("top_k negative", node(top_k=-4), specs(), ("top_k", "-4")),
    Refusal("top_k float", node(top_k=4.0), specs(), ("top_k", "4.0")),
    Refusal("top_k bool", node(top_k=True), specs(), ("top_k", "True")),
    Refusal("top_k too large", node(top_k=2**63), specs(), ("top_k",)),
    Refusal("scale missing", node(scale=None), specs(), ("attribute scale", "nothing")),
    Refusal("scale 0", node(scale=0.0), specs(), ("attribute scale", "> 0")),
    Refusal("scale negative", node(scale=-1.0), specs(), ("attribute scale",)),
    Refusal("scale NaN", node(scale=float("nan")), specs(), ("attribute scale", "nan")),
    Refusal("scale inf", node(scale=float("inf")), specs(), ("attribute scale", "inf")),
    Refusal("scale inf as f32", node(scale=1e39), specs(), ("attribute scale", "float32")),
    Refusal("scale 0 as f32", node(scale=1e-50), specs(), ("attribute scale", "float32")),
    Refusal("scale huge int", node(scale=10**400), specs(), ("attribute scale",)),
    Refusal("scale text", node(scale="1"), specs(), ("attribute scale", "'1'")),
    Refusal("weights_scale 0", node(weights_scale=0.0), specs(), ("weights_scale",)),
    Refusal("three inputs", node(), specs()[:3], ("inputs", "got 3", "attention_bias")),
    Refusal("two outputs", node(("a", "b")), specs(), ("outputs", "got 2")),
    *(Refusal(f"no {n}", node(), without(i), (n, "omitted")) for i, n in enumerate(INPUT_NAMES)),
    Refusal("query f64", node(), specs(DType.F64), ("query dtype", "f64", "bf16")),
    Refusal("query i64", node(), specs(DType.I64), ("query dtype", "i64")),
    Refusal("query i32", node(), specs(DType.I32), ("query dtype", "i32")),
    Refusal("q f32, k f16", node(), specs(dtypes={"key": DType.F16}), ("key dtype", "f16", "f32")),
    Refusal("w f16", node(), specs(dtypes={"weights": DType.F16}), ("weights dtype", "f16")),
    Refusal(
        "f16 bias",
        node(),
        specs(DType.F16, dtypes={"attention_bias": DType.F16}),
        ("attention_bias", "Float32", "f16"),
    ),
    Refusal("query rank 3", node(), specs(query=(2, 4, 8)), ("query rank", "[B, S, H, D]")),
    Refusal("key rank 4", node(), specs(key=(1, 1, 9, 8)), ("key rank", "[B, T, D]")),
    Refusal("batch q/k", node(), specs(key=(2, 9, 8)), ("key B", "got 2", "1")),
    Refusal("batch q/w", node(), specs(weights=(2, 2, 4)), ("weights B",)),
    Refusal("batch q/bias", node(), specs(bias=(2, 1, 2, 9)), ("attention_bias B",)),
    Refusal("seq q/w", node(), specs(weights=(1, 3, 4)), ("weights S", "got 3", "2")),
    Refusal("heads q/w", node(), specs(weights=(1, 2, 5)), ("weights H",)),
    Refusal("depth q/k", node(), specs(key=(1, 9, 7)), ("key D", "got 7", "8")),
    Refusal("bias heads", node(), specs(bias=(1, 2, 2, 9)), ("attention_bias dimension 1",)),
    Refusal("bias seq", node(), specs(bias=(1, 1, 3, 9)), ("attention_bias S",)),
    Refusal("bias keys", node(), specs(bias=(1, 1, 2, 8)), ("attention_bias T", "got 8", "9")),
    Refusal(
        "known dims beside dynamic ones",
        node(),
        specs(query=("B", "S", 4, 8), key=("B", "T", 7), weights=("B", "S", 4)),
        ("key D",),
    ),
]


@pytest.mark.parametrize("factory", FACTORIES, ids=["cpu", "cuda"])
@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.id)
def test_claim_declines_and_create_refuses_alike(
    factory: KernelFactory[Any], case: Refusal
) -> None:
    match = factory.claim(case.node, case.inputs)
    assert not match.is_supported
    for name in case.names:
        assert name in match.reason
    with pytest.raises(InvalidNodeError) as refusal:
        factory.create(case.node, case.inputs, None)
    assert str(refusal.value) == match.reason


@pytest.mark.parametrize("factory", FACTORIES, ids=["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_claim_accepts_every_float_dtype(factory: KernelFactory[Any], dtype: DType) -> None:
    match = factory.claim(node(), specs(dtype))
    assert match.outputs == (TensorSpec(DType.I64, (1, 1, 2, 3)),)


@pytest.mark.parametrize("factory", FACTORIES, ids=["cpu", "cuda"])
def test_claim_accepts_dynamic_dimensions(factory: KernelFactory[Any]) -> None:
    inputs = specs(
        query=("B", "S", 4, 8), key=("B", "T", 8), weights=("B", "S", 4), bias=("B", 1, "S", "T")
    )
    assert factory.claim(node(), inputs).outputs == (TensorSpec(DType.I64, ("B", 1, "S", 3)),)


@pytest.mark.parametrize("version", [1, 2, 19])
def test_every_later_import_resolves_to_the_first_version(version: int) -> None:
    graph = index_graph({"pkg.nxrt": version})
    with Session(graph, [CpuProvider()], MemoryGovernor()) as session:
        assert session.placements[0].op == "pkg.nxrt::DsaIndexSelect v1"


def test_the_same_operator_of_another_domain_is_nobodys() -> None:
    graph = index_graph({}, domain="com.example")
    with pytest.raises(
        UnsupportedGraphError, match=r"com\.example::DsaIndexSelect is not registered"
    ):
        Session(graph, [CpuProvider()], MemoryGovernor())


@pytest.mark.parametrize("provider", [CpuProvider(), CUDA_TABLE], ids=["cpu", "cuda"])
def test_an_operator_nobody_has_is_declined_by_name(provider: Any) -> None:
    other = Node("CompressedSparseAttention", ("x",), ("y",), "pkg.nxrt", {"ratio": 8})
    claim = provider.registry.claim(other, [TensorSpec(DType.F32, (1,))], opset_version=1)
    assert "pkg.nxrt::CompressedSparseAttention is not registered" in claim.match.reason
    assert "pkg.nxrt::DsaIndexSelect" in claim.match.reason


def index_graph(imports: dict[str, int], domain: str = "pkg.nxrt") -> Graph:
    template = node()
    moved = Node(
        template.op, INPUT_NAMES, ("selected",), domain=domain, attributes=template.attributes
    )
    inputs = {n: spec for n, spec in zip(INPUT_NAMES, specs(), strict=True) if spec is not None}
    return Graph((moved,), inputs, ("selected",), imports)


OVERFLOWS: list[tuple[str, Callable[[], object]]] = [
    ("row count", lambda: Shape(BIG, BIG, 1, 1, 1, 1).num_rows),
    ("cell count", lambda: Shape(2**21, 2**21, 2**21, 1, 1, 1).num_cells),
    ("score byte count", lambda: WorkspaceLayout.of(Shape(1, 2**31, 2**31, 1, 1, 1))),
    ("query", lambda: claim_error(query=(1, BIG, BIG, 8), weights=(1, BIG, BIG))),
    ("key", lambda: claim_error(key=(1, 2**61, 1), bias=(1, 1, 2, 2**61))),
    ("attention_bias", lambda: claim_error(key=(1, 2**59, 1), bias=(1, 1, 2**10, 2**59))),
    ("selected_indices", lambda: claim_error(top_k=2**62)),
]


def claim_error(top_k: int = 3, **shapes: Any) -> None:
    if "bias" in shapes:
        num_queries = shapes["bias"][2]
        shapes.setdefault("query", (1, num_queries, 4, 1))
        shapes.setdefault("weights", (1, num_queries, 4))
    elif "query" in shapes:
        shapes["bias"] = (1, 1, shapes["query"][1], 9)
        shapes["key"] = (1, 9, 8)
    DsaIndexSelectFactory().create(node(top_k=top_k), specs(**shapes), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("subject", "action"), OVERFLOWS, ids=[name for name, _ in OVERFLOWS])
def test_sizes_past_63_bits_are_one_typed_error(subject: str, action: Callable[[], object]) -> None:
    with pytest.raises(SizeOverflowError, match=subject):
        action()


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "nbytes"),
    [
        (1, 1, 512),
        (1, 12, 512),
        (1, 2048, 10_240),
        (1, 2304, 11_520),
        (1, 8192, 40_960),
        (1, 131_072, 655_360),
        (1, 1_048_576, 5_242_880),
        (512, 8192, 20_971_520),
        (4096, 131_072, 2_684_354_560),
        (8192, 270_000, 11_059_200_000),
        (1_050_000, 2049, 10_757_250_304),
    ],
)
def test_workspace_sizes_are_exact(num_rows: int, num_keys: int, nbytes: int) -> None:
    assert WorkspaceLayout.of(Shape(1, num_rows, num_keys, 1, 1, 1)).nbytes == nbytes


ATTRIBUTES = Attributes(3, 0.5, 1.0)


def execution(**changes: TensorView | None) -> tuple[list[TensorView | None], list[TensorView]]:
    names = (*INPUT_NAMES, "selected")
    shapes = ((1, 2, 4, 8), (1, 9, 8), (1, 2, 4), (1, 1, 2, 9), (1, 1, 2, 3))
    views: dict[str, TensorView | None] = {
        name: TensorView.of_array(np.zeros(shape, np.int64 if name == "selected" else np.float32))
        for name, shape in zip(names, shapes, strict=True)
    }
    views |= changes
    output = views.pop("selected")
    assert output is not None
    return list(views.values()), [output]


def view(*shape: int, dtype: Any = np.float32) -> TensorView:
    return TensorView.of_array(np.zeros(shape, dtype))


EXECUTION_REFUSALS = [
    ("absent", {"key": None}, "key: got an omitted input"),
    ("query dtype", {"query": view(1, 2, 4, 8, dtype=np.float64)}, "query dtype"),
    ("bias dtype", {"attention_bias": view(1, 1, 2, 9, dtype=np.float16)}, "attention_bias dtype"),
    ("output dtype", {"selected": view(1, 1, 2, 3, dtype=np.int32)}, "selected_indices dtype"),
    ("output before rank", {"selected": view(1, dtype=np.int32), "key": view(9, 8)}, "Int64"),
    ("rank", {"key": view(9, 8)}, "key rank"),
    ("dims", {"key": view(1, 9, 7)}, "key D"),
    ("output shape", {"selected": view(1, 1, 2, 4, dtype=np.int64)}, "selected_indices shape"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [row[1:] for row in EXECUTION_REFUSALS],
    ids=[row[0] for row in EXECUTION_REFUSALS],
)
def test_execution_refuses_before_it_computes(
    changes: dict[str, TensorView | None], message: str
) -> None:
    inputs, outputs = execution(**changes)
    before = outputs[0].to_array().copy()
    with pytest.raises(InvalidNodeError, match=message):
        DsaIndexSelectReference(ATTRIBUTES).execute(inputs, outputs, stream=None)
    assert (outputs[0].to_array() == before).all()


def test_strided_inputs_are_read_on_the_cpu_and_refused_on_cuda() -> None:
    query = np.zeros((1, 2, 8, 4), np.float32).swapaxes(2, 3)
    inputs, outputs = execution(query=TensorView.of_array(query))
    DsaIndexSelectReference(ATTRIBUTES).execute(inputs, outputs, stream=None)
    assert outputs[0].to_array().ravel().tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(InvalidNodeError, match="query layout"):
        check_execution(ATTRIBUTES, inputs, outputs, must_be_contiguous=True)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_grid_limit_is_at_least_one(limit: Any) -> None:
    with pytest.raises(ValueError, match="grid_limit"):
        DsaIndexSelectFactory(grid_limit=limit)
