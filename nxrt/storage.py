"""Memory that views look into: where it is, how far it reaches, who keeps it alive.

Nothing here allocates or knows CUDA; `nxrt.tensor` gives the bytes a meaning.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from nxrt.errors import InvalidInputError

MAX_ADDRESS = 2**64 - 1


class DeviceType(Enum):
    """Say where memory is or work is done."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class DeviceId:
    """Name one device: its type and its ordinal among those of that type."""

    type: DeviceType
    ordinal: int = 0

    def __str__(self) -> str:
        return f"{self.type.value}:{self.ordinal}"


CPU_DEVICE = DeviceId(DeviceType.CPU)


def checked_int(subject: str, value: object) -> int:
    """Return an integer as a plain int. Raises InvalidInputError for anything else, bool too."""
    # A NumPy integer would wrap around in the bounds check instead of growing.
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidInputError(subject, found=repr(value), accepted="integers")
    return int(value)


class Storage(Protocol):
    """Memory that a view looks into: an address range on a device, and whoever keeps it alive.

    `pointer` raises ClosedError once the memory has been given back.
    """

    @property
    def pointer(self) -> int:
        """Return the address of the first byte; 0 is allowed only where `nbytes` is 0."""

    @property
    def nbytes(self) -> int:
        """Return how many bytes may be touched."""

    @property
    def device(self) -> DeviceId:
        """Return where the memory is."""

    @property
    def anchor(self) -> object:
        """Return what keeps the memory from going away while referenced, None where nothing can.

        Arrays made from a view hold it, and so survive the closing of the storage.
        """


@dataclass(frozen=True)
class ForeignStorage:
    """Memory that somebody else owns: a NumPy array, a framework's tensor.

    Args:
        pointer: address of the first byte.
        nbytes: bytes that may be touched.
        device: where the memory is.
        owner: kept referenced for as long as this storage is.
        is_read_only: nobody may write to it.
    """

    pointer: int
    nbytes: int
    device: DeviceId
    owner: object = field(default=None, repr=False)
    is_read_only: bool = False

    def __post_init__(self) -> None:
        for name in ("pointer", "nbytes"):
            value = checked_int(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if not 0 <= value <= MAX_ADDRESS:
                raise InvalidInputError(name, found=str(value), accepted="an address or a size")
        if self.pointer == 0 and self.nbytes:
            found = f"address 0 for {self.nbytes:,} bytes"
            raise InvalidInputError("pointer", found=found, accepted="where the memory is")

    @property
    def anchor(self) -> object:
        """Return the owner."""
        return self.owner
