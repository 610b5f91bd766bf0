"""Where bytes live and what they are for: the two axes the governor counts along.

Names only; limits are in `budget`, counting is in `governor`.
"""

from dataclasses import dataclass, field
from enum import Enum
from functools import cache


class TierKind(Enum):
    """Say what kind of memory a tier is."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"

    # Members are singletons; Enum's own hash is a Python call in every look-up of the books.
    __hash__ = object.__hash__


class Role(Enum):
    """Say what memory is held for."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    STATE_GROUP = "state_group"
    ACTIVATION = "activation"
    WORKSPACE = "workspace"
    STAGING = "staging"
    GRAPH = "graph"

    __hash__ = object.__hash__  # as above


@dataclass(frozen=True, slots=True)
class Tier:
    """Name one pool of memory: a device's, the page-locked host memory, or plain host memory.

    Args:
        kind: the kind of memory.
        ordinal: the device's, 0 for the host's tiers.
    """

    kind: TierKind
    ordinal: int = 0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # From numbers alone, so that it is the same in a process that unpickles the tier.
        kinds = list(TierKind)
        object.__setattr__(self, "_hash", hash((kinds.index(self.kind), self.ordinal)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.kind is TierKind.DEVICE:
            return f"device:{self.ordinal}"
        return str(self.kind.value)


HOST = Tier(TierKind.HOST)
PINNED = Tier(TierKind.PINNED)


@cache
def device_tier(ordinal: int) -> Tier:
    """Return the tier of one device's memory; the same object every time."""
    return Tier(TierKind.DEVICE, ordinal)
