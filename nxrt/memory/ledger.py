"""Leases over the books: reserved, grown, shrunk, split and moved, each in one exchange.

Where an exchange is refused nothing has changed. Reclaimers are asked between two attempts, with no
lock held.
"""

from collections.abc import Sequence
from functools import partial

from nxrt.errors import NxrtError
from nxrt.memory.account import Account, Key, Shortage, Slot
from nxrt.memory.admission import Admission, Settle
from nxrt.memory.books import Books, exclusive
from nxrt.memory.events import EventLog
from nxrt.memory.lease import MemoryLease
from nxrt.memory.nbytes import checked_nbytes, require_countable, require_held
from nxrt.memory.pressure import Answer
from nxrt.memory.tier import Tier
from nxrt.memory.waiting import Claim, Patience
from nxrt.memory.watermark import Watchers


class Ledger(Books):
    """Keep the leases of a hierarchy.

    Args:
        root: the highest level.
        events: takes notes, None for none.
        reclaim_timeout_s: as `Admission` takes it.
    """

    def __init__(self, root: Account, events: EventLog | None, reclaim_timeout_s: float) -> None:
        super().__init__(root, events)
        self.admission = Admission(self, reclaim_timeout_s)
        self.watchers = Watchers()

    def take(  # noqa: C901, PLR0912  (written out: this and `release` are what costs)
        self, account: Account, key: Key, nbytes: int
    ) -> MemoryLease | None:
        """Charge a newcomer and return its lease, None where it does not fit."""
        serial = next(self.serials)
        with self.lock:
            if self.is_busy:
                self.refuse_nesting()
            self.is_busy = True
            try:
                slot = account.slots.get(key) or account.open_slot(key)
                for meter in slot.limited:
                    if meter.used + nbytes > meter.ceiling and nbytes:
                        return None
                record = slot, nbytes
                lease = MemoryLease(self, serial, record)  # first: an interrupt leaves none behind
                self.live[serial] = record
                if not slot.num_users:
                    account.idle.pop(slot, None)
                slot.num_users += 1
                for meter in slot.meters:
                    used = meter.used = meter.used + nbytes
                    if used > meter.peak:
                        meter.peak = used
                    if used >= meter.alert_at:
                        self.alert(meter, key[0])
                if self.events is not None:
                    self.events.note("reserve", slot, nbytes)
            except NxrtError:
                raise
            except BaseException:
                self.live.pop(serial, None)
                self.rebuild()
                raise
            else:
                return lease
            finally:
                self.is_busy = False
                if self.returned:
                    self.take_back()

    def ask(self, account: Account, key: Key, nbytes: int, settle: Settle | None) -> MemoryLease:
        """Reserve what did not fit at once, without waiting. Raises LeaseRefusedError."""
        leases: list[MemoryLease] = []
        attempt = partial(self._try_reserve, account, key, nbytes, leases)
        self.admission.admit(attempt, account, key, nbytes, settle)
        return leases[0]

    @exclusive
    def _try_reserve(
        self, account: Account, key: Key, nbytes: int, leases: list[MemoryLease]
    ) -> Shortage | None:
        slot = account.open_slot(key)
        shortage = slot.shortage(nbytes)
        if shortage is None:
            leases.append(self._open(slot, nbytes, "reserve"))
        return shortage

    def wait(self, account: Account, key: Key, nbytes: int, patience: Patience) -> MemoryLease:
        """Reserve what did not fit at once, in line. Raises as `MemoryGovernor.reserve`."""
        claim = Claim(self._slot(account, key), nbytes)
        try:  # from here on an interrupt finds the claim, and ends it
            self._enlist(claim)
            answers = self._pursue(claim, patience)
            shortage = self._withdraw(claim)
            if claim.granted is not None:
                return MemoryLease(self, claim.granted, (claim.slot, nbytes))
        except BaseException:
            self._withdraw(claim)
            if claim.granted is not None:
                self.release(claim.granted)
            raise
        account.require_open()
        if patience.is_cancelled:
            raise self.cancel(account, key, nbytes)
        assert shortage is not None  # a claim that nothing keeps waiting is granted
        reason = "timeout" if shortage.can_end else "limit"
        raise self.admission.refused(account, key, nbytes, shortage, answers, reason)

    def _pursue(self, claim: Claim, patience: Patience) -> Sequence[Answer]:
        """Ask the reclaimers, then wait."""
        answers: Sequence[Answer] = ()
        with patience.waking(claim):
            shortage = self._missing(claim)
            if shortage is not None:
                _, answers = self.admission.relieve(
                    lambda: self._missing(claim),
                    shortage,
                    claim.slot.key[0],
                    settle=patience.settle,
                    deadline=patience.deadline,
                )
            claim.wait(patience.deadline, patience.cancel)
        return answers

    @exclusive
    def _slot(self, account: Account, key: Key) -> Slot:
        return account.open_slot(key)

    @exclusive
    def _enlist(self, claim: Claim) -> None:
        """Put a request at the end of the line, unless it fits by now or never will."""
        slot = claim.slot = claim.slot.account.open_slot(claim.slot.key)
        shortage = slot.shortage(claim.nbytes)
        if shortage is not None and not shortage.can_end:
            claim.is_void = True
            return
        self.join(slot)
        if shortage is None:
            self.grant(claim)
        else:
            self.line.join(claim)
            self.note("wait", slot, claim.nbytes)

    @exclusive
    def _missing(self, claim: Claim) -> Shortage | None:
        return None if claim.is_settled else self.line.shortage(claim)

    @exclusive
    def _withdraw(self, claim: Claim) -> Shortage | None:
        """Take a claim out of the line, so that those behind it move up; say what it lacked."""
        shortage = None if claim.granted is not None else self.line.shortage(claim)
        if self.line.leave(claim):
            claim.slot.leave()
            self.line.serve(claim.slot.key[0], self.grant)
        return shortage

    @exclusive
    def record_committed(self, account: Account, key: Key, nbytes: int) -> MemoryLease:
        """Charge without asking."""
        nbytes = checked_nbytes(nbytes)
        slot = account.open_slot(key)
        require_countable(nbytes, slot.root.used)
        return self._open(slot, nbytes, "commit")

    def _open(self, slot: Slot, nbytes: int, event: str) -> MemoryLease:
        # The lease comes first: where an interrupt follows, it says that it was dropped.
        lease = MemoryLease(self, next(self.serials), (slot, nbytes))
        self.post(lease.serial, slot, nbytes)
        self.note(event, slot, nbytes)
        return lease

    def grow(self, serial: int, nbytes: int) -> None:
        """Charge more bytes to a lease; memory that is only recorded is never refused."""
        nbytes = checked_nbytes(nbytes)
        slot, _ = self.record(serial)
        attempt = partial(self._try_grow, serial, nbytes)
        self.admission.admit(attempt, slot.account, slot.key, nbytes)
        self.tell()

    @exclusive
    def _try_grow(self, serial: int, nbytes: int) -> Shortage | None:
        slot, held = self.record(serial)
        if slot.key[4]:
            require_countable(nbytes, slot.root.used)
        shortage = None if slot.key[4] else slot.shortage(nbytes)
        if shortage is None:
            self.put({serial: (slot, held + nbytes)})
            slot.post(nbytes, self.alert)
            self.note("grow", slot, nbytes)
        return shortage

    def move(self, serial: int, tier: Tier) -> None:
        """Charge a lease to another tier; memory that is only recorded is never refused."""
        slot, nbytes = self.record(serial)
        attempt = partial(self._try_move, serial, tier)
        self.admission.admit(attempt, slot.account, (tier, *slot.key[1:]), nbytes)
        self.tell()

    @exclusive
    def _try_move(self, serial: int, tier: Tier) -> Shortage | None:
        old, nbytes = self.record(serial)
        new = old.account.open_slot((tier, *old.key[1:]))
        if new is old:
            return None
        shortage = None if old.key[4] else new.shortage(nbytes)
        if shortage is None:
            self.join(new)
            self.put({serial: (new, nbytes)})
            new.post(nbytes, self.alert)
            old.unpost(nbytes)
            old.leave()
            self.note("move_in", new, nbytes)
            self.note("move_out", old, nbytes)
            self.line.serve(old.key[0], self.grant)
        return shortage

    @exclusive
    def shrink(self, serial: int, nbytes: int) -> None:
        """Give back some bytes of a lease."""
        nbytes = checked_nbytes(nbytes)
        slot, held = self.record(serial)
        require_held(nbytes, held)
        self.put({serial: (slot, held - nbytes)})
        slot.unpost(nbytes)
        self.note("shrink", slot, nbytes)
        self.line.serve(slot.key[0], self.grant)

    @exclusive
    def split(self, serial: int, nbytes: int) -> MemoryLease:
        """Put some bytes of a lease into a new one."""
        nbytes = checked_nbytes(nbytes)
        slot, held = self.record(serial)
        require_held(nbytes, held)
        part = MemoryLease(self, next(self.serials), (slot, nbytes))
        self.put({serial: (slot, held - nbytes), part.serial: (slot, nbytes)})
        self.join(slot)
        self.note("split", slot, nbytes)
        return part

    def tell(self) -> None:
        """Tell the watchers of every watermark that was reached; with no lock held."""
        while self.alerts:
            try:
                reached = self.alerts.popleft()
            except IndexError:  # another thread tells it
                return
            self.watchers.tell(reached)
