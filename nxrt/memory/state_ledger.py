"""Who holds how much state of compressed sparse attention, by request, device and class.

It has no limit of its own and allocates nothing: the governor decides, and the ledger follows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import count
from operator import add
from typing import Self

from nxrt.errors import InvalidInputError, SizeOverflowError
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.snapshot import Snapshot
from nxrt.memory.state_books import StateBooks
from nxrt.memory.state_bytes import StateGroupBytes
from nxrt.memory.state_charge import Entry, GroupKey, PendingCharge, StateGroupCharge
from nxrt.memory.tier import Role, device_tier
from nxrt.storage import checked_int
from nxrt.tensor import MAX_SIZE

__all__ = [
    "GroupUsage",
    "PendingCharge",
    "StateGroupCharge",
    "StateGroupLedger",
    "StateLedgerSnapshot",
]

_numbers = count()


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Report one request's state on one device.

    Args:
        request: whose.
        device: the device's ordinal.
        bytes: attributed bytes by class, over all charges.
        num_charges: live charges, those of 0 bytes among them.
        charged: what the governor says it holds; more than attributed where some is reserved.
    """

    request: int
    device: int
    bytes: StateGroupBytes
    num_charges: int
    charged: int


@dataclass(frozen=True, slots=True)
class StateLedgerSnapshot:
    """Report a ledger and its governor as of one moment: `resident + reserved == charged`.

    Args:
        groups: what each (request, device) with a live charge holds, in that order.
        resident: attributed bytes.
        peak: the most ever.
        charge_failures: charges and exchanges that were refused.
        charged: what the governor says that this ledger holds.
        governor: everything else that it said at that moment.
    """

    groups: tuple[GroupUsage, ...]
    resident: int
    peak: int
    charge_failures: int
    charged: int
    governor: Snapshot

    @property
    def reserved(self) -> int:
        """Return the bytes that are granted and not attributed: pending, or just under way."""
        return self.charged - self.resident

    def by_class(self) -> dict[str, int]:
        """Return the attributed bytes by the name of their class."""
        return _by_class(group.bytes for group in self.groups)


class StateGroupLedger:
    """Charge state groups to a governor, and keep who holds what; safe to use from any thread.

    The governor is asked first, and a charge is taken off here before its lease is given back, so
    what the ledger shows never exceeds what is charged. After a fork a child counts its own copy.
    A context manager: leaving the block closes it.

    Args:
        governor: of any level; what it charges there it charges above too.
        name: for reports; a number that no other ledger of the process has is added to it. Holders
            at the governor are called by it and the request: "state ledger 0/7".
    """

    def __init__(self, governor: MemoryGovernor, *, name: str = "state ledger") -> None:
        self._books = StateBooks(governor, f"{name} {next(_numbers)}")
        self._request_ids = count()

    @property
    def name(self) -> str:
        """Return the name, with its number."""
        return self._books.name

    def try_charge(self, key: GroupKey, wanted: StateGroupBytes) -> StateGroupCharge:
        """Charge a state group, or change nothing but `charge_failures`.

        A key may be charged several times; its charges add up.

        Args:
            key: (request, device ordinal), each from 0.
            wanted: the bytes by class; all of them may be 0.

        Raises:
            StateGroupOutOfMemoryError: a limit would be passed; its cause says which.
            InvalidInputError, SizeOverflowError: an argument is not accepted.
            BudgetError: the tier's budget is a share of an unmeasured capacity.
            ClosedError: the ledger or its governor is closed.
        """
        with self.reserve(key, wanted) as pending:
            return pending.commit()

    def reserve(self, key: GroupKey, wanted: StateGroupBytes) -> PendingCharge:
        """Reserve bytes now, to be attributed by `commit` once what needs them is in place.

        Whatever ends the block before that, an exception too, leaves no trace:
        `with ledger.reserve(key, wanted) as pending: ...; charge = pending.commit()`.

        Args, Raises: as `try_charge`.
        """
        return self._books.reserve(_checked_key(key), wanted)

    @property
    def resident(self) -> int:
        """Return the attributed bytes of all live charges."""
        return self._books.resident

    @property
    def peak(self) -> int:
        """Return the most that was ever resident; it never falls."""
        return self._books.peak

    @property
    def charge_failures(self) -> int:
        """Return how many charges and exchanges were refused."""
        return self._books.num_failures

    @property
    def active_group_count(self) -> int:
        """Return how many (request, device) have a live charge, be it of 0 bytes."""
        return len({entry.key for entry in self._live()})

    def by_class(self) -> dict[str, int]:
        """Return the attributed bytes by the name of their class."""
        return _by_class(entry.bytes for entry in self._live())

    def resident_for(self, request: int, device: int) -> int:
        """Return the attributed bytes of one request on one device, 0 where it has none."""
        return sum(entry.total for entry in self._live() if entry.key == (request, device))

    def device_available(self, device: int) -> int:
        """Return what the governor's level would still grant of a device's memory."""
        return self._books.governor.usage(device_tier(device)).available

    def device_used(self, device: int) -> int:
        """Return what everybody together holds of a device's memory at the governor's level."""
        return self._books.governor.usage(device_tier(device)).used

    def next_request_id(self) -> int:
        """Return the next number of this ledger, from 0; none twice."""
        return next(self._request_ids)

    def snapshot(self) -> StateLedgerSnapshot:
        """Return what the ledger and the governor say at one moment."""
        figures, governor = self._books.agreed()
        charged = {
            (usage.tier, held.holder): held.used
            for usage in governor
            for held in usage.holders
            if held.role is Role.STATE_GROUP and held.holder.startswith(f"{self.name}/")
        }
        held: dict[GroupKey, list[StateGroupBytes]] = {}
        for entry in figures.live:
            held.setdefault(entry.key, []).append(entry.bytes)
        groups = tuple(
            GroupUsage(
                *key,
                bytes=reduce(add, sizes),  # one tier's: the governor counts them too
                num_charges=len(sizes),
                charged=charged.get((device_tier(key[1]), self._books.holder(key[0])), 0),
            )
            for key, sizes in sorted(held.items())
        )
        sums = (figures.resident, figures.peak, figures.num_failures, sum(charged.values()))
        return StateLedgerSnapshot(groups, *sums, governor)

    def write_off_dropped(self) -> int:
        """Give back what charges hold that were dropped without a close; return the bytes.

        Only whoever knows that the memory behind them is gone too should say so.
        """
        return self._books.release_dropped(is_committed=True)

    def close(self) -> None:
        """Take no more charges, and roll back the reservations that were dropped; cannot fail.

        Charges that are live stay so until they are closed themselves.
        """
        self._books.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _live(self) -> tuple[Entry, ...]:
        return self._books.figures().live


def _by_class(sizes: Iterable[StateGroupBytes]) -> dict[str, int]:
    # Plain integers: several devices together may hold more than one size can say.
    sums = StateGroupBytes().by_class()
    for size in sizes:
        for name, nbytes in size.by_class().items():
            sums[name] += nbytes
    return sums


def _checked_key(key: GroupKey) -> GroupKey:
    if not isinstance(key, tuple) or len(key) != 2:
        raise InvalidInputError("key", found=repr(key), accepted="(request, device ordinal)")
    return _checked_number("request", key[0]), _checked_number("device", key[1])


def _checked_number(subject: str, value: object) -> int:
    number = checked_int(subject, value)
    if not 0 <= number <= MAX_SIZE:
        error = InvalidInputError if number < 0 else SizeOverflowError
        raise error(subject, found=str(number), accepted=f"an integer from 0 to {MAX_SIZE}")
    return number
