"""What is measured: decode and prefill shapes of the GLM-5.2 indexer, and what each must reach.

The goals are for one H200, cold and captured, indices out. Public figures were taken on the same
kind of card on 2026-11-30. Nothing is measured here.
"""

from dataclasses import dataclass, replace

from nxrt.tensor import DType

GOALS_ARE_FOR = "H200"
_UNITS = ((2**20, "M"), (2**10, "k"))


@dataclass(frozen=True)
class IndexSelectShape:
    """Name one measured size.

    Args:
        B: batch.
        S: query positions.
        T: keys.
    """

    B: int
    S: int
    T: int
    H: int = 32
    D: int = 128
    K: int = 2048
    dtype: DType = DType.BF16

    @property
    def id(self) -> str:
        """Return a name for reports."""
        return f"B{self.B} S{self.S} T{self.T} H{self.H} D{self.D} K{self.K} {self.dtype}"

    @property
    def label(self) -> str:
        """Return a name for people, such as "prefill 1024 x 64k H32 bf16"."""
        kind = "prefill " if self.S > 1 else ""
        return f"{kind}{self.num_rows} x {short_count(self.T)} H{self.H} {self.dtype}"

    @property
    def num_rows(self) -> int:
        """Return how many rows are selected from."""
        return self.B * self.S

    @property
    def input_nbytes(self) -> int:
        """Return the bytes of query, key and weights."""
        elements = self.B * (self.S * self.H * (self.D + 1) + self.T * self.D)
        return elements * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the fewest bytes that must be moved: each input read once, the output written."""
        return self.input_nbytes + self.num_rows * (self.T * 4 + self.K * 8)

    @property
    def operations(self) -> int:
        """Return the multiplications and additions of the dots."""
        return 2 * self.num_rows * self.T * self.H * self.D

    @property
    def is_quick(self) -> bool:
        """Say whether it is small enough for the CPU."""
        return self.operations <= 2**26


@dataclass(frozen=True)
class Goal:
    """Say what a shape must reach, and what others reach; microseconds, None where nobody says.

    Args:
        must_us: decides whether the work is done.
        aim_us: what is tried for.
        public_us: the like-for-like public figure.
        public: what computes it.
        floor_ratio: instead of `must_us`, how often its own floor a shape may take.
        like: instead of `must_us`, the id of the shape that this one is as fast as.
        like_ratio: how often that shape's time this one may take.
    """

    must_us: float | None = None
    aim_us: float | None = None
    public_us: float | None = None
    public: str = ""
    floor_ratio: float | None = None
    like: str | None = None
    like_ratio: float = 1.0


def short_count(number: int) -> str:
    """Return a number of keys as people say it: 65,536 is "64k"."""
    for size, unit in _UNITS:
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number}"


_SELECTOR = "FP8 + selector"
_HALF = "FP8"
_CUDNN = "cuDNN-frontend"
PUBLIC_ARE = (
    "public, 2026-11-30: FP8 scores read half the bytes and are others; + selector: a deterministic"
    " one; cuDNN-frontend: bf16, with its selector"
)
_MANY = IndexSelectShape(64, 1, 65_536)

# Source of the goals and the public figures: the issue "DsaIndexSelect at the hardware's limit".
GOALS: dict[IndexSelectShape, Goal] = {
    IndexSelectShape(1, 1, 8_192): Goal(10, 8, 15.4, _SELECTOR),
    IndexSelectShape(1, 1, 131_072): Goal(18, 16, 56.5, _SELECTOR),
    IndexSelectShape(1, 1, 1_048_576): Goal(95, 85),
    IndexSelectShape(8, 1, 131_072): Goal(88, 80, 94.5, _SELECTOR),
    _MANY: Goal(315, 300, 178, _HALF),
    replace(_MANY, H=64): Goal(340, 320, 180, _HALF),
    replace(_MANY, dtype=DType.F16): Goal(like=_MANY.id, like_ratio=1.05),
    replace(_MANY, dtype=DType.F32): Goal(floor_ratio=1.4),
    IndexSelectShape(1, 1024, 16_384): Goal(310, 270, 390, _CUDNN),
    IndexSelectShape(1, 1024, 65_536): Goal(1_200, 1_050, 1_457, _CUDNN),
    IndexSelectShape(1, 1024, 65_536, H=64): Goal(2_250, 2_000, 2_532, _CUDNN),
}
"""The rows of the table, in its order."""

_LARGEST = {1: 2**20, 8: 2**18, 64: 2**17}
_SMALLEST = 2**11
CURVE = tuple(
    IndexSelectShape(batch, 1, _SMALLEST << step)
    for batch, largest in _LARGEST.items()
    for step in range((largest // _SMALLEST).bit_length())
)
"""Time against keys: for each batch every power of two from 2k."""

INDEX_SELECT = tuple(GOALS)
EVERYTHING = tuple(dict.fromkeys((*INDEX_SELECT, *CURVE)))
