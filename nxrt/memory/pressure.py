"""Who is asked to give memory back.

The governor takes nothing away: it asks, in the order of priority, outside every lock, and believes
the books alone. What a callback answers, or that it fails, changes no count.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from nxrt.memory.account import Account, Shortage
from nxrt.memory.registration import Registration, logger
from nxrt.memory.tier import Tier

Reclaim = Callable[[int], object]
"""Is asked for at least so many bytes, from the thread that needs them; may block, may raise."""

Attempt = Callable[[], Shortage | None]
"""Tries again; None is success."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Report what one reclaimer did for one request.

    Args:
        name: the reclaimer's.
        released: bytes by which the use of the tier fell while it ran.
        problem: what it raised, empty where it did not.
    """

    name: str
    released: int
    problem: str = ""

    @property
    def outcome(self) -> str:
        """Return what came of it, in words."""
        return self.problem or f"released {self.released:,} B"


class Pressure:
    """Hold the reclaimers of one hierarchy and ask them.

    Args:
        used: returns the bytes of a tier in use in the whole hierarchy.
    """

    def __init__(self, used: Callable[[Tier], int]) -> None:
        self._used = used
        self._registry: dict[Registration, None] = {}
        self._serials = count()
        self._asking = threading.local()

    @property
    def is_asking(self) -> bool:
        """Say whether this thread is inside a reclaimer: its requests ask nobody and never wait."""
        return getattr(self._asking, "is_on", False)

    def register(
        self, account: Account, tier: Tier, reclaim: Reclaim, *, priority: int, name: str
    ) -> Registration:
        """Add a reclaimer of a level; smaller priorities are asked first, equal ones by age."""
        registration = _Reclaimer(self._registry, account, tier, reclaim, name)
        registration.order = (priority, next(self._serials))
        self._registry[registration] = None
        return registration

    def relieve(
        self,
        attempt: Attempt,
        shortage: Shortage,
        tier: Tier,
        *,
        settle: Callable[[], object] | None,
        deadline: float,
    ) -> tuple[Shortage | None, tuple[Answer, ...]]:
        """Ask until the attempt succeeds, everybody was asked once, or the time is over.

        Args:
            attempt: tries the request again.
            shortage: why it failed.
            tier: where the bytes are needed.
            settle: waits for memory that was given back and is still in use; asked first, and
                again after every reclaimer, which may have given back more of it.
            deadline: of the monotonic clock; nobody is asked after it.

        Returns:
            the last shortage, None on success; and what those who were asked did.
        """
        answers: list[Answer] = []
        missing: Shortage | None = shortage
        if settle is not None and settle():
            missing = attempt()
        asked: set[Registration] = set()
        if self.is_asking:
            return missing, ()
        while missing is not None and time.monotonic() < deadline:
            reclaimer = self._next(tier, missing.meter.level, asked)
            if reclaimer is None:
                break
            asked.add(reclaimer)
            answers.append(self._ask(reclaimer, tier, missing.nbytes))
            missing = attempt()
            if missing is not None and settle is not None and settle():
                missing = attempt()
        return missing, tuple(answers)

    def _next(self, tier: Tier, level: str, asked: set[Registration]) -> "_Reclaimer | None":
        """Return whom to ask next: somebody at the level that refuses, or below it."""
        candidates = [
            reclaimer
            for reclaimer in tuple(self._registry)
            if isinstance(reclaimer, _Reclaimer)
            and reclaimer.tier == tier
            and reclaimer not in asked
            and not reclaimer.account.is_closed
            and level in [above.path for above in reclaimer.account.levels]
        ]
        return min(candidates, key=lambda reclaimer: reclaimer.order, default=None)

    def _ask(self, reclaimer: "_Reclaimer", tier: Tier, nbytes: int) -> Answer:
        before = self._used(tier)
        problem = ""
        callback = reclaimer.callback
        self._asking.is_on = True
        try:
            if callback is not None:
                callback(nbytes)
        except Exception as error:  # noqa: BLE001  (somebody else's code; the next one is asked)
            problem = repr(error)
            fields = {"tier": str(tier), "reclaimer": reclaimer.name, "nbytes": nbytes}
            logger.warning("reclaimer %r failed", reclaimer.name, exc_info=True, extra=fields)
        finally:
            self._asking.is_on = False
        return Answer(reclaimer.name, max(0, before - self._used(tier)), problem)


class _Reclaimer(Registration):
    """Be the registration of a reclaimer, with its place in the order."""

    order: tuple[int, int]
