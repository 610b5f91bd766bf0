"""Where bytes live and what they are for: the two axes the governor counts along.

Names only; limits are in `budget`, counting is in `governor`.
"""

from dataclasses import dataclass
from enum import Enum


class TierKind(Enum):
    """Say what kind of memory a tier is."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"


class Role(Enum):
    """Say what memory is held for."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    STATE_GROUP = "state_group"
    ACTIVATION = "activation"
    WORKSPACE = "workspace"
    STAGING = "staging"
    GRAPH = "graph"


@dataclass(frozen=True, slots=True)
class Tier:
    """Name one pool of memory: a device's, the page-locked host memory, or plain host memory.

    Args:
        kind: the kind of memory.
        ordinal: the device's, 0 for the host's tiers.
    """

    kind: TierKind
    ordinal: int = 0

    def __str__(self) -> str:
        if self.kind is TierKind.DEVICE:
            return f"device:{self.ordinal}"
        return str(self.kind.value)


HOST = Tier(TierKind.HOST)
PINNED = Tier(TierKind.PINNED)


def device_tier(ordinal: int) -> Tier:
    """Return the tier of one device's memory."""
    return Tier(TierKind.DEVICE, ordinal)
