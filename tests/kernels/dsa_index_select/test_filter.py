"""The certified filter gives the oracle's bytes whatever the data, by every way through it."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nxrt import CudaProvider, DType, MemoryGovernor, Role, TensorView
from nxrt.kernels.dsa_index_select.filter_layout import FilterLayout, FilterLimits
from nxrt.kernels.dsa_index_select.spec import Shape
from tests.helpers.cases import OUTPUT, IndexSelectCase
from tests.helpers.changed_kernels import changed_kernel
from tests.helpers.sessions import kernel_of
from tests.helpers.targets import Target

DTYPES = (DType.BF16, DType.F16, DType.F32)
# Slow is what tools that watch every access would take minutes for.
GPU = (pytest.mark.gpu, pytest.mark.slow)
GPU_AND_FAKE = (pytest.mark.gpu, pytest.mark.fake)

Floats = NDArray[np.float32]


@dataclass
class Data:
    """Hold the operands while a kind of data is made of them."""

    rng: np.random.Generator
    query: Floats
    key: Floats
    weights: Floats
    bias: Floats

    @property
    def num_keys(self) -> int:
        return int(self.key.shape[1])

    def some_keys(self, count: int) -> NDArray[np.int64]:
        return self.rng.integers(0, self.num_keys, count)

    def where(self, probability: float, value: float) -> None:
        """Set the bias to a value at random places, and to 0 elsewhere."""
        self.bias[:] = np.where(self.rng.random(self.bias.shape) < probability, value, 0)


def relu(data: Data) -> None:
    """Most keys score exactly 0: every dot is negative."""
    data.query = np.abs(data.query)
    data.key = -np.abs(data.key)
    data.key[:, data.some_keys(20)] *= -1


def near(data: Data) -> None:
    """Three scores apart by next to nothing, each many times."""
    data.key[:] = data.key[:, :1]
    data.key[:, :, 0] += 0.01 * data.rng.integers(0, 3, data.key.shape[:2])


def duplicates(data: Data) -> None:
    data.key[:] = data.key[:, data.rng.integers(0, 5, data.num_keys)]


def whole_numbers(data: Data) -> None:
    for array in (data.query, data.key, data.weights):
        np.round(array, out=array)


def causal_mask(data: Data) -> None:
    rows, keys = data.bias.shape[2:]
    last_seen = np.arange(rows)[:, None] + keys // 2
    data.bias[:] = np.where(np.arange(keys) > last_seen, -np.inf, 0)


def set_key(value: float, count: int = 5) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        data.key[:, data.some_keys(count), 0] = value

    return change


def scaled(query: float, key: float) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        data.query *= np.float32(query)
        data.key *= np.float32(key)

    return change


def first_weight(value: float) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        data.weights[..., 0] = value

    return change


def biased(probability: float, value: float) -> Callable[[Data], None]:
    return lambda data: data.where(probability, value)


def outliers(data: Data) -> None:
    data.key[:, data.some_keys(7)] *= 1000


def no_weights(data: Data) -> None:
    data.weights *= 0


def negative_weights(data: Data) -> None:
    data.weights = -np.abs(data.weights)


def lopsided_heads(data: Data) -> None:
    """A weight and a query of different heads whose product, were they one head's, overflows."""
    data.weights[..., :2] = (2.0**90, 1)
    data.query[..., :2, :] = 0
    data.query[..., 1, 0] = 2.0**60


