"""Tensors as descriptions: element types, specs whose dimensions may be symbolic, and views.

Nothing here allocates, copies or computes, and nothing knows CUDA: a view is an address, a layout
and whatever keeps that address alive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import InvalidInputError, SizeOverflowError
from nxrt.storage import (
    CPU_DEVICE,
    DeviceId,
    DeviceType,
    ForeignStorage,
    Storage,
    checked_int,
)

MAX_SIZE = 2**63 - 1
"""The largest count or byte size nxrt accepts: what a signed 64-bit index can address."""

Dim = int | str
"""A dimension: a size, or the name of one that is bound later."""


class DType(Enum):
    """Name an element type; values are (ONNX code, name, NumPy storage type).

    NumPy has no bfloat16 and no 8-bit floats: those travel as unsigned integers of the same width,
    with the DType beside them saying what the bits mean.
    """

    F32 = (1, "f32", "float32")
    U8 = (2, "u8", "uint8")
    I8 = (3, "i8", "int8")
    U16 = (4, "u16", "uint16")
    I16 = (5, "i16", "int16")
    I32 = (6, "i32", "int32")
    I64 = (7, "i64", "int64")
    BOOL = (9, "bool", "bool")
    F16 = (10, "f16", "float16")
    F64 = (11, "f64", "float64")
    U32 = (12, "u32", "uint32")
    U64 = (13, "u64", "uint64")
    BF16 = (16, "bf16", "uint16")
    F8E4M3FN = (17, "f8e4m3fn", "uint8")
    F8E5M2 = (19, "f8e5m2", "uint8")

    def __init__(self, onnx_code: int, label: str, storage: str) -> None:
        self.onnx_code = onnx_code
        self.label = label
        self.storage = np.dtype(storage)

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element."""
        return self.storage.itemsize

    @classmethod
    def of_array(cls, array: NDArray[Any]) -> "DType":
        """Return the type a NumPy array holds by itself; bits of bf16 or fp8 read as integers."""
        if array.dtype in _NATIVE_DTYPES:
            return _NATIVE_DTYPES[array.dtype]
        accepted = ", ".join(dtype.name for dtype in _NATIVE_DTYPES)
        raise InvalidInputError("array dtype", found=str(array.dtype), accepted=accepted)

    def __str__(self) -> str:
        return self.label

    def __repr__(self) -> str:
        return f"DType.{self.name}"


_BITS_ONLY = (DType.BF16, DType.F8E4M3FN, DType.F8E5M2)
_NATIVE_DTYPES = {dtype.storage: dtype for dtype in DType if dtype not in _BITS_ONLY}


