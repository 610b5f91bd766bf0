"""What the books say at one moment, as data that cannot change.

A snapshot is a tuple of its tiers, with the levels below it beside them.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, Self, TypeVar

from nxrt.memory.account import Account, TierBook
from nxrt.memory.lease import Record
from nxrt.memory.meter import Meter
from nxrt.memory.tier import Role, Tier
from nxrt.tensor import MAX_SIZE

KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class HolderUsage:
    """Report what one holder holds in one role: bytes now, and the most since it held none."""

    role: Role
    holder: str
    used: int
    peak: int


@dataclass(frozen=True)
class RequestUsage:
    """Report what one request holds: bytes now, and the most since it held none."""

    request: str
    used: int
    peak: int


@dataclass(frozen=True)
class CapUsage:
    """Report one cap inside a tier that somebody is under.

    Args:
        cap: "role kv_cache", "holder cache" or "request 7".
        limit: the most in bytes.
        used: bytes now.
        peak: the most since it was last empty.
    """

    cap: str
    limit: int
    used: int
    peak: int


@dataclass(frozen=True)
class TierUsage:
    """Report one tier of one level, with everything below that level.

    Args:
        tier: which tier.
        limit: the most in bytes, None for no limit.
        used: bytes now.
        peak: the most ever.
        num_refused: requests that were refused, those that timed out among them.
        holders: what each holder holds in each role, the largest first.
        committed: of `used`, what was recorded and not asked for.
        watermark: the use from which watchers are told, None for none.
        requests: what each named request holds, the largest first.
        caps: the caps that somebody is under, by name.
        num_waiting: requests that wait now.
        num_timed_out: requests that waited in vain.
        num_cancelled: waits that were cancelled.
    """

    tier: Tier
    limit: int | None
    used: int
    peak: int
    num_refused: int
    holders: tuple[HolderUsage, ...]
    committed: int = 0
    watermark: int | None = None
    requests: tuple[RequestUsage, ...] = ()
    caps: tuple[CapUsage, ...] = ()
    num_waiting: int = 0
    num_timed_out: int = 0
    num_cancelled: int = 0

    @property
    def available(self) -> int:
        """Return how many bytes would still be granted."""
        return max(0, (MAX_SIZE if self.limit is None else self.limit) - self.used)

    @property
    def oversubscribed(self) -> int:
        """Return the bytes in use above the limit."""
        return 0 if self.limit is None else max(0, self.used - self.limit)

    def by_role(self) -> dict[Role, int]:
        """Return the bytes of each role that holds any."""
        return _summed(self.holders, lambda h: h.role)

    def by_holder(self) -> dict[str, int]:
        """Return the bytes of each holder that holds any, over all roles."""
        return _summed(self.holders, lambda h: h.holder)

    def by_request(self) -> dict[str, int]:
        """Return the bytes of each named request that holds any."""
        return {request.request: request.used for request in self.requests}


def _summed(holders: Iterable[HolderUsage], key: Callable[[HolderUsage], KeyT]) -> dict[KeyT, int]:
    sums: dict[KeyT, int] = {}
    for holder in holders:
        sums[key(holder)] = sums.get(key(holder), 0) + holder.used
    return sums


class Snapshot(tuple[TierUsage, ...]):
    """Be the tiers of one level that were ever used, as of one moment.

    Args:
        tiers: what the tuple holds.
        level: the governor's path.
        children: the levels below, as of the same moment.
    """

    level: str
    children: tuple["Snapshot", ...]

    def __new__(
        cls, tiers: Iterable[TierUsage] = (), level: str = "", children: Iterable["Snapshot"] = ()
    ) -> Self:
        """Be a tuple with two more fields."""
        self = super().__new__(cls, tiers)
        self.__dict__.update(level=level, children=tuple(children))
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.level, self.children

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def tier(self, tier: Tier) -> TierUsage | None:
        """Return one tier's report, None where it was never used."""
        return next((usage for usage in self if usage.tier == tier), None)

    def child(self, name: str) -> "Snapshot":
        """Return the report of the level below of that name. Raises KeyError."""
        for child in self.children:
            if child.level == f"{self.level}/{name}":
                return child
        raise KeyError(name)


