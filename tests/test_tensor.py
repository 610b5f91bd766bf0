"""Check element types, specs and views: what they accept, and that a view never reaches outside."""

import gc
import math
import weakref
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from nxrt.errors import InvalidInputError, SizeOverflowError
from nxrt.storage import CPU_DEVICE, DeviceId, DeviceType, ForeignStorage
from nxrt.tensor import MAX_SIZE, DType, TensorSpec, TensorView, checked_product, dense_strides

GPU = DeviceId(DeviceType.CUDA, 1)
ITEMSIZES = {
    "f32": 4, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "i32": 4, "i64": 8, "bool": 1, "f16": 2,
    "f64": 8, "u32": 4, "u64": 8, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip


def memory(nbytes: int, device: DeviceId = CPU_DEVICE) -> ForeignStorage:
    """Return storage that is described only: nothing here may touch it."""
    return ForeignStorage(4096, nbytes, device)


def address(array: NDArray[Any]) -> int:
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def float32_view(
    shape: tuple[int, ...], strides: Any = (), byte_offset: Any = 0, nbytes: int = 64
) -> TensorView:
    return TensorView(memory(nbytes), DType.F32, shape, strides, byte_offset)


def test_dtype_itemsizes_are_those_of_their_names() -> None:
    assert {dtype.label: dtype.itemsize for dtype in DType} == ITEMSIZES


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_dtype_storage_is_as_wide_as_the_element(dtype: DType) -> None:
    assert dtype.storage.itemsize == dtype.itemsize


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_dtype_is_spoken_of_by_its_label(dtype: DType) -> None:
    assert (str(dtype), repr(dtype)) == (dtype.label, f"DType.{dtype.name}")


def test_dtype_onnx_codes_are_those_of_the_standard() -> None:
    codes = {dtype.onnx_code: dtype.label for dtype in (DType.F32, DType.I64, DType.BOOL)}
    assert codes == {1: "f32", 7: "i64", 9: "bool"}
    assert (DType.F16.onnx_code, DType.BF16.onnx_code, DType.F8E4M3FN.onnx_code) == (10, 16, 17)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F8E4M3FN, DType.F8E5M2], ids=str)
def test_dtype_of_an_array_of_bits_is_the_integer(dtype: DType) -> None:
    assert DType.of_array(np.zeros(1, dtype.storage)).label == f"u{8 * dtype.itemsize}"


@pytest.mark.parametrize("dtype", [d for d in DType if "f8" not in str(d)], ids=str)
def test_dtype_of_an_array_is_what_numpy_calls_it(dtype: DType) -> None:
    found = DType.of_array(np.zeros(1, dtype.storage))
    assert found is (DType.U16 if dtype is DType.BF16 else dtype)


@pytest.mark.parametrize("name", ["complex64", "datetime64[s]", "U3", "O"])
def test_dtype_of_an_unknown_array_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"array dtype: got .*; accepted: float32"):
        DType.of_array(np.zeros(1, name))


def test_swapped_byte_order_is_refused_and_named() -> None:
    with pytest.raises(InvalidInputError, match="array dtype: got >f4"):
        DType.of_array(np.zeros(1, ">f4"))


@pytest.mark.parametrize(
    "dim", [-1, True, 1.0, 1.5, None, "", "two words", "3d", 2**63, np.int8(-1)]
)
def test_spec_refuses_what_is_no_dimension(dim: Any) -> None:
    with pytest.raises(InvalidInputError, match="dimension: got"):
        TensorSpec(DType.F32, (2, dim))


@pytest.mark.parametrize("dim", [0, 1, MAX_SIZE, np.int64(3), np.uint8(3)])
def test_spec_stores_sizes_as_plain_integers(dim: Any) -> None:
    (size,) = TensorSpec(DType.F32, (dim,)).shape
    assert type(size) is int
    assert size == int(dim)


def test_spec_refuses_a_string_for_a_shape() -> None:
    shape: Any = "BT"
    with pytest.raises(InvalidInputError, match="shape: got 'BT'"):
        TensorSpec(DType.F32, shape)


@pytest.mark.parametrize("dtype", ["f32", np.float32, None])
def test_spec_refuses_what_is_no_dtype(dtype: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"dtype: got .* accepted: a DType: f32"):
        TensorSpec(dtype, (1,))


def test_spec_takes_a_list_and_is_hashable() -> None:
    shape: Any = ["B", 2]
    assert hash(TensorSpec(DType.F32, shape)) == hash(TensorSpec(DType.F32, ("B", 2)))


def test_spec_cannot_be_changed() -> None:
    spec = TensorSpec(DType.F32, (1,))
    with pytest.raises(FrozenInstanceError):
        spec.shape = (2,)  # type: ignore[misc]


def test_spec_names_its_symbols() -> None:
    assert TensorSpec(DType.F32, ("B", 3, "T", "B")).symbols == {"B", "T"}


