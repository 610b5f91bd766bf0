"""The entries of one ledger of state groups, and how they follow the governor.

The governor comes first: it is asked before anything is attributed, and what is attributed is
taken off before its lease is given back. So at no moment more is attributed than is charged. No
lock is held while the governor may ask reclaimers, which may close or shrink any charge.

Two locks: `_gate` keeps changes apart that are no release, and the governor may be called inside
it; `_lock` guards the entries, and nothing is called inside it, so that a finaliser may release in
the middle of a call of the governor. A release in the middle of a change of its own thread goes at
the end of that. The truth is `entries`, which changes in single steps; the sum is made anew where
an exception or a fork came in between.
"""

import os
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from nxrt.errors import (
    ClosedError,
    InvalidInputError,
    LeaseRefusedError,
    NxrtError,
    StateGroupOutOfMemoryError,
)
from nxrt.locks import new_rlock
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.snapshot import Snapshot
from nxrt.memory.state_bytes import StateGroupBytes
from nxrt.memory.state_charge import Entry, Figures, GroupKey, PendingCharge
from nxrt.memory.tier import Role, device_tier

R = TypeVar("R")


class StateBooks:
    """Keep the entries of one ledger; safe to use from any thread, and after a fork.

    Args:
        governor: is asked for every byte.
        name: of the ledger; every holder's name begins with it.
    """

    def __init__(self, governor: MemoryGovernor, name: str) -> None:
        self.governor = governor
        self.name = name
        self.entries: dict[int, Entry] = {}
        self.resident = 0
        self.peak = 0
        self.num_failures = 0
        self.is_closed = False
        self._gate = new_rlock()
        self._is_gated = False
        self._lock = new_rlock()
        self._is_busy = False
        self._version = 0
        self._growing: dict[int, set[object]] = {}
        self._returned: deque[tuple[MemoryLease, bool]] = deque()
        self._dropped: set[int] = set()
        _all_books.add(self)

    def holder(self, request: int) -> str:
        """Return the name under which the governor knows a request's state."""
        return f"{self.name}/{request}"

    def _gated(self, action: Callable[[], R]) -> R:
        """Do something that no other change but a release may come between."""
        # Not a context manager: an interrupt can keep the exit of one from ever being run.
        with self._gate:
            self._refuse_nesting(self._is_gated)
            self._is_gated = True
            try:
                return action()
            finally:
                self._is_gated = False

    def _exclusively(self, action: Callable[[], R]) -> R:
        """Do something in which nothing is called and no release comes between."""
        try:
            return self._locked(action)
        finally:
            while self._returned and not self._is_busy:
                self._take_back()

    def _locked(self, action: Callable[[], R]) -> R:
        with self._lock:
            self._refuse_nesting(self._is_busy)
            self._is_busy = True
            try:
                return action()
            except NxrtError:
                raise
            except BaseException:
                self._rebuild()
                raise
            finally:
                self._is_busy = False

    def _refuse_nesting(self, is_nested: bool) -> None:
        if is_nested:
            raise InvalidInputError(
                self.name,
                found="a call from a finaliser or signal handler, in the middle of another",
                accepted="closing charges there, and everything else elsewhere",
            )

    def reserve(self, key: GroupKey, wanted: StateGroupBytes) -> PendingCharge:
        """Ask the governor, and enter what it granted, not attributed yet."""
        self._require_open()
        total = wanted.total
        lease = self._granted(key, total)
        try:
            entry = Entry(key, wanted, total, lease)
            pending = PendingCharge(self, entry)  # first: an interrupt leaves nothing unowned
            self._exclusively(partial(self._put, None, entry))
        except BaseException:
            self.release(lease, is_committed=False)
            raise
        return pending

    def commit(self, serial: int) -> None:
        """Attribute what was reserved. Raises ClosedError."""
        self._gated(partial(self._commit, serial))

    def _commit(self, serial: int) -> None:
        self._require_open()
        entry = self._entry(serial, is_committed=False)
        if not self._exclusively(partial(self._put, entry, replace(entry, is_committed=True))):
            raise ClosedError(self._what(entry))

    def exchange(self, serial: int, wanted: StateGroupBytes) -> None:
        """Let a charge hold other bytes; all of it, or nothing. Raises as the charge says."""
        total = wanted.total
        while not self._try_exchange(serial, wanted, total):
            pass  # somebody else exchanged or closed it meanwhile: begin again from there

    def _try_exchange(self, serial: int, wanted: StateGroupBytes, total: int) -> bool:
        ticket = object()
        before = self._entry(serial, is_committed=True)
        after = replace(before, bytes=wanted, total=total)
        if total <= before.total:
            return self._gated(partial(self._shrink, before, after))
        try:
            self._gated(partial(self._begin, serial, ticket))
            self._grow(before, total - before.total)
            return self._gated(partial(self._finish, before, after))
        finally:
            self._gated(partial(self._settle, serial, ticket))

    def _shrink(self, before: Entry, after: Entry) -> bool:
        if not self._exclusively(partial(self._put, before, after)):
            return False
        try:
            if after.total < before.total:
                self._give_back(before, before.total - after.total)
        except NxrtError:  # called in the middle of a call of the governor
            self._exclusively(partial(self._put, after, before))
            raise
        except BaseException:
            self._settle(before.lease.serial, None)
            raise
        return True

    def _begin(self, serial: int, ticket: object) -> None:
        self._growing.setdefault(serial, set()).add(ticket)

    def _grow(self, before: Entry, nbytes: int) -> None:
        try:
            before.lease.grow(nbytes)
        except LeaseRefusedError as refusal:
            raise self._refused(before.key, nbytes, refusal) from refusal
        except ClosedError as closed:  # a reclaimer gave it back to make room
            raise ClosedError(self._what(before)) from closed

    def _finish(self, before: Entry, after: Entry) -> bool:
        is_done = self._exclusively(partial(self._put, before, after))
        if not is_done:
            self._give_back(before, after.total - before.total)
        return is_done

    def _give_back(self, entry: Entry, nbytes: int) -> None:
        with suppress(ClosedError):  # then it went with all the rest
            entry.lease.shrink(nbytes)

    def _settle(self, serial: int, ticket: object) -> None:
        """End an exchange; an interrupt may have left more charged than is attributed."""
        tickets = self._growing.get(serial, set())
        tickets.discard(ticket)
        if tickets:
            return
        self._growing.pop(serial, None)
        entry = self.entries.get(serial)
        if entry is not None and entry.lease.nbytes > entry.total:
            self._give_back(entry, entry.lease.nbytes - entry.total)

    def release(self, lease: MemoryLease, *, is_committed: bool) -> None:
        """Take an entry off, unless it is of the other kind, then give its lease back."""
        with self._lock:
            if self._is_busy:  # this thread was interrupted, and sees to it afterwards
                self._returned.append((lease, is_committed))
                return
        if self._exclusively(partial(self._remove, lease.serial, is_committed)):
            lease.close()

    def _take_back(self) -> None:
        try:
            lease, is_committed = self._returned.popleft()
        except IndexError:  # another thread took it
            return
        if self._locked(partial(self._remove, lease.serial, is_committed)):
            lease.close()

    def drop(self, serial: int) -> None:
        """Note that nobody can close this entry any more."""
        self._dropped.add(serial)

    def release_dropped(self, *, is_committed: bool) -> int:
        """Release every entry of a kind that nobody can close; return the bytes."""
        nbytes = 0
        for serial in tuple(self._dropped):
            entry = self.entries.get(serial)
            if entry is None or entry.is_committed is is_committed:
                self._dropped.discard(serial)
            if entry is not None and entry.is_committed is is_committed:
                nbytes += entry.total
                self.release(entry.lease, is_committed=is_committed)
        return nbytes

    def close(self) -> None:
        """Take no more, and roll back the reservations that nobody can."""
        self.is_closed = True
        self.release_dropped(is_committed=False)

    def figures(self) -> Figures:
        """Return what is attributed, as of one moment."""
        return self._exclusively(self._figures)

    def agreed(self) -> tuple[Figures, Snapshot]:
        """Return what is attributed and what the governor says, as of the same moment."""
        return self._gated(self._agreed)

    def _agreed(self) -> tuple[Figures, Snapshot]:
        # Releases alone pass the gate: they run out, so that this ends.
        while True:
            figures, governor = self.figures(), self.governor.snapshot()
            if figures.version == self._version:
                return figures, governor

    def _figures(self) -> Figures:
        live = tuple(entry for entry in self.entries.values() if entry.is_committed)
        return Figures(live, self.resident, self.peak, self.num_failures, self._version)

    def _granted(self, key: GroupKey, nbytes: int) -> MemoryLease:
        request, device = key
        try:
            return self.governor.reserve(
                device_tier(device),
                nbytes,
                role=Role.STATE_GROUP,
                holder=self.holder(request),
                request=str(request),
            )
        except LeaseRefusedError as refusal:
            raise self._refused(key, nbytes, refusal) from refusal

    def _refused(
        self, key: GroupKey, nbytes: int, refusal: LeaseRefusedError
    ) -> StateGroupOutOfMemoryError:
        self._exclusively(self._count_failure)
        resident = refusal.limit - refusal.available
        if refusal.level == self.governor.path and not (refusal.available or refusal.cap):
            # A refusal does not say how far above a lowered limit the use is.
            resident = max(resident, self.governor.usage(device_tier(key[1])).used)
        return StateGroupOutOfMemoryError(
            *key, requested=nbytes, resident=resident, limit=refusal.limit
        )

    def _count_failure(self) -> None:
        self.num_failures += 1

    def _what(self, entry: Entry) -> str:
        kind = "charge" if entry.is_committed else "reservation"
        return f"{kind} of request {entry.key[0]} on device:{entry.key[1]} in {self.name!r}"

    def _require_open(self) -> None:
        if self.is_closed:
            raise ClosedError(self.name)

    def _entry(self, serial: int, *, is_committed: bool) -> Entry:
        entry = self.entries.get(serial)
        if entry is None or entry.is_committed is not is_committed:
            raise ClosedError("charge" if is_committed else "reservation")
        return entry

    def _put(self, before: Entry | None, after: Entry) -> bool:
        """Enter what follows on an entry, where that is still what the books say."""
        serial = after.lease.serial
        if self.entries.get(serial) is not before:
            return False
        self._version += 1
        self.entries[serial] = after
        self.resident += after.resident - (0 if before is None else before.resident)
        self.peak = max(self.peak, self.resident)
        return True

    def _remove(self, serial: int, is_committed: bool) -> bool:
        """Take an entry off; say no where it is of the other kind, yes where there is none."""
        entry = self.entries.get(serial)
        if entry is not None and entry.is_committed is not is_committed:
            return False
        if entry is not None:
            self._version += 1
            del self.entries[serial]
            self.resident -= entry.resident
        return True

    def _rebuild(self) -> None:
        self.resident = sum(entry.resident for entry in self.entries.values())
        self.peak = max(self.peak, self.resident)

    def restart(self) -> None:
        """Begin anew in a forked child: no other thread lives on, whatever it was doing."""
        self._is_gated = self._is_busy = False
        self._growing.clear()
        self._rebuild()


_all_books: "weakref.WeakSet[StateBooks]" = weakref.WeakSet()


def _restart_all() -> None:
    for books in tuple(_all_books):
        books.restart()


# After the governors' own, which are registered by what is imported above.
os.register_at_fork(after_in_child=_restart_all)
