"""How many bytes the state of compressed sparse attention takes, by class and by layer.

Arithmetic only: no budget is asked and nothing is allocated.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from nxrt.errors import InvalidInputError, SizeOverflowError
from nxrt.storage import checked_int
from nxrt.tensor import MAX_SIZE, checked_product

RECORD_NBYTES = 583
"""A packed attention record: seven scales with 64 FP8 codes each, then 64 bfloat16."""

INDEX_RECORD_NBYTES = 68
"""A packed index record: four scales with 32 FP4 codes each."""

MAX_POSITIONS = 2**20
"""The longest sequence that state is laid out for."""

RATIOS = (0, 4, 128)
"""Tokens that one record stands for; 0 is a layer with a dense window only."""

CARRY_ELEMENTS = {0: 0, 4: 8 * 2 * 1024, 128: 128 * 2 * 512}
"""float32 of an attention carry, by ratio: slots, value and score, channels."""

INDEX_CARRY_ELEMENTS = {0: 0, 4: 8 * 2 * 256, 128: 0}
"""float32 of an index carry, by ratio; only ratio 4 has an index."""

_F32_NBYTES = 4


@dataclass(frozen=True, slots=True)
class StateGroupBytes:
    """Hold bytes by class; each from 0 to 2**63 - 1.

    Args:
        compressed: attention records.
        carry: the unfinished block of the attention compressor.
        dense_ring: the window of recent positions.
        index: index records.
        index_carry: the unfinished block of the index compressor.
        scratch: workspaces.

    Raises:
        InvalidInputError: a class is negative or not an integer; `subject` names it.
        SizeOverflowError: a class is past 2**63 - 1.
    """

    compressed: int = 0
    carry: int = 0
    dense_ring: int = 0
    index: int = 0
    index_carry: int = 0
    scratch: int = 0

    def __post_init__(self) -> None:
        for name, nbytes in self.by_class().items():
            object.__setattr__(self, name, _checked_nbytes(f"nbytes of {name}", nbytes))

    @classmethod
    def workspace_only(cls, sizes: Iterable[int]) -> "StateGroupBytes":
        """Return scratch for workspaces, each of which is allocated with at least one byte.

        Raises:
            InvalidInputError, SizeOverflowError: a size, or their sum, is no byte size.
        """
        return cls(scratch=sum(max(_checked_nbytes("nbytes of a workspace", n), 1) for n in sizes))

    @property
    def total(self) -> int:
        """Return the exact sum. Raises SizeOverflowError past 2**63 - 1."""
        return _checked_nbytes("state group bytes", sum(self.by_class().values()))

    def by_class(self) -> dict[str, int]:
        """Return the bytes by the name of their class, in the order of the fields."""
        return asdict(self)

    def __add__(self, other: object) -> "StateGroupBytes":
        if not isinstance(other, StateGroupBytes):
            return NotImplemented
        mine, others = self.by_class(), other.by_class()
        return StateGroupBytes(**{name: mine[name] + others[name] for name in mine})


def _checked_nbytes(subject: str, value: object) -> int:
    nbytes = checked_int(subject, value)
    accepted = f"an integer from 0 to {MAX_SIZE}"
    if nbytes < 0:
        raise InvalidInputError(subject, found=str(nbytes), accepted=accepted)
    if nbytes > MAX_SIZE:
        raise SizeOverflowError(subject, found=str(nbytes), accepted=accepted)
    return nbytes


@dataclass(frozen=True, slots=True)
class StateGroupLayout:
    """Hold the sizes of one layer's state.

    Records are counted in the packed format, which is the format of 583 bytes, whatever the cache
    is stored in.

    Args:
        batch: sequences, from 1.
        max_positions: the longest sequence, 1 to 2**20.
        window: recent positions kept densely, 1 to max_positions.
        ratio: tokens a record stands for: 4, 128, or 0 for none.

    Raises:
        InvalidInputError: naming the first number that is not accepted.
    """

    batch: int
    max_positions: int
    window: int
    ratio: int

    def __post_init__(self) -> None:
        self._check_range("max_positions", MAX_POSITIONS)
        self._check_range("batch", MAX_SIZE)
        self._check_range("window", self.max_positions)
        object.__setattr__(self, "ratio", checked_int("ratio", self.ratio))
        if self.ratio not in RATIOS:
            accepted = "0, 4 or 128"
            raise InvalidInputError("ratio", found=str(self.ratio), accepted=accepted)

    def _check_range(self, name: str, limit: int) -> None:
        value = checked_int(name, getattr(self, name))
        if not 1 <= value <= limit:
            raise InvalidInputError(name, found=str(value), accepted=f"1 to {limit}")
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, *, batch: int, max_positions: int, window: int, ratio: int) -> "StateGroupLayout":
        """Return the layout of one layer. Raises as the class does."""
        return cls(batch, max_positions, window, ratio)

    @property
    def records(self) -> int:
        """Return how many records a sequence can come to; an unfinished block counts as one."""
        return -(-self.max_positions // self.ratio) if self.ratio else 0

    def bytes(self) -> StateGroupBytes:
        """Return the bytes of the layer by class.

        Raises:
            SizeOverflowError: a class is past 2**63 - 1.


        """
        index_records = self.records if self.ratio == 4 else 0
        carry, index_carry = CARRY_ELEMENTS[self.ratio], INDEX_CARRY_ELEMENTS[self.ratio]
        return StateGroupBytes(
            compressed=self._nbytes("compressed", self.records, RECORD_NBYTES),
            carry=self._nbytes("carry", carry, _F32_NBYTES),
            dense_ring=self._nbytes("dense_ring", self.window, RECORD_NBYTES),
            index=self._nbytes("index", index_records, INDEX_RECORD_NBYTES),
            index_carry=self._nbytes("index_carry", index_carry, _F32_NBYTES),
        )

    def _nbytes(self, name: str, count: int, nbytes: int) -> int:
        return checked_product(f"{name} bytes", self.batch, count, nbytes)
