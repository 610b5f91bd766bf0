"""One count and its limit: of a tier, or of a role, holder or request inside it.

A meter is arithmetic; it is touched under the ledger's lock only, and decides nothing by itself.
"""

from nxrt.tensor import MAX_SIZE

UNREACHABLE = 2**64
"""Above every use: the limit of what is only attributed, and the threshold of what never fires."""

REARM_DIVISOR = 20
"""A watermark fires again once use has fallen 1/20 below it, so that it does not flutter."""


class Meter:
    """Count the bytes that share one limit.

    Args:
        level: the path of the governor whose limit it is.
        cap: what inside the tier, such as "role kv_cache"; empty for the tier itself.
        limit: the most in bytes, None for no limit.
        is_transient: it counts somebody who comes and goes; its peak is since it was last empty.
    """

    __slots__ = (
        "alert_at",
        "cap",
        "ceiling",
        "is_transient",
        "level",
        "limit",
        "most",
        "num_slots",
        "peak",
        "queued",
        "rearm_below",
        "used",
        "watermark",
    )

    def __init__(
        self, level: str, cap: str = "", limit: int | None = None, *, is_transient: bool = False
    ) -> None:
        self.level = level
        self.cap = cap
        self.is_transient = is_transient
        self.used = 0
        self.peak = 0
        self.queued = 0
        self.num_slots = 0
        self.set_watermark(None)
        self.set_limit(limit)

    def set_limit(self, limit: int | None) -> None:
        """Change the limit; what is in use stays in use."""
        self.limit = limit
        self.most = MAX_SIZE if limit is None else limit
        self.ceiling = self.most - self.queued

    def queue(self, nbytes: int) -> None:
        """Keep bytes for a waiting request, or with a negative number no longer."""
        self.queued += nbytes
        self.ceiling = self.most - self.queued

    def set_watermark(self, watermark: int | None) -> None:
        """Change the use from which an alert is due, and arm it."""
        self.watermark = watermark
        self.alert_at = UNREACHABLE if watermark is None else watermark
        self.rearm_below = 1 if self.is_transient else 0

    def alert(self) -> None:
        """Disarm the watermark until use has fallen clearly below it."""
        assert self.watermark is not None  # alert_at is unreachable without one
        self.alert_at = UNREACHABLE
        self.rearm_below = self.watermark - self.watermark // REARM_DIVISOR

    def fall(self) -> None:
        """Note that use fell below `rearm_below`."""
        if self.is_transient:
            self.peak = 0
        else:
            self.set_watermark(self.watermark)

    @property
    def oversubscribed(self) -> int:
        """Return the bytes in use above the limit."""
        return max(0, self.used - self.most)


class Attribution(Meter):
    """Count what somebody holds, without a limit of its own."""

    __slots__ = ()

    def __init__(self, level: str) -> None:
        super().__init__(level, is_transient=True)
        self.most = self.ceiling = UNREACHABLE
