"""Check the numbers: exact widening, rounding to nearest even, one NaN, one total order."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nxrt.errors import InvalidInputError
from nxrt.kernels.numerics import CANONICAL_NAN, canonicalize_nan, narrow, total_order_key, widen
from nxrt.tensor import DType

EVERY_16_BITS = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
EVERY_8_BITS = np.arange(2**8, dtype=np.uint32).astype(np.uint8)
FLOATS = (DType.F32, DType.F16, DType.BF16, DType.F8E4M3FN, DType.F8E5M2)
NARROW = FLOATS[1:]
ODD_NANS = (0x7F800001, 0x7FC00001, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF)
IN_ORDER = (
    0xFFFFFFFF,  # -NaN of the largest payload
    0xFF800001,  # -NaN of the smallest
    0xFF800000,  # -inf
    0xFF7FFFFF,  # the lowest finite value
    0xBF800000,  # -1
    0x80800000,  # the smallest normal, negative
    0x807FFFFF,  # the largest subnormal, negative
    0x80000001,  # the smallest subnormal, negative
    0x80000000,  # -0
    0x00000000,  # +0
    0x00000001,
    0x007FFFFF,
    0x00800000,
    0x3F800000,
    0x7F7FFFFF,
    0x7F800000,  # +inf
    0x7F800001,  # +NaN
    0x7FC00000,
    0x7FFFFFFF,
)


def f32(*bits: int) -> NDArray[np.float32]:
    return np.array(bits, np.uint32).view(np.float32)


def bits_of(values: NDArray[Any]) -> list[int]:
    unsigned: list[int] = values.view(f"uint{8 * values.dtype.itemsize}").tolist()
    return unsigned


def every(dtype: DType) -> NDArray[Any]:
    """Return every bit pattern of a narrow type, as it is stored."""
    return (EVERY_16_BITS if dtype.itemsize == 2 else EVERY_8_BITS).view(dtype.storage)


def f16_value(bits: int) -> float:
    """Return what IEEE 754 says about a pattern of binary16, in Python's own arithmetic."""
    sign = -1.0 if bits >> 15 else 1.0
    exponent, fraction = bits >> 10 & 0x1F, bits & 0x3FF
    if exponent == 0x1F:
        return sign * (float("nan") if fraction else float("inf"))
    if exponent == 0:
        return sign * fraction * 2.0**-24
    return sign * (1 + fraction / 1024) * 2.0 ** (exponent - 15)


def test_widened_f16_is_what_ieee_754_says() -> None:
    expected = np.array([f16_value(bits) for bits in range(2**16)], np.float32)
    found = widen(every(DType.F16), DType.F16)
    np.testing.assert_array_equal(found, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[is_number]), np.signbit(expected[is_number]))


def test_widened_bf16_is_the_upper_half_of_float32() -> None:
    found = widen(every(DType.BF16), DType.BF16)
    is_nan = np.isnan(found)
    expected = EVERY_16_BITS.astype(np.uint32) << np.uint32(16)
    np.testing.assert_array_equal(found.view(np.uint32)[~is_nan], expected[~is_nan])
    np.testing.assert_array_equal(is_nan, np.isnan(expected.view(np.float32)))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_number_survives_widening_and_narrowing(dtype: DType) -> None:
    stored = every(dtype)
    wide = widen(stored, dtype)
    is_number = ~np.isnan(wide)
    assert bits_of(narrow(wide[is_number], dtype)) == bits_of(stored[is_number])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_nan_stays_a_nan(dtype: DType) -> None:
    wide = widen(every(dtype), dtype)
    nans = wide[np.isnan(wide)]
    assert nans.size > 0
    assert np.isnan(widen(narrow(nans, dtype), dtype)).all()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_odd_nans_are_narrowed_without_a_warning(dtype: DType) -> None:
    assert np.isnan(widen(narrow(f32(*ODD_NANS), dtype), dtype)).all()


