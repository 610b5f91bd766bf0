"""Numbers as the operators' contracts mean them: widening, narrowing, and the total order of f32.

NumPy only; the device's counterpart is include/nxrt/numerics.cuh.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nxrt.errors import InvalidInputError
from nxrt.tensor import DType

CANONICAL_NAN = np.uint32(0x7FC00000)

_VALUE_TYPES: dict[DType, np.dtype[Any]] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.F8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8E5M2: np.dtype(ml_dtypes.float8_e5m2),
}


def _value_type(dtype: DType) -> np.dtype[Any]:
    if dtype not in _VALUE_TYPES:
        accepted = ", ".join(map(str, _VALUE_TYPES))
        raise InvalidInputError("dtype", found=str(dtype), accepted=accepted)
    return _VALUE_TYPES[dtype]


def widen(storage: NDArray[Any], dtype: DType) -> NDArray[np.float32]:
    """Return stored elements as float32, which holds each of them exactly.

    Args:
        storage: any shape, of `dtype.storage`.
        dtype: f32, f16, bf16 or an 8-bit float.
    """
    return storage.view(_value_type(dtype)).astype(np.float32, copy=False)


def narrow(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """Return float32 values rounded to nearest even, as `dtype` stores them.

    Args:
        values: any shape.
        dtype: f32, f16, bf16 or an 8-bit float.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(_value_type(dtype), order="C").view(dtype.storage)


def canonicalize_nan(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values with every NaN replaced by 0x7fc00000.

    Processors disagree about a NaN's sign and payload; an order over bits must not see that.
    """
    bits = np.where(np.isnan(values), CANONICAL_NAN, values.view(np.uint32))
    return bits.astype(np.uint32, copy=False).view(np.float32)


def total_order_key(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return unsigned keys that compare as IEEE 754 totalOrder does on the values.

    -NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN. Source: docs/operators/dsa_index_select.md.
    """
    bits = values.view(np.uint32)
    is_negative = (bits >> np.uint32(31)).astype(bool)
    return np.where(is_negative, ~bits, bits | np.uint32(0x80000000)).astype(np.uint32, copy=False)
