"""Who is told when a tier's use reaches its soft watermark.

Watchers hear of it once on the way up, and again only after use has clearly fallen; they are called
outside every lock, by the thread whose request went past.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nxrt.memory.account import Account
from nxrt.memory.registration import Registration, logger
from nxrt.memory.tier import Tier


@dataclass(frozen=True, slots=True)
class WatermarkReached:
    """Tell a watcher that a tier's use reached its watermark from below.

    Args:
        level: the governor's path.
        tier: which tier.
        watermark: the use from which watchers are told, in bytes.
        used: the use at that moment.
        limit: the tier's limit, None for none.
    """

    level: str
    tier: Tier
    watermark: int
    used: int
    limit: int | None


class Watchers:
    """Hold those who are told when a watermark is reached."""

    def __init__(self) -> None:
        self._registry: dict[Registration, None] = {}

    def register(
        self,
        account: Account,
        tier: Tier,
        callback: Callable[[WatermarkReached], object],
        *,
        name: str,
    ) -> Registration:
        """Add a watcher of a level's tier."""
        registration = Registration(self._registry, account, tier, callback, name)
        self._registry[registration] = None
        return registration

    def tell(self, reached: WatermarkReached) -> None:
        """Call everybody who watches; a failure is logged and stops nobody."""
        fields = {"level": reached.level, "tier": str(reached.tier), "used": reached.used}
        fields |= {"watermark": reached.watermark}
        logger.info("memory watermark reached on %s", reached.tier, extra=fields)
        for watcher in self._watching(reached):
            callback = watcher.callback
            try:
                if callback is not None:
                    callback(reached)
            except Exception:  # noqa: BLE001  (somebody else's code; the others are told)
                logger.warning("watcher %r failed", watcher.name, exc_info=True, extra=fields)

    def _watching(self, reached: WatermarkReached) -> Iterator[Registration]:
        for watcher in tuple(self._registry):
            if (watcher.account.path, watcher.tier) == (reached.level, reached.tier):
                yield watcher
