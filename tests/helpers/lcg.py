"""The generator of the contract's test inputs, and the digest that pins them."""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
_MASK = 2**64 - 1


class Lcg:
    """Draw float32 values in [-1, 1): f32(f32(f32(x >> 33) / 2^31) - 1), x advanced first."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def values(self, *shape: int) -> NDArray[np.float32]:
        count = int(np.prod(shape))
        state = self._state
        drawn = np.empty(count, np.uint64)
        for i in range(count):
            state = (state * _MULTIPLIER + _INCREMENT) & _MASK
            drawn[i] = state >> 33
        self._state = state
        unit = drawn.astype(np.float32) / np.float32(2**31)
        return (unit - np.float32(1)).reshape(shape)


def fnv1a_64(content: bytes, digest: int = 0xCBF29CE484222325) -> int:
    for byte in content:
        digest = ((digest ^ byte) * 0x100000001B3) & _MASK
    return digest
