"""The one accountant: every byte is reserved here before anybody allocates it.

The governor never allocates, frees or takes memory away; it counts, asks, and says no.
"""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from nxrt.errors import InvalidInputError
from nxrt.memory.account import Account, Key, Shortage, require_labels
from nxrt.memory.admission import Settle
from nxrt.memory.budget import Amount, MemoryBudget, measured_host_capacity, parsed_amount
from nxrt.memory.events import Event, EventLog, write_json_lines
from nxrt.memory.lease import MemoryLease
from nxrt.memory.ledger import Ledger
from nxrt.memory.nbytes import checked_nbytes
from nxrt.memory.pressure import Reclaim
from nxrt.memory.registration import Registration, logger
from nxrt.memory.snapshot import HolderUsage, LimitChange, OpenLease, Snapshot, TierUsage
from nxrt.memory.tier import HOST, PINNED, Role, Tier
from nxrt.memory.waiting import CancelToken, Patience
from nxrt.memory.watermark import WatermarkReached
from nxrt.tensor import MAX_SIZE

__all__ = ["HolderUsage", "LimitChange", "MemoryGovernor", "OpenLease", "Snapshot", "TierUsage"]


class MemoryGovernor:
    """Hand out leases against budgets; safe to use from any thread, and after a fork.

    A context manager, of use for children: leaving the block closes it.

    Args:
        budget: the limits; none when left out, and everything is still counted.
        capacities: measured bytes by tier, needed where a budget is a share. Host and pinned
            memory are measured here when left out.
        name: of this level, in reports and refusals.
        history: how many events to remember, 0 for none, up to 65,536.
        reclaim_timeout_s: seconds after which a request that does not wait asks nobody more.
    """

    def __init__(
        self,
        budget: MemoryBudget | None = None,
        *,
        capacities: Mapping[Tier, int] | None = None,
        name: str = "process",
        history: int = 0,
        reclaim_timeout_s: float = 5.0,
    ) -> None:
        host_capacity = measured_host_capacity()
        measured = {} if host_capacity is None else {HOST: host_capacity, PINNED: host_capacity}
        capacities = measured | dict(capacities or {})
        self._account = Account(name, None, budget or MemoryBudget(), capacities)
        self._events = EventLog(history) if history else None
        self._ledger = Ledger(self._account, self._events, reclaim_timeout_s)

    @property
    def path(self) -> str:
        """Return the names from the root down to this level, such as "process/engine"."""
        return self._account.path

    def child(self, name: str, budget: MemoryBudget | None = None) -> "MemoryGovernor":
        """Return a level below this one, with limits of its own.

        What is reserved there is charged there, here and above, or nowhere. A share in its budget
        is one of the limit here as it is when the tier is first used there, or of the measured
        capacity where there is no limit.

        Args:
            name: unique among the open children.
            budget: the limits; none when left out.

        Raises:
            InvalidInputError: the name is empty or taken.
            ClosedError: this level is closed.
        """
        governor = object.__new__(MemoryGovernor)
        governor._account = self._ledger.open_child(self._account, name, budget or MemoryBudget())
        governor._events, governor._ledger = self._events, self._ledger
        return governor

    def reserve(
        self,
        tier: Tier,
        nbytes: int,
        *,
        role: Role,
        holder: str,
        request: str = "",
        timeout_s: float = 0.0,
        cancel: CancelToken | None = None,
        settle: Settle | None = None,
    ) -> MemoryLease:
        """Reserve bytes and return the lease; 0 bytes are always granted.

        Where they do not fit, reclaimers are asked; then the request waits in line, if it may.

        Args:
            tier: where.
            nbytes: how many, an integer from 0.
            role: what for.
            holder: who; shown in reports and in the refusals of others.
            request: for which request, empty for none.
            timeout_s: seconds to wait, 0 for not at all. Inside a reclaimer nothing waits.
            cancel: ends the wait from elsewhere.
            settle: waits for memory that was given back and is still in use, and says whether that
                freed anything; called before any reclaimer, and after each.

        Raises:
            LeaseRefusedError: a limit would be passed. Nothing has changed.
            LeaseCancelledError: the token was cancelled. Nothing has changed.
            SizeOverflowError, InvalidInputError: an argument is not accepted.
            BudgetError: the tier's budget is a share of an unmeasured capacity.
            ClosedError: this level is closed, or was while the request waited.
        """
        if type(nbytes) is not int or not 0 <= nbytes <= MAX_SIZE:
            nbytes = checked_nbytes(nbytes)
        key = (tier, role, holder, request, False)
        ledger = self._ledger
        try:
            lease = ledger.take(self._account, key, nbytes)
        except TypeError:  # a label that has no hash
            require_labels(key)
            raise
        if lease is None:
            lease = self._press(key, nbytes, timeout_s, cancel, settle)
        if ledger.alerts:
            ledger.tell()
        return lease

    def _press(
        self,
        key: Key,
        nbytes: int,
        timeout_s: float,
        cancel: CancelToken | None,
        settle: Settle | None,
    ) -> MemoryLease:
        if not timeout_s >= 0 or math.isnan(timeout_s):
            raise InvalidInputError("timeout_s", found=repr(timeout_s), accepted="seconds from 0")
        ledger = self._ledger
        if timeout_s and not ledger.admission.pressure.is_asking:
            patience = Patience(time.monotonic() + timeout_s, cancel, settle)
            return ledger.wait(self._account, key, nbytes, patience)
        return ledger.ask(self._account, key, nbytes, settle)

    def record_committed(
        self, tier: Tier, nbytes: int, *, role: Role, holder: str, request: str = ""
    ) -> MemoryLease:
        """Record memory that somebody holds already and return its lease, to close with it.

        It is never refused: what is above the limit is reported as oversubscribed, and nothing
        more is granted until that has been given back. So for `grow` and `move` of such a lease.

        Raises:
            SizeOverflowError, InvalidInputError: an argument is not accepted.
            BudgetError: the tier's budget is a share of an unmeasured capacity.
            ClosedError: this level is closed.
        """
        key = (tier, role, holder, request, True)
        lease = self._ledger.record_committed(self._account, key, nbytes)
        self._warn_if_oversubscribed(tier)
        self._ledger.tell()
        return lease

    def _warn_if_oversubscribed(self, tier: Tier) -> None:
        for level in self._account.levels:
            total = level.books[tier].total
            if total.oversubscribed:
                fields = {"level": level.path, "tier": str(tier), "used": total.used}
                fields |= {"limit": total.limit, "oversubscribed": total.oversubscribed}
                message = "%s of %s is oversubscribed by %s bytes"
                logger.warning(message, tier, level.path, total.oversubscribed, extra=fields)

    def set_limit(
        self,
        tier: Tier,
        limit: object,
        *,
        role: Role | None = None,
        holder: str | None = None,
        request: str | None = None,
    ) -> LimitChange:
        """Change a limit of this level while it is in use; nothing is taken from anybody.

        Args:
            tier: whose limit.
            limit: bytes, a size such as "24 GiB", a share such as "85%", or None for no limit.
            role: change the cap of this role instead.
            holder: or of this holder.
            request: or of this request.

        Raises:
            BudgetError, InvalidInputError: the limit is not accepted; the old one stays.
            ClosedError: this level is closed.
        """
        caps: dict[str, Role | str | None] = {"roles": role, "holders": holder, "requests": request}
        named = {axis: name for axis, name in caps.items() if name is not None}
        if len(named) > 1:
            accepted = "one of role, holder and request"
            raise InvalidInputError("set_limit", found=repr(named), accepted=accepted)
        axis, name = next(iter(named.items()), ("", ""))
        amount = Amount() if limit is None else parsed_amount(limit, f"limit of {tier}")
        change = self._ledger.set_limit(self._account, tier, amount, axis, name)
        self._warn_if_oversubscribed(tier)
        self._ledger.tell()
        return change

    def register_reclaimer(
        self, tier: Tier, reclaim: Reclaim, *, priority: int = 0, name: str
    ) -> Registration:
        """Ask somebody for memory of a tier whenever a request does not fit; close to stop.

        It is asked where this level or one above it refuses, once for each request, from the thread
        of that request, with no lock held; several threads may ask at once. It is told how many
        bytes are lacking and gives back what it can by closing leases; only that counts. What it
        reserves meanwhile asks nobody and does not wait. What it raises is logged.

        Args:
            tier: whose memory it can give back.
            reclaim: takes a number of bytes. A bound method is held weakly.
            priority: smaller ones are asked first, equal ones in the order of registration.
            name: in reports and refusals.
        """
        pressure = self._ledger.admission.pressure
        return pressure.register(self._account, tier, reclaim, priority=priority, name=name)

    def register_watcher(
        self, tier: Tier, callback: Callable[[WatermarkReached], object], *, name: str
    ) -> Registration:
        """Tell somebody when this level's use of a tier reaches its watermark; close to stop.

        It is told once on the way up, and again only after use fell 1/20 below the watermark;
        from the thread whose request went past, with no lock held. What it raises is logged.

        Args:
            tier: whose watermark, which the budget sets.
            callback: takes a `WatermarkReached`. A bound method is held weakly.
            name: in the log.
        """
        return self._ledger.watchers.register(self._account, tier, callback, name=name)

    def relieve(self, tier: Tier, nbytes: int, *, settle: Settle | None = None) -> int:
        """Ask the reclaimers for bytes without reserving them; return how far the use fell.

        For an allocator that found less than the budget admits: everybody in the hierarchy is
        asked, since the memory is one. The answer is 0 where nobody was: what others gave back
        meanwhile does not count then. Raises InvalidInputError, BudgetError, ClosedError.
        """
        nbytes = checked_nbytes(nbytes)
        admission = self._ledger.admission
        before = admission.used(tier)

        def attempt() -> Shortage | None:
            lacking = nbytes - (before - admission.used(tier))
            return Shortage(total, lacking, can_end=True) if lacking > 0 else None

        total = self._ledger.root_meter(self._account, tier)
        shortage = attempt()
        answers = admission.relieve(attempt, shortage, tier, settle=settle)[1] if shortage else ()
        return max(0, before - admission.used(tier)) if answers else 0

    def snapshot(self) -> Snapshot:
        """Return every tier of this level that was ever used, and the levels below, as of now."""
        return self._ledger.snapshot(self._account)

    def usage(self, tier: Tier) -> TierUsage:
        """Return one tier as of one moment. Raises BudgetError as `reserve` does."""
        return self._ledger.usage(self._account, tier)

    def outstanding(self) -> tuple[OpenLease, ...]:
        """Return every live lease of this level and those below, the largest first."""
        return self._ledger.outstanding(self._account)

    def write_off_dropped(self) -> int:
        """Give back what leases hold that were dropped without a close; return the bytes.

        Only whoever knows that the memory behind them is gone too should say so.
        """
        return self._ledger.write_off_dropped(self._account)

    def events(self) -> tuple[Event, ...]:
        """Return the events of the whole hierarchy that are remembered, the oldest first."""
        return () if self._events is None else self._events.events()

    def write_events(self, path: Path) -> None:
        """Write the remembered events as JSON lines; the file is whole or not there.

        Raises:
            OSError: it cannot be written.
        """
        write_json_lines(self.events(), path)

    def close(self) -> None:
        """Close this level for good; a second call does nothing. Requests that wait here end.

        Raises:
            LeasesOutstandingError: leases or children are open; nothing has changed.
        """
        self._ledger.close(self._account)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
