"""The books of one hierarchy under one lock: every live record, and the counts that follow from it.

The truth is `live`, which changes in single steps; every other count is made anew where an
exception or a fork came in between. No callback runs here, and no lease is made.

Bytes may be released from anywhere, also from a finaliser or a signal handler that interrupts a
call of its own thread: then they go back at the end of that call.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import count
from typing import Concatenate, ParamSpec, TypeVar

from nxrt.errors import (
    ClosedError,
    InvalidInputError,
    LeaseCancelledError,
    LeaseRefusedError,
    LeasesOutstandingError,
    NxrtError,
)
from nxrt.memory.account import MAX_IDLE_SLOTS, Account, Key, Shortage, Slot
from nxrt.memory.budget import Amount, MemoryBudget
from nxrt.memory.events import EventLog
from nxrt.memory.lease import Record
from nxrt.memory.meter import Meter
from nxrt.memory.snapshot import (
    LimitChange,
    OpenLease,
    Snapshot,
    TierUsage,
    largest_holders,
    limit_change,
    open_leases,
    snapshot_of,
    usage_of,
)
from nxrt.memory.tier import Role, Tier
from nxrt.memory.waiting import Claim, Line
from nxrt.memory.watermark import WatermarkReached
from nxrt.tensor import MAX_SIZE

LARGEST_HOLDERS = 3
"""Named in a refusal."""

BooksT = TypeVar("BooksT", bound="Books")
P = ParamSpec("P")
R = TypeVar("R")


def exclusive(
    method: Callable[Concatenate[BooksT, P], R],
) -> Callable[Concatenate[BooksT, P], R]:
    """Let a method have the books to itself; they are whole before it and after it.

    An interrupt in the middle, which may be anywhere, is followed by a rebuild. Our own errors are
    raised before anything changes. One such method does not call another.
    """

    @wraps(method)
    def call(self: BooksT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # Not a context manager: an interrupt can keep the exit of one from ever being run.
        with self.lock:
            if self.is_busy:
                self.refuse_nesting()
            self.is_busy = True
            try:
                return method(self, *args, **kwargs)
            except NxrtError:
                raise
            except BaseException:
                self.rebuild()
                raise
            finally:
                self.is_busy = False
                if self.returned:
                    self.take_back()

    return call


class Books:
    """Keep the records of a hierarchy.

    Args:
        root: the highest level.
        events: takes notes, None for none.
    """

    def __init__(self, root: Account, events: EventLog | None) -> None:
        self.root = root
        self.events = events
        self.lock = threading.RLock()
        self.is_busy = False
        self.live: dict[int, Record] = {}
        self.serials = count()
        self.line = Line()
        self.returned: deque[int] = deque()
        self.dropped: set[int] = set()
        self.alerts: deque[WatermarkReached] = deque()
        _all_books.add(self)

    def release(  # noqa: C901, PLR0912  (written out: this and `Ledger.take` are what costs)
        self, serial: int
    ) -> Record | None:
        """Give a lease's bytes back and return its record, the first time; serve who waits."""
        with self.lock:
            if self.is_busy:  # this thread was interrupted in the middle of another call
                self.returned.append(serial)
                return self.live.get(serial)
            self.is_busy = True
            try:
                record = self.live.pop(serial, None)
                if record is not None:
                    slot, nbytes = record
                    for meter in slot.meters:
                        used = meter.used = meter.used - nbytes
                        if used < meter.rearm_below:
                            if meter.is_transient:
                                meter.peak = 0
                            else:
                                meter.fall()
                    slot.num_users -= 1
                    if not slot.num_users:
                        idle = slot.account.idle
                        idle[slot] = None
                        if len(idle) > MAX_IDLE_SLOTS:
                            slot.account.forget_oldest()
                    if self.events is not None:
                        self.events.note("release", slot, nbytes)
                    if self.line.queues:
                        self.line.serve(slot.key[0], self.grant)
            except BaseException:
                self.rebuild()
                raise
            else:
                return record
            finally:
                self.is_busy = False
                if self.returned:
                    self.take_back()

    def take_back(self) -> None:
        """Release what was closed while the books were busy."""
        while self.returned:
            self.release(self.returned.popleft())

    def write_off_dropped(self, account: Account) -> int:
        """Release what nobody can close any more; return the bytes."""
        gone = [lease for lease in self.outstanding(account) if lease.is_dropped]
        for lease in gone:
            self.release(lease.serial)
            self.dropped.discard(lease.serial)
        return sum(lease.nbytes for lease in gone)

    def drop(self, serial: int) -> None:
        """Note that nobody can close this lease any more."""
        if serial in self.live:
            self.dropped.add(serial)

    def refuse_nesting(self) -> None:
        """Raise InvalidInputError: this very thread is in the middle of a change."""
        raise InvalidInputError(
            "governor",
            found="a call from a finaliser or signal handler, in the middle of another call",
            accepted="closing leases there, and everything else elsewhere",
        )

    @exclusive
    def open_child(self, account: Account, name: str, budget: MemoryBudget) -> Account:
        """Return a new level. Raises InvalidInputError, ClosedError."""
        account.require_open()
        if not isinstance(name, str) or not name or name in account.children:
            accepted = f"a name that no open child of {account.path} has"
            raise InvalidInputError("name", found=repr(name), accepted=accepted)
        account.children[name] = Account(name, account, budget, {})
        return account.children[name]

    @exclusive
    def close(self, account: Account) -> None:
        """Close a level. Raises LeasesOutstandingError, with nothing changed."""
        is_used = account.children or len(account.slots) > len(account.idle)
        held = open_leases(self.records(account), self.dropped) if is_used else ()
        if held or account.children:
            leases = [(str(h.tier), h.role.value, h.holder, h.nbytes) for h in held]
            raise LeasesOutstandingError(account.path, leases, sorted(account.children))
        for claim in self.line.claims():
            if claim.slot.account is account:
                self.void(claim)
        account.is_closed = True
        account.drop_idle()
        if account.parent is not None:
            account.parent.children.pop(account.name, None)
        for tier in tuple(self.line.queues):
            self.line.serve(tier, self.grant)

    @exclusive
    def set_limit(
        self, account: Account, tier: Tier, amount: Amount, axis: str = "", name: str | Role = ""
    ) -> LimitChange:
        """Change a limit, or a cap where an axis is given; those who wait are served or ended."""
        account.require_open()
        book = account.open_book(tier)
        previous = book.limit_of(axis, name)
        book.retune(book.budget.changed(amount, axis, name), account.capacity(tier))
        self.rebuild()
        for claim in self.line.claims(tier):
            if claim.slot.hopeless(claim.nbytes) is not None:
                self.void(claim)
        self.line.serve(tier, self.grant)
        limit = book.limit_of(axis, name)
        self.note_tier("limit", account.path, tier, MAX_SIZE if limit is None else limit)
        return limit_change(book, axis, name, previous)

    @exclusive
    def outstanding(self, account: Account) -> tuple[OpenLease, ...]:
        """Return what is live at a level and below it, the largest first."""
        return open_leases(self.records(account), self.dropped)

    @exclusive
    def snapshot(self, account: Account) -> Snapshot:
        """Return what the books of a level and of those below say now."""
        return snapshot_of(account, self.line.count)

    @exclusive
    def usage(self, account: Account, tier: Tier) -> TierUsage:
        """Return what a level's book of one tier says now. Raises BudgetError."""
        book = account.books.get(tier) or account.new_book(tier)
        return usage_of(book, self.line.count(tier, account))

    @exclusive
    def root_meter(self, account: Account, tier: Tier) -> Meter:
        """Return the meter of a tier in the whole hierarchy. Raises BudgetError, ClosedError."""
        account.require_open()
        account.open_book(tier)
        return self.root.books[tier].total

    @exclusive
    def refuse(
        self,
        account: Account,
        key: Key,
        nbytes: int,
        shortage: Shortage,
        reason: str,
        asked: Sequence[tuple[str, str]],
    ) -> LeaseRefusedError:
        """Count a refusal at every level and return it; its figures are of one moment."""
        for level in account.levels:
            level.books[key[0]].num_refused += 1
            level.books[key[0]].num_timed_out += reason == "timeout"
        event = "time_out" if reason == "timeout" else "refuse"
        self.note(event, account.open_slot(key), nbytes)
        meter = shortage.meter
        refusing = next(level for level in account.levels if level.path == meter.level)
        return LeaseRefusedError(
            str(key[0]),
            requested=nbytes,
            available=max(0, (meter.ceiling if shortage.is_queue else meter.most) - meter.used),
            limit=meter.most,
            holder=key[2],
            largest_holders=largest_holders(refusing.books[key[0]], meter.cap, LARGEST_HOLDERS),
            level=meter.level,
            cap=meter.cap,
            reason=reason,
            asked=asked,
        )

    @exclusive
    def cancel(self, account: Account, key: Key, nbytes: int) -> LeaseCancelledError:
        """Count a cancelled wait at every level and return what says so."""
        for level in account.levels:
            level.books[key[0]].num_cancelled += 1
        self.note("cancel", account.open_slot(key), nbytes)
        return LeaseCancelledError(str(key[0]), requested=nbytes, holder=key[2])

    # What follows is called by exclusive methods.

    def post(self, serial: int, slot: Slot, nbytes: int) -> None:
        """Charge a new record without asking."""
        self.put({serial: (slot, nbytes)})
        self.join(slot)
        slot.post(nbytes, self.alert)

    def put(self, records: dict[int, Record]) -> None:
        """Enter records, in one step: an interrupt finds the books before it or after it."""
        self.live.update(records)

    def record(self, serial: int) -> Record:
        """Return a live record. Raises ClosedError."""
        record = self.live.get(serial)
        if record is None:
            raise ClosedError("lease")
        return record

    def records(self, account: Account) -> Iterator[tuple[int, Record]]:
        """Yield (serial, record) of all that is live at a level or below it."""
        for serial, record in self.live.items():
            if account in record[0].account.levels:
                yield serial, record

    def join(self, slot: Slot) -> None:
        """Note that one more lease or wait uses a slot."""
        if not slot.num_users:
            slot.account.idle.pop(slot, None)
        slot.num_users += 1

    def grant(self, claim: Claim) -> None:
        """Charge a claim that has left the line."""
        claim.granted = next(self.serials)
        self.post(claim.granted, claim.slot, claim.nbytes)
        claim.slot.leave()
        self.note("reserve", claim.slot, claim.nbytes)

    def void(self, claim: Claim) -> None:
        """End a claim's wait in vain."""
        if self.line.leave(claim):
            claim.slot.leave()
        claim.is_void = True
        claim.wake()

    def alert(self, meter: Meter, tier: Tier) -> None:
        """Note that a watermark was reached; whoever charged tells the watchers afterwards."""
        watermark = meter.watermark or 0
        reached = WatermarkReached(meter.level, tier, watermark, meter.used, meter.limit)
        self.alerts.append(reached)
        meter.alert()
        self.note_tier("watermark", meter.level, tier, watermark)

    def note(self, event: str, slot: Slot, nbytes: int) -> None:
        """Take note of what happened to a slot, where notes are taken."""
        if self.events is not None:
            self.events.note(event, slot, nbytes)

    def note_tier(self, event: str, level: str, tier: Tier, nbytes: int) -> None:
        """Take note of what happened to a tier."""
        if self.events is not None:
            self.events.note_tier(event, level, tier, nbytes, self.root.books[tier].total.used)

    def rebuild(self) -> None:
        """Make every count anew from the live records and the claims in line."""
        for account in self.root.tree():
            account.reset()
        for serial, (slot, nbytes) in self.live.items():
            fresh = slot.account.open_slot(slot.key)
            self.live[serial] = fresh, nbytes  # the keys stay, so the iteration goes on
            self.join(fresh)
            fresh.post(nbytes)
        for claim in self.line.claims():
            claim.slot = claim.slot.account.open_slot(claim.slot.key)
            self.join(claim.slot)
            for meter in claim.slot.limited:
                meter.queue(claim.nbytes)
        for account in self.root.tree():
            for book in account.books.values():
                book.forget_unused()
                if book.total.used >= book.total.alert_at:
                    self.alert(book.total, book.tier)
                if book.total.used < book.total.rearm_below:
                    book.total.fall()

    def restart(self) -> None:
        """Begin anew in a forked child: no other thread lives on, whatever it was doing."""
        self.lock = threading.RLock()
        self.is_busy = False
        self.line = Line()
        self.alerts.clear()
        self.rebuild()


_all_books: "weakref.WeakSet[Books]" = weakref.WeakSet()


def _restart_all() -> None:
    for books in tuple(_all_books):
        books.restart()


# So that no lock that another thread held at the fork stays held in the child.
os.register_at_fork(after_in_child=_restart_all)
