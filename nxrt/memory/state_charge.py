"""What the owner of a state group holds: a reservation that may still be taken back, or a charge.

Handles only; the books behind them are in `state_books`, and the bytes are the governor's.
"""

import warnings
from dataclasses import dataclass
from typing import Protocol, Self

from nxrt.errors import NxrtError
from nxrt.memory.lease import MemoryLease
from nxrt.memory.state_bytes import StateGroupBytes

GroupKey = tuple[int, int]
"""(request, device ordinal): whose state it is, and where."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Hold what the books know of one reservation or charge.

    Args:
        key: whose it is.
        bytes: the bytes by class.
        total: their sum.
        lease: the governor's word for them.
        is_committed: it is attributed; until then the governor alone counts it.
    """

    key: GroupKey
    bytes: StateGroupBytes
    total: int
    lease: MemoryLease
    is_committed: bool = False

    @property
    def resident(self) -> int:
        """Return the bytes that are attributed."""
        return self.total if self.is_committed else 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Hold what the books say at one moment; `version` changes with every change of theirs."""

    live: tuple[Entry, ...]
    resident: int
    peak: int
    num_failures: int
    version: int


class ChargeKeeper(Protocol):
    """Keep the entries, by the serial number of their lease; safe to use from any thread."""

    entries: dict[int, Entry]

    def commit(self, serial: int) -> None:
        """Attribute a reservation. Raises ClosedError."""

    def exchange(self, serial: int, wanted: StateGroupBytes) -> None:
        """Let a charge hold other bytes instead; all of it, or nothing."""

    def release(self, lease: MemoryLease, *, is_committed: bool) -> None:
        """Take an entry off, unless it is of the other kind, then give its lease back."""

    def drop(self, serial: int) -> None:
        """Note that nobody can close this entry any more."""


class _Handle:
    """Hold an entry; a context manager whose `close` gives it back exactly once.

    Closing cannot fail and may be repeated; any thread may close, a finaliser and a signal handler
    too.

    Args:
        keeper: keeps the books.
        entry: what they say now.
    """

    __slots__ = ("__weakref__", "_is_given_back", "_keeper", "_last")

    _is_committed = False

    def __init__(self, keeper: ChargeKeeper, entry: Entry) -> None:
        self._keeper = keeper
        self._last = entry
        self._is_given_back = False

    @property
    def _serial(self) -> int:
        return self._last.lease.serial

    def _open_entry(self) -> Entry | None:
        entry = self._keeper.entries.get(self._serial)
        if entry is None or entry.is_committed is not self._is_committed:
            return None
        return entry

    @property
    def is_closed(self) -> bool:
        """Say whether it has been given back, or handed on."""
        # The books may be about to take it off: a call of theirs was interrupted by the close.
        return self._is_given_back or self._open_entry() is None

    @property
    def key(self) -> GroupKey:
        """Return (request, device ordinal)."""
        return self._last.key

    @property
    def bytes(self) -> StateGroupBytes:
        """Return the bytes by class that it holds, or held last."""
        self._last = self._open_entry() or self._last
        return self._last.bytes

    @property
    def total(self) -> int:
        """Return their sum."""
        return self.bytes.total

    def close(self) -> None:
        """Give it back; a second call does nothing."""
        self._last = self._open_entry() or self._last
        self._keeper.release(self._last.lease, is_committed=self._is_committed)
        self._is_given_back = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            if self.is_closed:
                return
        except AttributeError:  # its constructor was interrupted
            return
        self._keeper.drop(self._serial)
        warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        (request, device), state = self.key, "closed" if self.is_closed else "open"
        return f"<{type(self).__name__} {self.total:,} B request {request} device:{device} {state}>"


class StateGroupCharge(_Handle):
    """Hold the bytes of a state group until it is closed.

    Close it after the memory behind it was freed, so that nobody is promised what is still in use.
    """

    __slots__ = ()

    _is_committed = True

    @property
    def lease_nbytes(self) -> int:
        """Return what the governor says that it holds, or held when it was closed."""
        return self._last.lease.nbytes

    def exchange(self, wanted: StateGroupBytes) -> None:
        """Hold other bytes instead, in one exchange: where it is refused nothing has changed.

        Growth asks the governor for the difference only; what becomes free is given back at once.

        Raises:
            StateGroupOutOfMemoryError: the difference does not fit; its cause says why.
            ClosedError: the charge is closed, or was to make room for itself.
            SizeOverflowError: the sum of the classes is past 2**63 - 1.
        """
        self._keeper.exchange(self._serial, wanted)


class PendingCharge(_Handle):
    """Hold bytes that the governor has granted and nobody is attributed yet.

    Leaving its block, or closing it, rolls back what was not committed.
    """

    __slots__ = ()

    def commit(self) -> StateGroupCharge:
        """Return the charge; from here on it is what must be closed.

        Raises:
            ClosedError: it was committed or rolled back before, or the ledger is closed.
        """
        entry = self._open_entry() or self._last
        charge = StateGroupCharge(self._keeper, entry)  # first: an interrupt leaves none behind
        try:
            self._keeper.commit(self._serial)
        except NxrtError:
            del charge._keeper  # noqa: SLF001  (it owns nothing: another one may be alive)
            raise
        return charge

    def roll_back(self) -> None:
        """Give the bytes back, unless they were committed; the same as `close`."""
        self.close()
