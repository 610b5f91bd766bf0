"""Who waits for memory: one line for each tier, served first come, first served.

A waiting request's bytes are kept for it at each limit it must pass, so nobody who comes later,
however small, can take them; a later one passes only where it delays no earlier one. What is
granted is charged before the waiter wakes. Touched under the ledger's lock, but for the waiting.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nxrt.memory.account import Account, Shortage, Slot
from nxrt.memory.meter import Meter
from nxrt.memory.tier import Tier


class CancelToken:
    """End waits from another thread; a token that was cancelled ends every wait begun with it.

    `cancel` never blocks and may be called from a signal handler.
    """

    def __init__(self) -> None:
        self.is_cancelled = False
        self._claims: dict[Claim, None] = {}

    def cancel(self) -> None:
        """End all waits that hold this token; a second call does nothing."""
        self.is_cancelled = True
        for claim in tuple(self._claims):
            claim.wake()

    def attach(self, claim: "Claim") -> None:
        """Wake this claim too when the token is cancelled."""
        self._claims[claim] = None

    def detach(self, claim: "Claim") -> None:
        """Forget a claim."""
        self._claims.pop(claim, None)


class Claim:
    """Be one request that waits: until it is `granted` a record, or is void.

    Args:
        slot: where it will be charged.
        nbytes: how much.
    """

    def __init__(self, slot: Slot, nbytes: int) -> None:
        self.slot = slot
        self.nbytes = nbytes
        self.granted: int | None = None
        self.is_void = False
        # A bare lock: releasing it never blocks, so any thread and any handler may wake the waiter.
        self._gate = threading.Lock()
        self._gate.acquire()

    @property
    def is_settled(self) -> bool:
        """Say whether there is nothing to wait for any more."""
        return self.granted is not None or self.is_void

    def wake(self) -> None:
        """Let the waiter look again."""
        try:
            self._gate.release()
        except RuntimeError:  # it has been woken and has not looked yet
            return

    def wait(self, deadline: float, cancel: CancelToken | None) -> None:
        """Return when the claim is settled, the deadline has passed or the token is cancelled."""
        while not self.is_settled and not (cancel is not None and cancel.is_cancelled):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not self._gate.acquire(
                timeout=min(remaining, threading.TIMEOUT_MAX)
            ):
                return


@dataclass(frozen=True)
class Patience:
    """Say how a request waits.

    Args:
        deadline: of the monotonic clock.
        cancel: ends the wait from elsewhere, None where nobody can.
        settle: as `MemoryGovernor.reserve` takes it.
    """

    deadline: float
    cancel: CancelToken | None
    settle: Callable[[], object] | None

    @property
    def is_cancelled(self) -> bool:
        """Say whether the wait was ended from elsewhere."""
        return self.cancel is not None and self.cancel.is_cancelled

    @contextmanager
    def waking(self, claim: Claim) -> Iterator[None]:
        """Let the token wake a claim within the block."""
        try:
            if self.cancel is not None:
                self.cancel.attach(claim)
            yield
        finally:
            if self.cancel is not None:
                self.cancel.detach(claim)


class Line:
    """Keep the claims of every tier in order."""

    def __init__(self) -> None:
        self.queues: dict[Tier, dict[Claim, None]] = {}

    def join(self, claim: Claim) -> None:
        """Put a claim at the end of its tier's line."""
        self.queues.setdefault(claim.slot.key[0], {})[claim] = None
        for meter in claim.slot.limited:
            meter.queue(claim.nbytes)

    def leave(self, claim: Claim) -> bool:
        """Take a claim out of its line; say whether it was in it."""
        tier = claim.slot.key[0]
        queue = self.queues.get(tier, {})
        if claim not in queue:
            return False
        del queue[claim]
        if not queue:
            del self.queues[tier]
        for meter in claim.slot.limited:
            meter.queue(-claim.nbytes)
        return True

    def claims(self, tier: Tier | None = None) -> Iterator[Claim]:
        """Yield the claims of one tier, or of all, in order."""
        for queue in (self.queues if tier is None else {tier: self.queues.get(tier, {})}).values():
            yield from tuple(queue)

    def count(self, tier: Tier, account: Account) -> int:
        """Return how many claims wait for a tier at a level or below it."""
        return sum(account in claim.slot.account.levels for claim in self.claims(tier))

    def shortage(self, claim: Claim) -> Shortage | None:
        """Return what keeps a claim waiting: the first limit it cannot pass after those ahead."""
        ahead: dict[Meter, int] = {}
        for other in self.claims(claim.slot.key[0]):
            if other is claim:
                break
            _add(ahead, other)
        return _shortage(claim, ahead)

    def serve(self, tier: Tier, grant: Callable[[Claim], None]) -> None:
        """Grant what fits now, in order.

        Args:
            tier: whose line.
            grant: charges a claim that has left the line.
        """
        ahead: dict[Meter, int] = {}
        for claim in self.claims(tier):
            if _shortage(claim, ahead) is None:
                self.leave(claim)
                grant(claim)
                claim.wake()
                continue
            _add(ahead, claim)
            root = claim.slot.root
            if root.used + ahead[root] >= root.most:
                return  # whoever comes later passes the same limit


def _add(ahead: dict[Meter, int], claim: Claim) -> None:
    for meter in claim.slot.limited:
        ahead[meter] = ahead.get(meter, 0) + claim.nbytes


def _shortage(claim: Claim, ahead: dict[Meter, int]) -> Shortage | None:
    hopeless = claim.slot.hopeless(claim.nbytes)
    if hopeless is not None:
        return hopeless
    for meter in claim.slot.limited:
        lacking = meter.used + ahead.get(meter, 0) + claim.nbytes - meter.most
        if lacking > 0:
            return Shortage(meter, lacking, can_end=True)
    return None
