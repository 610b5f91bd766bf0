"""Wait for the threads that are inside a call, without a lock in the call.

A thread enters, then looks whether the object is closed; whoever closes sets that, then waits here.
One of the two sees the other.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""How long closing waits; what is still in use after that is never given up."""


class Inside:
    """Mark threads that are inside a call; entering takes no lock and does not wait.

    Where `run` is too slow, append to `marks` and pop as it does. A with-block would not do: an
    interrupt between its entry and its body would leave the mark for ever.
    """

    __slots__ = ("marks",)

    def __init__(self) -> None:
        self.marks: list[None] = []

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, marked as inside; raises what it raises."""
        try:
            self.marks.append(None)
            return function(*args)
        finally:
            self.marks.pop()

    def wait_until_empty(self) -> bool:
        """Wait until nobody is inside; say no, and log it, where that takes too long."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.marks:
            if time.monotonic() >= deadline:
                _log.error("a call did not return in %.0f s: what it uses stays", TIMEOUT_S)
                return False
            time.sleep(0)
        return True