def checked_product(subject: str, *factors: int) -> int:
    """Multiply sizes and refuse a product past `MAX_SIZE`.

    A zero factor does not excuse the others: each partial product of the non-zero ones counts, as
    a kernel may form it.

    Raises:
        SizeOverflowError: the product does not fit; `subject` names it.
    """
    product = 1
    for factor in factors:
        product *= factor or 1
    if product > MAX_SIZE:
        found = " * ".join(str(factor) for factor in factors)
        raise SizeOverflowError(subject, found=found, accepted=f"at most {MAX_SIZE}")
    return 0 if 0 in factors else product


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describe a tensor before it exists.

    Args:
        dtype: the element type.
        shape: sizes >= 0, or names of sizes that are bound later.
    """

    dtype: DType
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType):
            accepted = "a DType: " + ", ".join(map(str, DType))
            raise InvalidInputError("dtype", found=repr(self.dtype), accepted=accepted)
        if isinstance(self.shape, str):
            raise InvalidInputError("shape", found=repr(self.shape), accepted="a tuple of sizes")
        object.__setattr__(self, "shape", tuple(_checked_dim(dim) for dim in self.shape))

    @property
    def rank(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    @property
    def symbols(self) -> frozenset[str]:
        """Return the names of the dimensions that are not sizes yet."""
        return frozenset(dim for dim in self.shape if isinstance(dim, str))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the shape of a spec without symbols.

        Raises:
            InvalidInputError: a dimension is still a name.
        """
        if self.symbols:
            raise InvalidInputError(
                "shape", found=str(self), accepted="sizes only", remedy="bind its symbols first"
            )
        return tuple(dim for dim in self.shape if isinstance(dim, int))

    def num_elements(self, subject: str = "tensor") -> int:
        """Return the element count, refusing one past the 63-bit range in `subject`'s name."""
        return checked_product(f"element count of {subject}", *self.sizes)

    def nbytes(self, subject: str = "tensor") -> int:
        """Return the bytes of the dense tensor, refusing a size past the 63-bit range."""
        self.num_elements(subject)
        return checked_product(f"byte size of {subject}", *self.sizes, self.dtype.itemsize)

    def bind(self, dims: Mapping[str, int]) -> "TensorSpec":
        """Return the spec with every symbol found in `dims` replaced by its size."""
        shape = tuple(dims.get(dim, dim) if isinstance(dim, str) else dim for dim in self.shape)
        return TensorSpec(self.dtype, shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def _checked_dim(dim: object) -> Dim:
    if isinstance(dim, str) and dim.isidentifier():
        return dim
    if isinstance(dim, (int, np.integer)) and not isinstance(dim, bool) and 0 <= dim <= MAX_SIZE:
        return int(dim)
    raise InvalidInputError(
        "dimension", found=repr(dim), accepted=f"0 to {MAX_SIZE}, or a name for a later size"
    )


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the element strides of a row-major tensor without gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class TensorView:
    """Look into storage: dtype, shape, signed element strides and a byte offset (DLPack's layout).

    A view owns nothing but keeps its storage referenced. Construction checks everything a view can
    know, so that a kernel never sees one that reaches outside its storage.

    Args:
        storage: the memory.
        dtype: the element type.
        shape: sizes.
        strides: elements, may be negative; dense row-major when left out.
        byte_offset: bytes from the storage's start to element [0, 0, ...].

    Raises:
        InvalidInputError: rank and strides differ, the offset is negative or not a multiple of the
            element size, or an element would lie outside the storage.
    """

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    byte_offset: int = 0

    def __post_init__(self) -> None:
        sizes = TensorSpec(self.dtype, self.shape).sizes
        object.__setattr__(self, "shape", sizes)
        strides = tuple(checked_int("strides", step) for step in self.strides)
        object.__setattr__(self, "strides", strides or dense_strides(sizes))
        object.__setattr__(self, "byte_offset", checked_int("byte_offset", self.byte_offset))
        if len(self.strides) != len(sizes):
            raise InvalidInputError(
                "strides", found=f"{len(self.strides)} strides", accepted=f"{len(sizes)}, as shape"
            )
        if self.byte_offset < 0 or self.byte_offset % self.dtype.itemsize:
            accepted = f"a multiple of {self.dtype.itemsize}, from 0"
            raise InvalidInputError("byte_offset", found=str(self.byte_offset), accepted=accepted)
        self._check_bounds()

    def _check_bounds(self) -> None:
        if self.num_elements == 0:
            return
        reach = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        lowest = self.byte_offset + self.dtype.itemsize * sum(r for r in reach if r < 0)
        highest = self.byte_offset + self.dtype.itemsize * (1 + sum(r for r in reach if r > 0))
        if lowest < 0 or highest > self.storage.nbytes:
            raise InvalidInputError(
                "view",
                found=f"{self.spec} with strides {self.strides} over bytes {lowest}..{highest}",
                accepted=f"bytes 0..{self.storage.nbytes} of its storage",
            )
        if self.pointer % self.dtype.itemsize:
            found, size = f"address {self.pointer:#x}", self.dtype.itemsize
            raise InvalidInputError("view", found=found, accepted=f"a multiple of {size}")

    @classmethod
    def of_array(cls, array: NDArray[Any], dtype: DType | None = None) -> "TensorView":
        """Return a view of a NumPy array, which it keeps referenced.

        Args:
            array: any shape and strides; strides must be whole elements.
            dtype: what the elements mean where NumPy cannot say (bf16, fp8); same width.
        """
        dtype = dtype or DType.of_array(array)
        if dtype.storage != array.dtype:
            accepted = f"{dtype.storage.name}, which holds {dtype}"
            raise InvalidInputError("array dtype", found=str(array.dtype), accepted=accepted)
        if any(step % array.itemsize for step in array.strides):
            accepted = f"multiples of {array.itemsize} bytes"
            raise InvalidInputError("array strides", found=str(array.strides), accepted=accepted)
        low, high = np.lib.array_utils.byte_bounds(array)
        address = array.__array_interface__["data"][0]
        storage = ForeignStorage(
            low, high - low, CPU_DEVICE, array, is_read_only=not array.flags.writeable
        )
        strides = tuple(step // array.itemsize for step in array.strides)
        offset = address - low if array.size else 0
        return cls(storage, dtype, array.shape, strides, offset)

    @property
    def spec(self) -> TensorSpec:
        """Return dtype and shape."""
        return TensorSpec(self.dtype, self.shape)

    @property
    def num_elements(self) -> int:
        """Return the element count."""
        return self.spec.num_elements()

    @property
    def device(self) -> DeviceId:
        """Return where the storage is."""
        return self.storage.device

    @property
    def is_read_only(self) -> bool:
        """Say whether the memory's owner forbids writing to it."""
        return isinstance(self.storage, ForeignStorage) and self.storage.is_read_only

    @property
    def pointer(self) -> int:
        """Return the address of element [0, 0, ...]."""
        return self.storage.pointer + self.byte_offset

    @property
    def is_contiguous(self) -> bool:
        """Say whether the elements lie row-major without gaps; strides of size-1 axes are free."""
        if self.num_elements == 0:
            return True
        dense = dense_strides(self.shape)
        axes = zip(self.shape, self.strides, dense, strict=True)
        return all(size == 1 or step == want for size, step, want in axes)

    def to_array(self) -> NDArray[Any]:
        """Return a NumPy array over the same host memory, which stays valid for its sake.

        Raises:
            InvalidInputError: the storage is not in host memory.
        """
        if self.device.type is not DeviceType.CPU:
            raise InvalidInputError(
                "view", found=f"memory on {self.device}", accepted="host memory",
                remedy="read it through its binding",
            )  # fmt: skip
        if self.num_elements == 0:
            return np.empty(self.shape, self.dtype.storage)
        return np.asarray(_ArrayInterface(self))


class _ArrayInterface:
    """Carry a view's address to NumPy; the array made from it keeps this, and so the memory."""

    def __init__(self, view: TensorView) -> None:
        self._kept = (view, view.storage.anchor)
        itemsize = view.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (view.pointer, view.is_read_only),
            "shape": view.shape,
            "strides": tuple(step * itemsize for step in view.strides),
            "typestr": view.dtype.storage.str,
        }