def test_spec_is_shown_as_dtype_and_shape() -> None:
    assert str(TensorSpec(DType.BF16, ("B", 3))) == "bf16[B, 3]"


def test_spec_with_symbols_has_no_sizes() -> None:
    with pytest.raises(InvalidInputError, match=r"got f32\[B\]; accepted: sizes only; bind"):
        _ = TensorSpec(DType.F32, ("B",)).sizes


def test_bind_replaces_what_it_is_given_and_keeps_the_rest() -> None:
    spec = TensorSpec(DType.F32, ("B", 3, "T", "B")).bind({"B": 2, "unused": 9})
    assert spec.shape == (2, 3, "T", 2)


@pytest.mark.parametrize("size", [-1, True, 1.5, 2**63])
def test_bind_refuses_what_is_no_size(size: Any) -> None:
    with pytest.raises(InvalidInputError, match="dimension"):
        TensorSpec(DType.F32, ("B",)).bind({"B": size})


@pytest.mark.parametrize(
    ("shape", "expected"), [((), 4), ((2, 3), 24), ((3, 0), 0), ((0, 2**40), 0), ((2**60,), 2**62)]
)
def test_spec_counts_its_bytes(shape: tuple[int, ...], expected: int) -> None:
    assert TensorSpec(DType.F32, shape).nbytes() == expected


@pytest.mark.parametrize("shape", [(2**33, 2**33), (2**33, 0, 2**33), (2**31, 2**32), (0, 2**62)])
def test_spec_refuses_bytes_past_63_bits_even_beside_a_zero(shape: tuple[int, ...]) -> None:
    with pytest.raises(SizeOverflowError, match=r"byte size of key|element count of key"):
        TensorSpec(DType.F32, shape).nbytes("key")


def test_element_count_may_fit_where_bytes_do_not() -> None:
    assert TensorSpec(DType.F32, (MAX_SIZE,)).num_elements() == MAX_SIZE


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=4))
def test_product_is_exact_or_refused(factors: list[int]) -> None:
    if math.prod(factor or 1 for factor in factors) > MAX_SIZE:
        with pytest.raises(SizeOverflowError):
            checked_product("count", *factors)
    else:
        assert checked_product("count", *factors) == math.prod(factors)


@dataclass(frozen=True)
class Layout:
    id: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    byte_offset: int = 0


INSIDE = (
    Layout("dense", (4, 4)),
    Layout("scalar at the last element", (), byte_offset=60),
    Layout("reversed from the end", (16,), (-1,), 60),
    Layout("both signs", (2, 8), (-8, 1), 32),
    Layout("repeated", (100,), (0,), 60),
    Layout("wild stride on a single element", (1,), (10**6,)),
    Layout("empty with wild strides", (0, 9), (10**6, -(10**6))),
)
OUTSIDE = (
    Layout("one element too many", (17,)),
    Layout("one element before", (2,), (-1,), 0),
    Layout("dense past the end", (4, 4), byte_offset=4),
    Layout("stride past the end", (3,), (8,)),
    Layout("reversed past the end", (2,), (-1,), 64),
    Layout("low behind a higher high", (2, 2), (-4, 8), 8),
    Layout("past 64 bits", (5,), (2**62,)),
)


@pytest.mark.parametrize("case", INSIDE, ids=lambda case: case.id)
def test_view_inside_its_storage_is_accepted(case: Layout) -> None:
    view = float32_view(case.shape, case.strides, case.byte_offset)
    assert view.pointer == 4096 + case.byte_offset


@pytest.mark.parametrize("case", OUTSIDE, ids=lambda case: case.id)
def test_view_outside_its_storage_is_refused(case: Layout) -> None:
    with pytest.raises(InvalidInputError, match=r"view: got .* accepted: bytes 0\.\.64"):
        float32_view(case.shape, case.strides, case.byte_offset)


@pytest.mark.parametrize("case", OUTSIDE, ids=lambda case: case.id)
def test_view_outside_its_storage_is_refused_with_numpy_integers(case: Layout) -> None:
    """NumPy integers wrap around, which must not make a layout look harmless."""
    strides = tuple(np.int64(step) for step in case.strides)
    with pytest.raises(InvalidInputError):
        float32_view(case.shape, strides, np.int64(case.byte_offset))


@pytest.mark.parametrize("offset", [-4, -1, 1, 2, 6])
def test_byte_offset_must_be_a_multiple_of_the_element(offset: int) -> None:
    with pytest.raises(InvalidInputError, match=r"byte_offset: got .* a multiple of 4, from 0"):
        float32_view((1,), byte_offset=offset)


def test_byte_offset_must_be_an_integer() -> None:
    with pytest.raises(InvalidInputError, match="byte_offset"):
        float32_view((1,), byte_offset=4.0)


@pytest.mark.parametrize("strides", [(1,), (1, 1, 1)])
def test_strides_must_be_as_many_as_dimensions(strides: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="strides: got"):
        float32_view((2, 2), strides)


