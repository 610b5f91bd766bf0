"""The one accountant: every byte is reserved here before anybody allocates it.

The governor never allocates, frees or takes memory away; it counts, and says no.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nxrt.errors import InvalidInputError, LeaseRefusedError, SizeOverflowError
from nxrt.locks import new_lock
from nxrt.memory.budget import MemoryBudget, measured_host_capacity
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, PINNED, Role, Tier
from nxrt.tensor import MAX_SIZE

_LARGEST_HOLDERS = 3


@dataclass(frozen=True)
class HolderUsage:
    """Report what one holder holds in one role: bytes now, and the most since it held none."""

    role: Role
    holder: str
    used: int
    peak: int


@dataclass(frozen=True)
class TierUsage:
    """Report one tier: limit (None is no limit), bytes now, the most ever, refused requests."""

    tier: Tier
    limit: int | None
    used: int
    peak: int
    num_refused: int
    holders: tuple[HolderUsage, ...]

    @property
    def available(self) -> int:
        """Return how many bytes would still be granted."""
        return max(0, (MAX_SIZE if self.limit is None else self.limit) - self.used)


@dataclass
class _TierBook:
    """The running counts of one tier; touched only under the governor's lock."""

    limit: int | None
    used: int = 0
    peak: int = 0
    num_refused: int = 0
    by_holder: dict[tuple[Role, str], HolderUsage] = field(default_factory=dict)

    @property
    def available(self) -> int:
        return (MAX_SIZE if self.limit is None else self.limit) - self.used

    def add(self, role: Role, holder: str, nbytes: int) -> None:
        # A holder that holds nothing is forgotten, so that the book does not grow with time.
        before = self.by_holder.pop((role, holder), HolderUsage(role, holder, 0, 0))
        used = before.used + nbytes
        if used:
            self.by_holder[role, holder] = HolderUsage(role, holder, used, max(before.peak, used))
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def usage(self, tier: Tier) -> TierUsage:
        holders = sorted(self.by_holder.values(), key=lambda h: (-h.used, h.role.value, h.holder))
        return TierUsage(tier, self.limit, self.used, self.peak, self.num_refused, tuple(holders))


class MemoryGovernor:
    """Hand out leases against budgets; safe to use from any thread.

    Args:
        budget: the limits; none when left out, and everything is still counted.
        capacities: measured bytes by tier, needed where a budget is a share. Host and pinned
            memory are measured here when left out.
    """

    def __init__(
        self, budget: MemoryBudget | None = None, *, capacities: Mapping[Tier, int] | None = None
    ) -> None:
        self._budget = budget or MemoryBudget()
        host_capacity = measured_host_capacity()
        measured = {} if host_capacity is None else {HOST: host_capacity, PINNED: host_capacity}
        self._capacities = measured | dict(capacities or {})
        self._lock = new_lock()
        self._books: dict[Tier, _TierBook] = {}
        self._open: dict[int, tuple[Tier, Role, str, int]] = {}

    def reserve(self, tier: Tier, nbytes: int, *, role: Role, holder: str) -> MemoryLease:
        """Reserve bytes and return the lease; 0 bytes are always granted.

        Args:
            tier: where.
            nbytes: how many, an integer from 0.
            role: what for.
            holder: who; shown in reports and in the refusals of others.

        Raises:
            LeaseRefusedError: the tier's limit would be passed. Nothing has changed.
            SizeOverflowError, InvalidInputError: `nbytes` is not a size.
            BudgetError: the tier's budget is a share of an unmeasured capacity.
        """
        nbytes = checked_nbytes(nbytes)
        _check_labels(tier, role, holder)
        with self._lock:
            book = self._book(tier)
            if nbytes <= book.available:
                lease = MemoryLease(tier, nbytes, role, holder, self._release)
                book.add(role, holder, nbytes)
                self._open[id(lease)] = (tier, role, holder, nbytes)
                return lease
            book.num_refused += 1
            usage = book.usage(tier)
        raise _refusal(usage, nbytes, holder)

    def snapshot(self) -> tuple[TierUsage, ...]:
        """Return all tiers that were ever used, as of one moment."""
        with self._lock:
            tiers = sorted(self._books, key=str)
            return tuple(self._books[tier].usage(tier) for tier in tiers)

    def usage(self, tier: Tier) -> TierUsage:
        """Return one tier as of one moment. Raises BudgetError as `reserve` does."""
        with self._lock:
            book = self._books.get(tier) or self._new_book(tier)
            return book.usage(tier)

    def _book(self, tier: Tier) -> _TierBook:
        if tier not in self._books:
            self._books[tier] = self._new_book(tier)
        return self._books[tier]

    def _new_book(self, tier: Tier) -> _TierBook:
        return _TierBook(self._budget.limit(tier, self._capacities.get(tier)))

    def _release(self, lease: MemoryLease) -> None:
        # The amounts come from our record, not from the lease: its fields are the holder's to see,
        # and must not be able to change the books.
        with self._lock:
            record = self._open.pop(id(lease), None)
            if record is not None:
                tier, role, holder, nbytes = record
                self._books[tier].add(role, holder, -nbytes)


def _check_labels(tier: Tier, role: Role, holder: str) -> None:
    # A label of another type would sit in the books and break every later report.
    labels = {"tier": (tier, Tier), "role": (role, Role), "holder": (holder, str)}
    for name, (label, kind) in labels.items():
        if not isinstance(label, kind):
            raise InvalidInputError(name, found=repr(label), accepted=f"a {kind.__name__}")


def checked_nbytes(nbytes: int) -> int:
    """Return a byte size as a plain int.

    Raises:
        InvalidInputError: it is negative or not an integer.
        SizeOverflowError: it is past 2**63 - 1.
    """
    accepted = f"an integer from 0 to {MAX_SIZE}"
    if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)) or nbytes < 0:
        raise InvalidInputError("nbytes", found=repr(nbytes), accepted=accepted)
    if nbytes > MAX_SIZE:
        raise SizeOverflowError("nbytes", found=repr(nbytes), accepted=accepted)
    return int(nbytes)


def _refusal(usage: TierUsage, requested: int, holder: str) -> LeaseRefusedError:
    by_holder: dict[str, int] = {}
    for h in usage.holders:
        by_holder[h.holder] = by_holder.get(h.holder, 0) + h.used
    largest = sorted(by_holder.items(), key=lambda item: (-item[1], item[0]))[:_LARGEST_HOLDERS]
    return LeaseRefusedError(
        str(usage.tier),
        requested=requested,
        available=usage.available,
        limit=MAX_SIZE if usage.limit is None else usage.limit,
        holder=holder,
        largest_holders=largest,
    )
