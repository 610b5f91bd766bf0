"""One level of the hierarchy and its books: which meters a reservation must pass, and move.

A slot binds one label (tier, role, holder, request) at one level to all of these meters, of this
level and of those above it, so that charging is a walk over a tuple. Touched under the lock only.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from nxrt.errors import ClosedError, InvalidInputError
from nxrt.memory.budget import MemoryBudget, TierBudget
from nxrt.memory.meter import Attribution, Meter
from nxrt.memory.tier import Role, Tier

MAX_IDLE_SLOTS = 256
"""Slots without a lease that a level keeps: who comes back often is found, not made again."""

Key = tuple[Tier, Role, str, str, bool]
"""(tier, role, holder, request, whether it is committed memory)."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Say why a request does not fit.

    Args:
        meter: whose limit refuses.
        nbytes: how many bytes are lacking; 0 where there are enough, but kept for who waits.
        can_end: the limit admits that much where nothing else is held.
    """

    meter: Meter
    nbytes: int
    can_end: bool

    @property
    def is_queue(self) -> bool:
        """Say whether only those who wait stand in the way."""
        return self.nbytes == 0


class TierBook:
    """Hold the counts of one tier at one level.

    Args:
        level: the level's path.
        tier: which tier.
        budget: the tier's limit and caps.
        capacity: of which a share is taken, None where nobody knows.

    Raises:
        BudgetError: a share of something that is not known.
    """

    def __init__(self, level: str, tier: Tier, budget: TierBudget, capacity: int | None) -> None:
        self.level = level
        self.tier = tier
        self.total = Meter(level)
        self.committed = Attribution(level)
        self.holders: dict[tuple[Role, str], Meter] = {}
        self.caps: dict[tuple[str, str], Meter] = {}
        self.num_refused = 0
        self.num_timed_out = 0
        self.num_cancelled = 0
        self.retune(budget, capacity)

    def retune(self, budget: TierBudget, capacity: int | None) -> None:
        """Take other limits; whoever calls rebuilds the slots. Raises BudgetError, unchanged."""
        limit = budget.limit(self.tier, capacity)
        watermark = budget.watermark_of(self.tier, limit)
        for axis in ("roles", "holders", "requests"):
            for name in getattr(budget, axis):
                budget.cap(self.tier, axis, name, limit)
        self.budget = budget
        self.total.set_limit(limit)
        if watermark != self.total.watermark:
            self.total.set_watermark(watermark)
        for (axis, name), meter in self.caps.items():
            meter.set_limit(self._cap(axis, name))

    def limit_of(self, axis: str, name: str | Role) -> int | None:
        """Return a cap's limit, or the tier's where no axis is given."""
        if not axis:
            return self.total.limit
        return self.budget.cap(self.tier, axis, name, self.total.limit)

    def _cap(self, axis: str, name: str) -> int | None:
        key = Role(name) if axis == "roles" else name
        return self.budget.cap(self.tier, axis, key, self.total.limit)

    def meters(self, key: Key) -> Iterator[Meter]:
        """Yield the meters of one label, limits first; makes those that are missing."""
        _, role, holder, request, is_committed = key
        yield self.total
        for axis, name in (("roles", role.value), ("holders", holder), ("requests", request)):
            # Requests are reported, so they are counted even where nothing caps them.
            if name and (self._cap(axis, name) is not None or axis == "requests"):
                yield self._capped(axis, name)
        if is_committed:
            yield self.committed
        if (role, holder) not in self.holders:
            self.holders[role, holder] = Attribution(self.level)
        yield self.holders[role, holder]

    def _capped(self, axis: str, name: str) -> Meter:
        if (axis, name) not in self.caps:
            cap = f"{axis.removesuffix('s')} {name}"
            limit = self._cap(axis, name)
            self.caps[axis, name] = Meter(self.level, cap, limit, is_transient=True)
        return self.caps[axis, name]

    def all_meters(self) -> Iterator[Meter]:
        """Yield every meter."""
        yield self.total
        yield self.committed
        yield from self.holders.values()
        yield from self.caps.values()

    def forget_unused(self, key: Key | None = None) -> None:
        """Drop the meters to which no slot leads, of one label or of all."""
        if key is None:
            self.holders = {name: m for name, m in self.holders.items() if m.num_slots}
            self.caps = {name: m for name, m in self.caps.items() if m.num_slots}
            return
        _, role, holder, request, _ = key
        if not self.holders[role, holder].num_slots:
            del self.holders[role, holder]
        for name in (("roles", role.value), ("holders", holder), ("requests", request)):
            if name in self.caps and not self.caps[name].num_slots:
                del self.caps[name]


class Slot:
    """Bind one label at one level to the meters it moves; `num_users` leases and waits use it."""

    __slots__ = ("account", "key", "limited", "meters", "num_users", "root")

    def __init__(self, account: "Account", key: Key, meters: tuple[Meter, ...]) -> None:
        self.account = account
        self.key = key
        self.meters = meters
        self.limited = tuple(m for m in meters if not isinstance(m, Attribution))
        self.root = account.levels[-1].books[key[0]].total
        self.num_users = 0

    def shortage(self, nbytes: int) -> Shortage | None:
        """Return what refuses a newcomer of that size; nothing refuses 0 bytes.

        A limit that is reached is named before one that is only spoken for.
        """
        queued = self.hopeless(nbytes)
        if queued is not None:
            return queued
        for meter in self.limited:
            lacking = meter.used + nbytes - meter.ceiling
            if lacking <= 0 or not nbytes:
                continue
            if lacking > meter.queued:
                return Shortage(meter, lacking, can_end=True)
            queued = queued or Shortage(meter, 0, can_end=True)
        return queued

    def hopeless(self, nbytes: int) -> Shortage | None:
        """Return a limit that would refuse that size even if nothing else were held."""
        for meter in self.limited:
            if nbytes > meter.most:
                return Shortage(meter, meter.used + nbytes - meter.most, can_end=False)
        return None

    def post(self, nbytes: int, alert: Callable[[Meter, Tier], None] | None = None) -> None:
        """Add bytes to every meter; `alert` is told which of them reached its watermark."""
        for meter in self.meters:
            meter.used += nbytes
            meter.peak = max(meter.peak, meter.used)
            if meter.used >= meter.alert_at and alert is not None:
                alert(meter, self.key[0])

    def unpost(self, nbytes: int) -> None:
        """Take bytes off every meter."""
        for meter in self.meters:
            meter.used -= nbytes
            if meter.used < meter.rearm_below:
                meter.fall()

    def leave(self) -> None:
        """Note that a lease or a wait uses the slot no longer."""
        self.num_users -= 1
        if not self.num_users:
            self.account.retire(self)


class Account:
    """Hold the books of one level.

    Args:
        name: unique among its siblings.
        parent: the level above, None for the root.
        budget: the limits of this level.
        capacities: measured bytes by tier; of use at the root.
    """

    def __init__(
        self,
        name: str,
        parent: "Account | None",
        budget: MemoryBudget,
        capacities: Mapping[Tier, int],
    ) -> None:
        self.name = name
        self.parent = parent
        self.path: str = name if parent is None else f"{parent.path}/{name}"
        self.levels: tuple[Account, ...] = (self, *(parent.levels if parent else ()))
        self.budget = budget
        self.capacities = capacities
        self.children: dict[str, Account] = {}
        self.books: dict[Tier, TierBook] = {}
        self.slots: dict[Key, Slot] = {}
        self.idle: dict[Slot, None] = {}
        self.is_closed = False

    def new_book(self, tier: Tier) -> TierBook:
        """Return an empty book that is not kept. Raises BudgetError."""
        return TierBook(self.path, tier, self.budget.tier(tier.kind), self.capacity(tier))

    def capacity(self, tier: Tier) -> int | None:
        """Return what a share of this level's limit is taken of: the limit above, else measured."""
        if self.parent is None:
            return self.capacities.get(tier)
        book = self.parent.books.get(tier) or self.parent.new_book(tier)
        return self.parent.capacity(tier) if book.total.limit is None else book.total.limit

    def open_book(self, tier: Tier) -> TierBook:
        """Return the tier's book, made here and at every level above. Raises BudgetError."""
        missing = {level: level.new_book(tier) for level in self.levels if tier not in level.books}
        for level, book in missing.items():
            level.books[tier] = book
        return self.books[tier]

    def open_slot(self, key: Key) -> Slot:
        """Return the slot of a label, made where it is missing.

        Raises:
            InvalidInputError: what came is no label.
            ClosedError: the level has been closed.
            BudgetError: a share of something that is not known.
        """
        require_labels(key)
        if key in self.slots:
            return self.slots[key]
        self.require_open()
        self.open_book(key[0])
        books = [level.books[key[0]] for level in self.levels]
        slot = Slot(self, key, tuple(meter for book in books for meter in book.meters(key)))
        for meter in slot.meters:
            meter.num_slots += 1
        self.slots[key] = slot
        self.retire(slot)
        return slot

    def require_open(self) -> None:
        """Raise ClosedError if this level was closed."""
        if self.is_closed:
            raise ClosedError(f"governor {self.path!r}")

    def retire(self, slot: Slot) -> None:
        """Keep a slot that nobody uses for a while, instead of the one that is idle longest."""
        self.idle[slot] = None
        if len(self.idle) > MAX_IDLE_SLOTS:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        """Drop the slot that is idle longest."""
        self._drop(next(iter(self.idle)))

    def drop_idle(self) -> None:
        """Drop every slot that nobody uses."""
        for slot in tuple(self.idle):
            self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        del self.idle[slot]
        del self.slots[slot.key]
        for meter in slot.meters:
            meter.num_slots -= 1
        for level in self.levels:
            level.books[slot.key[0]].forget_unused(slot.key)

    def tree(self) -> Iterator["Account"]:
        """Yield this level and all below it."""
        yield self
        for child in self.children.values():
            yield from child.tree()

    def reset(self) -> None:
        """Set every count to 0 and drop every slot; peaks stay."""
        self.slots, self.idle = {}, {}
        for book in self.books.values():
            for meter in book.all_meters():
                meter.used = meter.num_slots = 0
                meter.queue(-meter.queued)


def require_labels(key: Key) -> None:
    """Raise InvalidInputError if a part of a key is of another type than it must be."""
    # A label of another type would sit in the books and break every later report.
    tier, role, holder, request, _ = key
    labels = {"tier": (tier, Tier), "role": (role, Role)}
    labels |= {"holder": (holder, str), "request": (request, str)}
    for name, (label, kind) in labels.items():
        if not isinstance(label, kind):
            raise InvalidInputError(name, found=repr(label), accepted=f"a {kind.__name__}")
