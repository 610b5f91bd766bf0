"""What the tests of the governor share: short calls, threads that start together, a clear end."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from nxrt.errors import DriverError
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, Role, Tier
from nxrt.storage import CPU_DEVICE

OUT_OF_MEMORY = DriverError(code=2, name="OUT", call="cuMemAlloc", explanation="no free block")

LONG_S = 60.0
"""Longer than any test takes: a wait that ends with it has failed."""


def reserve(
    governor: MemoryGovernor,
    nbytes: Any,
    holder: str = "test",
    *,
    tier: Tier = HOST,
    role: Role = Role.WORKSPACE,
    **others: Any,
) -> MemoryLease:
    return governor.reserve(tier, nbytes, role=role, holder=holder, **others)


def used(governor: MemoryGovernor, tier: Tier = HOST) -> int:
    return governor.usage(tier).used


def close_all(*leases: MemoryLease) -> None:
    for lease in leases:
        lease.close()


def at_once(actions: list[Callable[[], object]]) -> None:
    """Run each action on a thread of its own, all starting together; raise what any raised."""
    start = threading.Barrier(len(actions))

    def run(action: Callable[[], object]) -> None:
        start.wait()
        action()

    with ThreadPoolExecutor(len(actions)) as pool:
        for future in [pool.submit(run, action) for action in actions]:
            future.result()


@contextmanager
def eager_switching() -> Iterator[None]:
    """Let threads take turns as often as the interpreter can, so that races show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def until(is_so: Callable[[], bool]) -> None:
    """Return once something is so; it must become so by what other threads do."""
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline, "it never became so"
        threading.Event().wait(0.0005)


class Waiters:
    """Run requests that wait, each on a thread of its own, in a known order in line."""

    def __init__(self, governor: MemoryGovernor, tier: Tier = HOST) -> None:
        self._governor = governor
        self._tier = tier
        self._pool = ThreadPoolExecutor(16)

    def add(self, nbytes: int, holder: str, **others: Any) -> "Future[MemoryLease]":
        """Start a request and return once it is in line."""
        before = self._governor.usage(self._tier).num_waiting
        governor = others.pop("governor", self._governor)
        others = {"timeout_s": LONG_S} | others
        call = lambda: reserve(governor, nbytes, holder, tier=self._tier, **others)  # noqa: E731
        future = self._pool.submit(call)
        until(lambda: future.done() or self._governor.usage(self._tier).num_waiting > before)
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()


@dataclass
class Upstream:
    """Deliver numbers; `fail` says of each call whether it fails; `capacity` is what there is."""

    fail: Callable[[int], bool] = lambda _call: False
    capacity: int = 2**63
    tier: Tier = HOST
    device = CPU_DEVICE
    num_calls: int = 0
    used: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def allocate(self, nbytes: int) -> int:
        with self.lock:
            self.num_calls += 1
            if self.fail(self.num_calls) or self.used + nbytes > self.capacity:
                raise OUT_OF_MEMORY
            self.used += nbytes
            return 4096 * self.num_calls

    def deallocate(
        self,
        pointer: int,  # noqa: ARG002  (the protocol's)
        nbytes: int,
        settle: Callable[[], None],
        *,
        after: Sequence[object] = (),  # noqa: ARG002
    ) -> None:
        with self.lock:
            self.used -= nbytes
        settle()

    def reclaim(self) -> bool:
        return False

    def anchor(self, pointer: int) -> object:  # noqa: ARG002  (the protocol's)
        return None