KINDS: dict[str, Callable[[Data], None]] = {
    "gauss": lambda _: None,
    "zero queries": scaled(0, 1),
    "zero weights": no_weights,
    "negative weights": negative_weights,
    "duplicates": duplicates,
    "near": near,
    "relu": relu,
    "whole numbers": whole_numbers,
    "nan keys": set_key(np.nan),
    "infinite keys": set_key(np.inf),
    "nan weight": first_weight(np.nan),
    "infinite weight": first_weight(np.inf),
    "huge": scaled(1e8, 1e30),
    "large halves": scaled(1e4, 1e4),
    "tiny": scaled(1e-12, 1e-30),
    "tiny halves": scaled(1e-6, 1e-6),
    "subnormal": scaled(1, 1e-38),
    "outliers": outliers,
    "lopsided heads": lopsided_heads,
    "masked": biased(0.7, -np.inf),
    "nearly all masked": biased(0.97, -1e30),
    "all masked": biased(2, -np.inf),
    "causal": causal_mask,
    "bias -1e9": biased(0.9, -1e9),
    "bias inf": biased(0.01, np.inf),
    "bias nan": biased(0.5, np.nan),
    "bias 1000": biased(2, 1000),
}

SHAPES = {
    "groups": Shape(2, 2, 1500, 32, 128, 200),
    "narrow": Shape(1, 1, 2500, 8, 64, 64),
    "padded heads": Shape(1, 3, 900, 24, 128, 300),
    "more heads": Shape(1, 1, 600, 64, 64, 700),
    "many rows": Shape(2, 19, 700, 32, 64, 100),
}

TIGHT = {
    "groups": FilterLimits(132, 170_000),
    "one block a row": FilterLimits(1, 170_000),
}


def drawn(kind: str, shape: Shape, dtype: DType) -> IndexSelectCase:
    rng = np.random.default_rng(zlib.crc32(f"{kind} {shape} {dtype}".encode()))
    sizes = [(shape.B, shape.S, shape.H, shape.D), (shape.B, shape.T, shape.D)]
    query, key, weights = (
        rng.standard_normal(size).astype(np.float32)
        for size in (*sizes, (shape.B, shape.S, shape.H))
    )
    bias = np.zeros((shape.B, 1, shape.S, shape.T), np.float32)
    data = Data(rng, query, key, weights, bias)
    with np.errstate(all="ignore"):
        KINDS[kind](data)
    operands = (data.query, data.key, data.weights, data.bias)
    scales = {"scale": shape.D**-0.5, "weights_scale": shape.H**-0.5}
    return IndexSelectCase(kind, *operands, shape.K, **scales, dtype=dtype)


def check(target: Target, case: IndexSelectCase, repeats: int = 3) -> None:
    with np.errstate(all="ignore"):
        assert target.run(case, repeats=repeats).tobytes() == case.expected().tobytes()


def is_built_for_the_double(*way: Any) -> bool:
    """Say whether a way takes one of few variants of the code: each takes long to build there."""
    dtype = next((value for value in way if isinstance(value, DType)), DType.BF16)
    depth = next((SHAPES[value].D for value in way if value in SHAPES), 128)
    return (dtype, depth) in ((DType.BF16, 128), (DType.F32, 128), (DType.F16, 64))


def every(kinds: Iterable[str], *others: Iterable[Any]) -> list[Any]:
    """Combine kinds of data with all else: on a device in every second way, on the test double,
    which is slow, each kind in one way, another for each."""
    ways = list(product(*others))

    doubled = [way for way in ways if is_built_for_the_double(*way)] or ways

    def marks(index: int, turn: int) -> tuple[pytest.MarkDecorator, ...]:
        if ways[turn] != doubled[index % len(doubled)]:
            return GPU
        return GPU_AND_FAKE if index % 3 == 0 else (*GPU_AND_FAKE, pytest.mark.slow)

    return [
        pytest.param(kind, *way, marks=marks(index, turn))
        for index, kind in enumerate(kinds)
        for turn, way in enumerate(ways)
        if turn % 2 == index % 2 or ways[turn] == doubled[index % len(doubled)]
    ]


@pytest.mark.parametrize(("kind", "shape", "dtype"), every(KINDS, SHAPES, DTYPES))
def test_every_kind_of_data(
    cuda_provider: CudaProvider, kind: str, shape: str, dtype: DType
) -> None:
    check(Target(cuda_provider, "eager"), drawn(kind, SHAPES[shape], dtype), repeats=1)