@pytest.mark.parametrize(
    ("dtype", "below", "above"),
    [(DType.F16, 0x3C00, 0x3C01), (DType.BF16, 0x3F80, 0x3F81)],
    ids=["f16", "bf16"],
)
def test_halfway_is_rounded_to_the_even_neighbour(dtype: DType, below: int, above: int) -> None:
    stored = np.array([below, above, above + 1], np.uint16).view(dtype.storage)
    low, middle, high = widen(stored, dtype).tolist()
    halfway = np.array([(low + middle) / 2, (middle + high) / 2], np.float32)
    assert bits_of(narrow(halfway, dtype)) == [below, above + 1]


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F8E5M2], ids=str)
def test_what_is_too_large_becomes_infinity_without_a_warning(dtype: DType) -> None:
    wide = widen(narrow(f32(0x7F7FFFFF, 0xFF7FFFFF), dtype), dtype)
    assert wide.tolist() == [float("inf"), float("-inf")]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_narrowed_bf16_is_a_nearest_neighbour(bits: int) -> None:
    value = f32(bits)
    if not np.isfinite(value[0]):
        return
    found = int(narrow(value, DType.BF16)[0])
    even_up = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    assert found == even_up


def test_float32_is_neither_widened_nor_copied() -> None:
    values = np.ones(3, np.float32)
    assert np.shares_memory(widen(values, DType.F32), values)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shape_is_kept(dtype: DType, shape: tuple[int, ...]) -> None:
    stored = narrow(np.ones(shape, np.float32), dtype)
    assert (stored.shape, stored.dtype) == (shape, dtype.storage)
    assert widen(stored, dtype).shape == shape


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strided_arrays_are_converted_in_their_order(dtype: DType) -> None:
    values = np.exp2(np.arange(-6, 6, dtype=np.float32)).reshape(3, 4).T[::-1]
    stored = narrow(values, dtype)
    assert widen(stored[:, ::2], dtype).tolist() == values[:, ::2].tolist()


@pytest.mark.parametrize("dtype", [DType.I64, DType.U8, DType.F64], ids=str)
def test_type_that_float32_cannot_hold_is_refused(dtype: DType) -> None:
    with pytest.raises(InvalidInputError, match=r"dtype: got .* accepted: f32, f16, bf16"):
        widen(np.zeros(1, dtype.storage), dtype)
    with pytest.raises(InvalidInputError, match="dtype"):
        narrow(np.zeros(1, np.float32), dtype)


@pytest.mark.parametrize(
    ("dtype", "bits", "value"),
    [(DType.F8E4M3FN, 0x7E, 448.0), (DType.F8E5M2, 0x7B, 57344.0), (DType.F8E5M2, 0x01, 2.0**-16)],
    ids=["largest e4m3fn", "largest e5m2", "smallest e5m2"],
)
def test_8_bit_floats_have_the_values_of_their_format(
    dtype: DType, bits: int, value: float
) -> None:
    assert widen(np.array([bits], np.uint8), dtype).tolist() == [value]


@pytest.mark.parametrize("bits", ODD_NANS, ids=hex)
def test_every_nan_becomes_the_canonical_one(bits: int) -> None:
    assert bits_of(canonicalize_nan(f32(bits))) == [int(CANONICAL_NAN)] == [0x7FC00000]


def test_numbers_are_not_touched_by_canonical_nan() -> None:
    numbers = f32(*(bits for bits in IN_ORDER if not np.isnan(f32(bits)[0])))
    assert bits_of(canonicalize_nan(numbers)) == bits_of(numbers)


def test_canonical_nan_leaves_its_argument_alone() -> None:
    values = f32(0xFFC00001, 0x3F800000)
    canonicalize_nan(values)
    assert bits_of(values) == [0xFFC00001, 0x3F800000]


def test_total_order_is_that_of_ieee_754() -> None:
    keys = total_order_key(f32(*IN_ORDER)).tolist()
    assert keys == sorted(set(keys))


def test_total_order_tells_the_zeros_apart() -> None:
    negative, positive = total_order_key(f32(0x80000000, 0x00000000)).tolist()
    assert positive == negative + 1


def test_total_order_uses_the_whole_range_of_keys() -> None:
    assert total_order_key(f32(0xFFFFFFFF, 0x7FFFFFFF)).tolist() == [0, 2**32 - 1]


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_total_order_agrees_with_less_than(one: float, two: float) -> None:
    first, second = total_order_key(np.array([one, two], np.float32)).tolist()
    assert (first < second) or not (one < two)
    assert (first == second) == (one == two and np.signbit(one) == np.signbit(two))


@pytest.mark.parametrize("shape", [(), (2, 3), (0,)], ids=str)
def test_total_order_keeps_the_shape(shape: tuple[int, ...]) -> None:
    keys = total_order_key(np.zeros(shape, np.float32))
    assert np.shape(keys) == shape
    assert keys.dtype == np.uint32
