"""What happened to the books, most recent last: a ring that forgets the oldest, as JSON lines.

It is off until the governor is given a size for it. Notes are taken under the ledger's lock and
cost an append; everything else happens when they are written out.
"""

import json
import os
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from nxrt.errors import InvalidInputError
from nxrt.memory.account import Slot
from nxrt.memory.tier import Tier

MAX_EVENTS = 65_536


@dataclass(frozen=True, slots=True)
class Event:
    """Report one change of the books, or one refusal.

    Args:
        time_s: seconds of the monotonic clock.
        event: "reserve", "release", "grow", "shrink", "split", "move_in", "move_out", "commit",
            "wait", "refuse", "time_out", "cancel", "limit" or "watermark".
        level: the governor's path.
        tier: the tier's name.
        role: what for; empty where an event has none, like the next two.
        holder: who.
        request: for which request.
        nbytes: how many bytes it was about; the limit in "limit", 2**63 - 1 for none.
        used: bytes of the tier in the whole process afterwards.
    """

    time_s: float
    event: str
    level: str
    tier: str
    role: str
    holder: str
    request: str
    nbytes: int
    used: int


class EventLog:
    """Keep the last events.

    Args:
        capacity: how many, from 1 to 65,536.
    """

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity <= MAX_EVENTS:
            accepted = f"0 for none, or up to {MAX_EVENTS:,}"
            raise InvalidInputError("history", found=repr(capacity), accepted=accepted)
        self._ring: deque[tuple[float, str, Slot | tuple[str, Tier], int, int]] = deque(
            maxlen=capacity
        )

    def note(self, event: str, slot: Slot, nbytes: int) -> None:
        """Take note of something that happened to a slot."""
        self._ring.append((time.monotonic(), event, slot, nbytes, slot.root.used))

    def note_tier(self, event: str, level: str, tier: Tier, nbytes: int, used: int) -> None:
        """Take note of something that happened to a tier as a whole."""
        self._ring.append((time.monotonic(), event, (level, tier), nbytes, used))

    def events(self) -> tuple[Event, ...]:
        """Return what is remembered, oldest first; the copy is of one moment."""
        found = []
        for when, event, where, nbytes, used in tuple(self._ring):
            if isinstance(where, Slot):
                tier, role, holder, request, _ = where.key
                labels = (where.account.path, str(tier), role.value, holder, request)
            else:
                labels = (where[0], str(where[1]), "", "", "")
            found.append(Event(when, event, *labels, nbytes, used))
        return tuple(found)


def write_json_lines(events: tuple[Event, ...], path: Path) -> None:
    """Write one JSON object a line; the file is whole or not there. Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(asdict(event))}\n" for event in events)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