@pytest.mark.parametrize(("kind", "shape"), every(["gauss", "near", "relu"], SHAPES))
def test_captured(cuda_provider: CudaProvider, kind: str, shape: str) -> None:
    check(Target(cuda_provider, "captured"), drawn(kind, SHAPES[shape], DType.BF16))


@pytest.mark.parametrize(("kind", "dtype", "limits"), every(KINDS, DTYPES, TIGHT))
def test_buffers_that_overflow(
    cuda_provider: CudaProvider, kind: str, dtype: DType, limits: str
) -> None:
    shape = Shape(1, 2, 2600, 16, 128, 40)
    capacity = FilterLayout.of(shape, dtype, TIGHT[limits]).capacity
    assert shape.K + 512 < capacity < 2600
    with changed_kernel(cuda_provider, limits=TIGHT[limits]):
        check(Target(cuda_provider, "eager"), drawn(kind, shape, dtype), repeats=1)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (Shape(1, 1, 8192, 32, 128, 2048), DType.BF16),
        (Shape(1, 1, 1 << 17, 32, 128, 2048), DType.BF16),
        (Shape(3, 1, 1 << 16, 64, 128, 2048), DType.F16),
        (Shape(140, 1, 8192, 32, 128, 2048), DType.BF16),
        (Shape(2, 1, 1 << 16, 32, 128, 2048), DType.F32),
        (Shape(1, 500, 1 << 14, 32, 128, 2048), DType.BF16),
        (Shape(2, 117, 20_001, 64, 128, 2048), DType.F16),
    ],
    ids=str,
)
def test_the_exact_route_selects_the_same_at_real_sizes(
    cuda_provider: CudaProvider, shape: Shape, dtype: DType
) -> None:
    case, target = drawn("gauss", shape, dtype), Target(cuda_provider, "captured")
    with changed_kernel(cuda_provider, has_filter=False):
        expected = target.run(case)
    assert target.run(case, repeats=3).tobytes() == expected.tobytes()


@pytest.mark.gpu
@pytest.mark.fake
def test_heads_that_are_large_each_for_itself_leave_the_radius_a_number(
    cuda_provider: CudaProvider,
) -> None:
    case = drawn("lopsided heads", Shape(1, 1, 1500, 8, 128, 64), DType.BF16)
    check(Target(cuda_provider, "eager"), case, repeats=1)


@pytest.mark.gpu
@pytest.mark.fake
@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_scale_that_overflows_with_the_depth_writes_every_row(
    cuda_provider: CudaProvider, num_rows: int
) -> None:
    case = drawn("zero weights", Shape(1, num_rows, 300, 32, 128, 10), DType.BF16)
    case = replace(case, query=np.zeros_like(case.query), scale=2e36)
    case.bias[:] = np.linspace(0, 1, 300, dtype=np.float32)
    check(Target(cuda_provider, "eager"), case, repeats=1)


@pytest.mark.gpu
@pytest.mark.fake
def test_views_that_vectors_cannot_load_are_selected_from_all_the_same(
    cuda_provider: CudaProvider,
) -> None:
    """Keys begin two bytes into their memory: what loads 16 at once must leave them alone."""
    case = drawn("gauss", Shape(1, 1, 300, 8, 64, 20), DType.BF16)
    with Target(cuda_provider, "eager").bound(case, MemoryGovernor()) as (session, _, guarded):
        key = case.inputs["key"]
        backend = session._backend
        memory = backend.allocate(key.nbytes + 2, role=Role.WORKSPACE, holder="moved")
        moved = TensorView(memory, DType.BF16, key.shape, byte_offset=2)
        with session.bind(views={OUTPUT: guarded.view, "key": moved}) as binding:
            for name, array in case.inputs.items():
                binding.write(name, array)
            session.run(binding)
            assert guarded.read().tobytes() == case.expected().tobytes()
            assert kernel_of(session).stats.score_launches == 1
        memory.close()
