"""What is measured: decode shapes of the GLM-5.2 indexer, and one prefill chunk.

Inputs are Gaussian, drawn once with a fixed seed, in bf16.
"""

from dataclasses import dataclass

from nxrt.tensor import DType


@dataclass(frozen=True)
class IndexSelectShape:
    """Name one measured size.

    Args:
        B: batch.
        S: query positions.
        T: keys.
        is_quick: small enough for the CPU.
    """

    B: int
    S: int
    T: int
    H: int = 32
    D: int = 128
    K: int = 2048
    dtype: DType = DType.BF16
    is_quick: bool = False

    @property
    def id(self) -> str:
        """Return a name for tables."""
        return f"B{self.B} S{self.S} T{self.T} H{self.H} D{self.D} K{self.K} {self.dtype}"

    @property
    def nbytes(self) -> int:
        """Return the fewest bytes that must be moved: each input read once, the output written."""
        elements = self.B * (self.S * self.H * (self.D + 1) + self.T * self.D)
        rows = self.B * self.S
        return elements * self.dtype.itemsize + rows * self.T * 4 + rows * self.K * 8

    @property
    def operations(self) -> int:
        """Return the un-fused multiplications and additions of the dots."""
        return 2 * self.B * self.S * self.T * self.H * self.D


INDEX_SELECT = (
    IndexSelectShape(1, 1, 2048, is_quick=True),
    IndexSelectShape(1, 1, 8192, is_quick=True),
    IndexSelectShape(1, 1, 65_536),
    IndexSelectShape(1, 1, 131_072),
    IndexSelectShape(1, 1, 1_048_576),
    IndexSelectShape(8, 1, 131_072),
    IndexSelectShape(64, 1, 65_536),
    IndexSelectShape(64, 1, 65_536, H=64),
    IndexSelectShape(64, 1, 65_536, dtype=DType.F16),
    IndexSelectShape(1, 1024, 16_384),
    IndexSelectShape(1, 1024, 65_536),
    IndexSelectShape(1, 1024, 65_536, H=64),
)
