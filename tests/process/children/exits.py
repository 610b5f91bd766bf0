"""End a process in one of many ways, with everything open.

Arguments: the cache folder and the way, one of `WAYS`.
"""

import atexit
import builtins
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.process.children import interrupts
from tests.process.children.world import Opened, use_stand_ins

KEPT: list[object] = []
"""What is to live until the module is taken down."""

BUSY_S = 0.1


class Cycle:
    """Refer to oneself, so that only the collector or the interpreter's end lets go."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.itself = self


class Finalized(Cycle):
    """Close everything when collected, as careless code does."""

    def __del__(self) -> None:
        self.opened.close()


def loop(opened: Opened, seconds: float) -> None:
    """Launch and replay until the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        opened.session.run(opened.binding)
        opened.graph.replay()
        opened.session.step(opened.binding)


def return_(opened: Opened) -> None:
    KEPT.append(opened)


def closed(opened: Opened) -> None:
    opened.close()


def forget(opened: Opened) -> None:
    """Let go of everything at the end of `main`."""


def cycle(opened: Opened) -> None:
    KEPT.append(Cycle(opened))
    Cycle(opened)


def finalizer(opened: Opened) -> None:
    KEPT.append(Finalized(opened))


def in_builtins(opened: Opened) -> None:
    builtins.opened = Cycle(opened)  # type: ignore[attr-defined]


def daemon(opened: Opened) -> None:
    KEPT.append(opened)
    threading.Thread(target=loop, args=(opened, 1e9), daemon=True).start()
    loop(opened, BUSY_S)


def two_daemons(opened: Opened) -> None:
    threading.Thread(target=loop, args=(opened, 1e9), daemon=True).start()
    daemon(opened)


def thread(opened: Opened) -> None:
    threading.Thread(target=loop, args=(opened, BUSY_S)).start()


def at_exit(opened: Opened) -> None:
    atexit.register(opened.use_all)


def at_exit_beside_daemon(opened: Opened) -> None:
    atexit.register(opened.use_all)
    daemon(opened)


def at_exit_close(opened: Opened) -> None:
    atexit.register(opened.close)
    thread(opened)


def use_and_exit(opened: Opened) -> None:
    opened.use_all()
    sys.exit(5)


def exit_in_thread(opened: Opened) -> None:
    ending = threading.Thread(target=use_and_exit, args=(opened,))
    ending.start()
    ending.join()


def exit_code(opened: Opened) -> None:
    KEPT.append(opened)
    sys.exit(7)


def hard_exit(opened: Opened) -> None:
    threading.Thread(target=loop, args=(opened, 1e9), daemon=True).start()
    loop(opened, BUSY_S)
    os._exit(3)


def exception(opened: Opened) -> None:
    KEPT.append(Cycle(opened))
    raise LookupError("on purpose")


def terminated(opened: Opened) -> None:
    print("ready", flush=True)
    loop(opened, 1e9)


def interrupted(opened: Opened) -> None:
    interrupts.use_for(signal.SIGINT)
    print("ready", flush=True)
    loop(opened, 1e9)


WAYS: dict[str, Callable[[Opened], None]] = {
    way.__name__: way
    for way in (
        *(return_, closed, forget, cycle, finalizer, in_builtins),
        *(daemon, two_daemons, thread, at_exit, at_exit_beside_daemon, at_exit_close),
        *(exit_in_thread, exit_code, hard_exit, exception, terminated, interrupted),
    )
}


if __name__ == "__main__":
    use_stand_ins()
    WAYS[sys.argv[2]](Opened(Path(sys.argv[1])))
