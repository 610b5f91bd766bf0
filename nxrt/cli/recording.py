"""What a run leaves for its memory report: the governor's books, and when each phase began.

Taken while the job runs; what is made of it is in `memory_timeline` and the pictures.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nxrt.memory.events import MAX_EVENTS, Event
from nxrt.memory.governor import MemoryGovernor, TierUsage


@dataclass
class Recording:
    """Hold what was seen of one run; a run that nobody wants a report of keeps no events.

    Args:
        title: what ran.
        history: how many events the governor should remember.
        phases: names and when each began, in seconds of the monotonic clock.
        events: what the governor remembered in the end.
        tiers: its books in the end.
        ended_s: when they were taken.
        failure: what ended the run, empty where nothing did.
    """

    title: str = ""
    history: int = 0
    phases: list[tuple[str, float]] = field(default_factory=list)
    events: tuple[Event, ...] = ()
    tiers: tuple[TierUsage, ...] = ()
    ended_s: float = 0.0
    failure: str = ""

    @classmethod
    def of(cls, title: str) -> "Recording":
        """Return a recording that keeps as many events as a governor remembers."""
        return cls(title, MAX_EVENTS)

    def begin(self, phase: str) -> None:
        """Say that a phase begins now, which ends the one before."""
        self.phases.append((phase, time.monotonic()))

    def forget_phase(self) -> None:
        """Take back that the last phase began; the one before goes on."""
        self.phases.pop()

    @contextmanager
    def watching(self, governor: MemoryGovernor) -> Iterator[None]:
        """Take the books when the block is left, also by an error."""
        try:
            yield
        finally:
            self.events = governor.events()
            self.tiers = governor.snapshot()
            self.ended_s = time.monotonic()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Say that closing begins when the block is left, also by an error."""
        try:
            yield
        finally:
            self.begin("close")
