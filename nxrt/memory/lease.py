"""One reservation of bytes, held by one holder until it is closed.

A lease is a promise about numbers; the memory itself is allocated elsewhere, after the lease.
"""

import warnings
from typing import Protocol, Self

from nxrt.memory.account import Slot
from nxrt.memory.tier import Role, Tier

Record = tuple[Slot, int]
"""(where it is charged, bytes): all that the books know of a lease."""


class LeaseKeeper(Protocol):
    """Keep the record of every live lease, by its serial number; safe to use from any thread."""

    live: dict[int, Record]

    def release(self, serial: int) -> Record | None:
        """Give the bytes back and return the record, the first time; never fails."""

    def drop(self, serial: int) -> None:
        """Note that nobody can close this lease any more."""

    def grow(self, serial: int, nbytes: int) -> None:
        """Charge more bytes to a lease."""

    def shrink(self, serial: int, nbytes: int) -> None:
        """Give back some bytes of a lease."""

    def split(self, serial: int, nbytes: int) -> "MemoryLease":
        """Put some bytes of a lease into a new one."""

    def move(self, serial: int, tier: Tier) -> None:
        """Charge a lease to another tier."""


class MemoryLease:
    """Hold reserved bytes; a context manager whose `close` gives them back exactly once.

    Closing cannot fail and may be repeated; any thread may close, a finaliser and a signal handler
    too. Every change is one exchange: where it is refused, nothing has changed.

    Args:
        keeper: keeps the books.
        serial: under which they know the lease.
        record: what they say of it now.
    """

    __slots__ = ("__weakref__", "_keeper", "_last", "is_closed", "serial")

    def __init__(self, keeper: LeaseKeeper, serial: int, record: Record) -> None:
        self._keeper = keeper
        self.serial = serial
        self._last = record
        self.is_closed = False

    def _record(self) -> Record:
        # The books' word, not a copy: what a holder could change must not change the books.
        record = self._keeper.live.get(self.serial)
        if record is not None:
            self._last = record
        return self._last

    @property
    def nbytes(self) -> int:
        """Return how many bytes it holds, or held when it was closed."""
        return self._record()[1]

    @property
    def tier(self) -> Tier:
        """Return where they are."""
        return self._record()[0].key[0]

    @property
    def role(self) -> Role:
        """Return what they are for."""
        return self._last[0].key[1]

    @property
    def holder(self) -> str:
        """Return who holds them."""
        return self._last[0].key[2]

    @property
    def request(self) -> str:
        """Return for which request they are held, empty for none."""
        return self._last[0].key[3]

    @property
    def is_committed(self) -> bool:
        """Say whether it records memory that somebody held without asking."""
        return self._last[0].key[4]

    def grow(self, nbytes: int) -> None:
        """Reserve more bytes.

        Raises:
            LeaseRefusedError: they do not fit, after the reclaimers were asked.
            ClosedError: the lease is closed.
            SizeOverflowError, InvalidInputError: `nbytes` is not a size.
        """
        self._keeper.grow(self.serial, nbytes)

    def shrink(self, nbytes: int) -> None:
        """Give some bytes back.

        Raises:
            ClosedError: the lease is closed.
            InvalidInputError: `nbytes` is not a size, or more than the lease holds.
        """
        self._keeper.shrink(self.serial, nbytes)

    def split(self, nbytes: int) -> "MemoryLease":
        """Return a new lease, alike in everything, that takes over some of the bytes.

        Raises:
            ClosedError: the lease is closed.
            InvalidInputError: `nbytes` is not a size, or more than the lease holds.
        """
        return self._keeper.split(self.serial, nbytes)

    def move(self, tier: Tier) -> None:
        """Hold the same bytes on another tier instead; at no moment on both, or on none.

        Raises:
            LeaseRefusedError: they do not fit there, after the reclaimers were asked.
            ClosedError: the lease is closed.
            BudgetError, InvalidInputError: there is no such tier, or its limit is not known.
        """
        self._keeper.move(self.serial, tier)

    def close(self) -> None:
        """Give the bytes back; a second call does nothing."""
        if not self.is_closed:
            self._last = self._keeper.release(self.serial) or self._last
            self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            if self.is_closed or self.serial not in self._keeper.live:
                return
        except AttributeError:  # its constructor was interrupted
            return
        self._keeper.drop(self.serial)
        warnings.warn(
            f"lease of {self.nbytes:,} B on {self.tier} for {self.holder!r} was never closed; its"
            " bytes stay charged until governor.write_off_dropped()",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return (
            f"<MemoryLease {self.nbytes:,} B {self.tier} {self.role.value} {self.holder} {state}>"
        )