@dataclass(frozen=True)
class LimitChange:
    """Report a limit that was changed while memory was held; nobody lost any.

    Args:
        level: the governor's path.
        tier: which tier.
        cap: the cap inside the tier, empty for the tier's own limit.
        previous: the limit before, None for none.
        limit: the limit now.
        used: bytes in use under it.
        overage: what has to be given back before anything more is granted.
        largest_holders: (holder, bytes), the largest first: whom to ask.
    """

    level: str
    tier: Tier
    cap: str
    previous: int | None
    limit: int | None
    used: int
    overage: int
    largest_holders: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class OpenLease:
    """Report one live lease; `is_dropped` where nobody can close it any more."""

    serial: int
    level: str
    tier: Tier
    role: Role
    holder: str
    request: str
    nbytes: int
    is_committed: bool
    is_dropped: bool


def usage_of(book: TierBook, num_waiting: int) -> TierUsage:
    """Return what a book says now; called under the ledger's lock."""
    holders = [HolderUsage(*key, m.used, m.peak) for key, m in book.holders.items() if m.used]
    requests = [
        RequestUsage(name, m.used, m.peak)
        for (axis, name), m in book.caps.items()
        if axis == "requests" and m.used
    ]
    return TierUsage(
        book.tier,
        book.total.limit,
        book.total.used,
        book.total.peak,
        book.num_refused,
        tuple(sorted(holders, key=lambda h: (-h.used, h.role.value, h.holder))),
        book.committed.used,
        book.total.watermark,
        tuple(sorted(requests, key=lambda r: (-r.used, r.request))),
        tuple(_caps(book.caps.values())),
        num_waiting,
        book.num_timed_out,
        book.num_cancelled,
    )


def _caps(meters: Iterable[Meter]) -> Iterable[CapUsage]:
    for meter in sorted(meters, key=lambda m: m.cap):
        if meter.limit is not None and meter.used:
            yield CapUsage(meter.cap, meter.limit, meter.used, meter.peak)


def largest_holders(book: TierBook, cap: str, count: int) -> list[tuple[str, int]]:
    """Return (holder, bytes) of the largest holders under a tier's limit, or under a role's cap."""
    sums: dict[str, int] = {}
    for (role, holder), meter in book.holders.items():
        if meter.used and (not cap.startswith("role ") or cap == f"role {role.value}"):
            sums[holder] = sums.get(holder, 0) + meter.used
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:count]


def limit_change(book: TierBook, axis: str, name: str | Role, previous: int | None) -> LimitChange:
    """Return what a new limit means for those who hold memory; called under the ledger's lock."""
    value = name.value if isinstance(name, Role) else name
    cap = f"{axis.removesuffix('s')} {value}" if axis else ""
    limit = book.limit_of(axis, name)
    meter = book.caps.get((axis, value)) if axis else book.total
    used = 0 if meter is None else meter.used
    overage = 0 if limit is None else max(0, used - limit)
    holders = tuple(largest_holders(book, cap, len(book.holders)))
    return LimitChange(book.level, book.tier, cap, previous, limit, used, overage, holders)


def open_leases(
    records: Iterable[tuple[int, Record]], dropped: Container[int]
) -> tuple[OpenLease, ...]:
    """Return a report of each record, the largest first."""
    found = []
    for serial, (slot, nbytes) in records:
        tier, role, holder, request, is_committed = slot.key
        labels = (slot.account.path, tier, role, holder, request)
        found.append(OpenLease(serial, *labels, nbytes, is_committed, serial in dropped))
    return tuple(sorted(found, key=lambda lease: (-lease.nbytes, lease.holder)))


def snapshot_of(account: Account, num_waiting: Callable[[Tier, Account], int]) -> Snapshot:
    """Return what the books of a level and of those below say; called under the ledger's lock."""
    tiers = sorted(account.books, key=str)
    usages = [usage_of(account.books[tier], num_waiting(tier, account)) for tier in tiers]
    below = [snapshot_of(child, num_waiting) for child in account.children.values()]
    return Snapshot(usages, account.path, below)