@pytest.mark.parametrize("step", [1.0, 1.5, True])
def test_strides_must_be_integers(step: Any) -> None:
    with pytest.raises(InvalidInputError, match="strides"):
        float32_view((2,), (step,))


def test_strides_are_stored_as_a_tuple_that_nobody_can_change() -> None:
    assert float32_view((2, 2), [2, 1]).strides == (2, 1)


def test_view_refuses_symbols() -> None:
    shape: Any = ("B",)
    with pytest.raises(InvalidInputError, match="sizes only"):
        float32_view(shape)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), True),
        ((2, 3), (3, 1), True),
        ((2, 1, 3), (3, 99, 1), True),
        ((0, 3), (7, 7), True),
        ((2, 3), (1, 2), False),
        ((2, 3), (4, 1), False),
        ((3,), (-1,), False),
        ((3,), (0,), False),
    ],
)
def test_is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    offset = 8 if -1 in strides else 0
    assert float32_view(shape, strides, offset).is_contiguous is expected


def test_dense_strides_of_an_empty_axis_are_positive() -> None:
    assert dense_strides((2, 0, 3)) == (3, 3, 1)


GRID = np.arange(24, dtype=np.float32).reshape(4, 6)
ARRAYS: dict[str, NDArray[Any]] = {
    "dense": GRID,
    "transposed": GRID.T,
    "rows reversed": GRID[::-1],
    "both reversed": GRID[::-1, ::-1],
    "stepped": GRID[1::2, 5::-2],
    "repeated": np.lib.stride_tricks.as_strided(GRID, (3, 6), (0, 4)),
    "scalar": GRID[2, 3, ...],
    "one element": GRID[1:2, 1:2],
    "empty": GRID[2:2],
    "empty inside": GRID[:, 3:3][::-1],
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=list(ARRAYS))
def test_array_of_a_view_is_the_array_it_was_made_of(array: NDArray[Any]) -> None:
    back = TensorView.of_array(array).to_array()
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()


@pytest.mark.parametrize("array", ARRAYS.values(), ids=list(ARRAYS))
def test_storage_of_an_array_lies_within_the_array(array: NDArray[Any]) -> None:
    storage = TensorView.of_array(array).storage
    assert storage.nbytes >= 0
    assert storage.pointer >= address(GRID)
    assert storage.pointer + storage.nbytes <= address(GRID) + GRID.nbytes


@st.composite
def strided_arrays(draw: st.DrawFn) -> NDArray[Any]:
    dtype = draw(st.sampled_from([np.uint8, np.float16, np.float32, np.int64]))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    base = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    turned = base.transpose(draw(st.permutations(range(base.ndim))))
    index = draw(npst.basic_indices(turned.shape, allow_ellipsis=False))
    whole: tuple[Any, ...] = (*index, ...) if isinstance(index, tuple) else (index, ...)
    part: NDArray[Any] = turned[whole]
    return part


@settings(deadline=None)
@given(strided_arrays())
def test_any_slice_of_an_array_survives_exactly(array: NDArray[Any]) -> None:
    back = TensorView.of_array(array).to_array()
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert array.size == 0 or address(back) == address(array)


def test_writing_to_the_array_of_a_view_writes_to_the_original() -> None:
    array = np.zeros((2, 3), np.int32)
    TensorView.of_array(array[:, ::-1]).to_array()[0, 0] = 7
    assert array[0, 2] == 7


def test_array_of_a_view_keeps_the_memory_alive_and_lets_it_go() -> None:
    array = np.arange(1000)
    is_alive = weakref.ref(array)
    back = TensorView.of_array(array).to_array()
    del array
    gc.collect()
    assert is_alive() is not None
    assert back.tolist() == list(range(1000))
    del back
    gc.collect()
    assert is_alive() is None


def test_array_of_a_read_only_array_cannot_be_written() -> None:
    array = np.frombuffer(b"constant", np.uint8)
    assert not TensorView.of_array(array).to_array().flags.writeable


def test_bits_of_bf16_are_viewed_under_their_own_name() -> None:
    view = TensorView.of_array(np.array([0x3F80], np.uint16), DType.BF16)
    assert (view.dtype, view.to_array().tolist()) == (DType.BF16, [0x3F80])


def test_array_of_another_width_than_its_dtype_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="got float32; accepted: uint16, which holds bf16"):
        TensorView.of_array(np.zeros(1, np.float32), DType.BF16)


def test_strides_that_split_an_element_are_refused() -> None:
    packed = np.zeros(4, [("tag", np.uint8), ("value", np.float32)])
    with pytest.raises(InvalidInputError, match=r"array strides: .*multiples of 4 bytes"):
        TensorView.of_array(packed["value"])


def test_device_memory_has_no_array() -> None:
    view = TensorView(memory(64, GPU), DType.F32, (4,))
    with pytest.raises(InvalidInputError, match="got memory on cuda:1; accepted: host memory"):
        view.to_array()
