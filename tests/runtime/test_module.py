"""Packed kernel arguments: what the driver will read, read back here."""

import ctypes
from typing import Any

import pytest

from nxrt import InvalidInputError
from nxrt.runtime.module import KernelArguments


def values_behind(arguments: KernelArguments, kinds: list[Any]) -> list[float]:
    addresses = (ctypes.c_uint64 * len(kinds)).from_address(arguments.address)
    return [kind.from_address(a).value for kind, a in zip(kinds, addresses, strict=True)]


def test_every_argument_is_behind_its_own_address() -> None:
    arguments = KernelArguments(["pointer", "u64", "i64", "u32", "i32", "f32"])
    arguments.set(2**47, 2**64 - 1, -(2**63), 2**32 - 1, -(2**31), 0.5)
    kinds: list[Any] = [
        ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int32,
        ctypes.c_float,
    ]  # fmt: skip
    assert values_behind(arguments, kinds) == [
        2**47, 2**64 - 1, -(2**63), 2**32 - 1, -(2**31), 0.5,
    ]  # fmt: skip


def test_setting_again_keeps_the_addresses() -> None:
    arguments = KernelArguments(["u64"])
    arguments.set(1)
    address = arguments.address
    arguments.set(2)
    assert arguments.address == address
    assert values_behind(arguments, [ctypes.c_uint64]) == [2]


@pytest.mark.parametrize("values", [(), (1,), (1, 2, 3), (-1, 0), (1.5, 0)])
def test_a_wrong_count_or_value_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInputError, match="one value for each of"):
        KernelArguments(["u64", "u64"]).set(*values)
