"""What happens to a request that does not fit: others are asked, then it is refused with reasons.

It decides and explains; what is charged is the business of `books` and `ledger`.
"""

import logging
import time
from collections.abc import Callable, Sequence

from nxrt.errors import LeaseRefusedError
from nxrt.memory.account import Account, Key, Shortage
from nxrt.memory.books import Books
from nxrt.memory.pressure import Answer, Attempt, Pressure
from nxrt.memory.registration import logger
from nxrt.memory.tier import Tier

Settle = Callable[[], object]
"""Waits for memory that was given back and is still in use; says whether that freed anything."""


class Admission:
    """Admit or refuse.

    Args:
        books: of the hierarchy.
        reclaim_timeout_s: no reclaimer is asked later than this after a request that does not wait.
    """

    def __init__(self, books: Books, reclaim_timeout_s: float) -> None:
        self.pressure = Pressure(self.used)
        self._books = books
        self._reclaim_timeout_s = reclaim_timeout_s

    def used(self, tier: Tier) -> int:
        """Return the bytes of a tier in use in the whole hierarchy."""
        return self._books.usage(self._books.root, tier).used

    def admit(
        self,
        attempt: Attempt,
        account: Account,
        key: Key,
        nbytes: int,
        settle: Settle | None = None,
    ) -> None:
        """Make an attempt succeed, asking whoever can help.

        Raises:
            LeaseRefusedError: nobody could.
        """
        shortage = attempt()
        answers: Sequence[Answer] = ()
        if shortage is not None:
            shortage, answers = self.relieve(attempt, shortage, key[0], settle=settle)
        if shortage is not None:
            raise self.refused(account, key, nbytes, shortage, answers)

    def relieve(
        self,
        attempt: Attempt,
        shortage: Shortage,
        tier: Tier,
        *,
        settle: Settle | None = None,
        deadline: float | None = None,
    ) -> tuple[Shortage | None, Sequence[Answer]]:
        """Ask until the attempt succeeds; returns as `Pressure.relieve`."""
        if shortage.is_queue or not shortage.can_end:
            return shortage, ()  # what others give back would not help
        if deadline is None:
            deadline = time.monotonic() + self._reclaim_timeout_s
        return self.pressure.relieve(attempt, shortage, tier, settle=settle, deadline=deadline)

    def refused(
        self,
        account: Account,
        key: Key,
        nbytes: int,
        shortage: Shortage,
        answers: Sequence[Answer] = (),
        reason: str = "",
    ) -> LeaseRefusedError:
        """Count and log a refusal, and return it."""
        reason = reason or ("queue" if shortage.is_queue else "limit")
        asked = [(answer.name, answer.outcome) for answer in answers]
        error = self._books.refuse(account, key, nbytes, shortage, reason, asked)
        if logger.isEnabledFor(logging.INFO):
            fields = {"level": error.level, "cap": error.cap, "tier": error.tier}
            fields |= {"role": key[1].value, "holder": key[2], "request": key[3], "reason": reason}
            logger.info("%s", error, extra=fields | {"nbytes": nbytes})
        return error
