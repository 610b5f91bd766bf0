"""Run something on several threads at once, and see what each thread's contexts are."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nxrt.errors import DriverError
from nxrt.runtime import driver

JOIN_S = 60


def run_together(actions: list[Callable[[], None]]) -> None:
    """Start one fresh thread for each action, all at one moment; raise what the first one raised.

    Raises:
        AssertionError: a thread has not ended in time.
    """
    barrier = threading.Barrier(len(actions))
    errors: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        try:
            barrier.wait(JOIN_S)
            action()
        except BaseException as error:  # noqa: BLE001  (raised again below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def context_stack() -> list[int]:
    """Return this thread's stack of contexts, the current one last; it is as it was afterwards."""
    stack: list[Any] = []
    while True:
        try:
            stack.append(driver.call(driver.api.cuCtxPopCurrent))
        except DriverError:
            break
    for context in reversed(stack):
        driver.call(driver.api.cuCtxPushCurrent, context)
    return [int(context) for context in reversed(stack)]


@contextmanager
def foreign_context(ordinal: int = 0) -> Iterator[int]:
    """Make a context that is not nxrt's current on this thread; destroy it at the end."""
    device = driver.call(driver.api.cuDeviceGet, ordinal)
    # cuda.bindings 13 asks for parameters that may be None.
    context = driver.call(driver.api.cuCtxCreate, None, 0, device)
    try:
        yield int(context)
    finally:
        driver.call(driver.api.cuCtxDestroy, context)
