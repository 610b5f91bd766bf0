"""One reservation of bytes, held by one holder until it is closed.

A lease is a promise about numbers; the memory itself is allocated elsewhere, after the lease.
"""

import warnings
from collections.abc import Callable
from typing import Self

from nxrt.memory.tier import Role, Tier


class MemoryLease:
    """Hold reserved bytes; a context manager whose `close` gives them back exactly once.

    Closing cannot fail and may be repeated; any thread may close.

    Args:
        tier: where the bytes are.
        nbytes: how many; 0 is valid.
        role: what they are for.
        holder: who holds them.
        release: called with the lease by every `close`; it must ignore all but the first.
    """

    is_closed = True  # until `__init__` is through: what an interrupt left half-made holds nothing

    def __init__(
        self,
        tier: Tier,
        nbytes: int,
        role: Role,
        holder: str,
        release: Callable[["MemoryLease"], None],
    ) -> None:
        self.tier = tier
        self.nbytes = nbytes
        self.role = role
        self.holder = holder
        self._release = release
        self.is_closed = False

    def close(self) -> None:
        """Give the bytes back; a second call does nothing."""
        self._release(self)
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.is_closed:
            warnings.warn(
                f"lease of {self.nbytes:,} B on {self.tier} for {self.holder!r} was never closed",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return (
            f"<MemoryLease {self.nbytes:,} B {self.tier} {self.role.value} {self.holder} {state}>"
        )
