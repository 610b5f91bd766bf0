"""Check the books under threads, interrupts, finalisers and forks: they always add up.

NXRT_LONG_TESTS=1 runs the long forms.
"""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from nxrt.errors import InvalidInputError, LeaseCancelledError, LeaseRefusedError
from nxrt.memory.books import exclusive
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, PINNED, Tier, device_tier
from nxrt.memory.waiting import CancelToken
from tests.helpers.reserving import LONG_S, at_once, close_all, eager_switching, reserve, used

IS_LONG = os.environ.get("NXRT_LONG_TESTS") == "1"
NUM_THREADS = 32
LIMIT = 1000
TIERS = (HOST, PINNED, device_tier(0))


@pytest.fixture
def governor() -> Iterator[MemoryGovernor]:
    governor = MemoryGovernor(MemoryBudget.of(host=LIMIT, pinned=LIMIT, device=LIMIT))
    yield governor
    assert governor.outstanding() == ()
    assert [usage for usage in governor.snapshot() if usage.used or usage.holders] == []


def act_at_random(level: MemoryGovernor, choose: random.Random, num_steps: int) -> None:
    """Do everything a holder can do, and give all of it back."""
    with ExitStack() as held:
        leases: list[MemoryLease] = []
        for _ in range(num_steps):
            lease = choose.choice(leases) if leases else None
            try:
                match choose.randrange(7):
                    case 0 if lease is not None:
                        leases.remove(lease)
                        lease.close()
                    case 1 if lease is not None:
                        lease.grow(choose.randrange(50))
                    case 2 if lease is not None:
                        lease.shrink(lease.nbytes // 2)
                    case 3 if lease is not None:
                        leases.append(held.enter_context(lease.split(lease.nbytes // 3)))
                    case 4 if lease is not None:
                        lease.move(choose.choice(TIERS))
                    case 5:
                        raise ValueError("somebody else's failure")
                    case _:
                        holder, timeout_s = choose.choice("abc"), choose.choice((0, 0, 0.001))
                        lease = reserve(
                            level,
                            choose.randrange(120),
                            holder,
                            tier=choose.choice(TIERS),
                            request=choose.choice(("", "7")),
                            timeout_s=timeout_s,
                        )
                        leases.append(held.enter_context(lease))
            except (LeaseRefusedError, ValueError):
                close_all(*leases[: len(leases) // 2])
                leases = leases[len(leases) // 2 :]


def sample(governor: MemoryGovernor, peaks: dict[Tier, int]) -> None:
    snapshot = governor.snapshot()
    for usage in snapshot:
        assert 0 <= usage.used <= LIMIT
        assert usage.used == sum(usage.by_role().values()) == sum(usage.by_holder().values())
        below = [child.tier(usage.tier) for child in snapshot.children]
        assert usage.used == sum(found.used for found in below if found)
        peaks[usage.tier] = max(peaks.get(usage.tier, 0), usage.used)


def test_many_threads_at_two_levels_always_add_up(governor: MemoryGovernor) -> None:
    engines = [governor.child(f"engine {n}", MemoryBudget.of(host=600)) for n in range(4)]
    is_done = threading.Event()
    peaks: dict[Tier, int] = {}
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            while not is_done.is_set():
                sample(governor, peaks)
        except BaseException as error:  # noqa: BLE001  (raised below, where pytest sees it)
            failures.append(error)

    watcher = threading.Thread(target=watch)
    num_steps = 100_000 // NUM_THREADS if IS_LONG else 40
    with eager_switching():
        watcher.start()
        at_once(
            [
                lambda n=n: act_at_random(engines[n % 4], random.Random(n), num_steps)  # type: ignore[misc]
                for n in range(NUM_THREADS)
            ]
        )
        is_done.set()
        watcher.join()
    assert failures == []
    assert peaks
    for usage in governor.snapshot():
        assert (usage.used, usage.num_waiting, usage.holders) == (0, 0, ())
        assert peaks[usage.tier] <= usage.peak <= LIMIT
    for engine in engines:
        engine.close()


def test_waits_that_end_in_every_way_at_once_leave_nothing(governor: MemoryGovernor) -> None:
    token = CancelToken()
    outcomes: list[str] = []

    def wait(timeout_s: float, cancel: CancelToken | None) -> None:
        try:
            reserve(governor, 300, timeout_s=timeout_s, cancel=cancel).close()
        except LeaseRefusedError as error:
            outcomes.append(error.reason)
        except LeaseCancelledError:
            outcomes.append("cancelled")
        else:
            outcomes.append("granted")

    held = [reserve(governor, 200) for _ in range(5)]
    waits = [lambda: wait(LONG_S, None), lambda: wait(0.001, None), lambda: wait(LONG_S, token)] * 8
    ends = [lambda: close_all(*held), token.cancel]
    with eager_switching():
        at_once([*waits, *ends])
    assert len(outcomes) == 24
    assert outcomes.count("granted") >= 8


def inside(governor: MemoryGovernor, action: Callable[[], object]) -> None:
    """Run an action where a finaliser or a signal handler may run: while the books change."""
    ledger = governor._ledger
    exclusive(lambda _books: action())(ledger)


def test_a_lease_may_be_closed_in_the_middle_of_another_call(governor: MemoryGovernor) -> None:
    lease = reserve(governor, 100)
    inside(governor, lease.close)
    assert (lease.is_closed, lease.nbytes, used(governor)) == (True, 100, 0)


def test_what_is_no_close_is_refused_in_the_middle_of_another_call(
    governor: MemoryGovernor,
) -> None:
    for use in (lambda: reserve(governor, 1), governor.snapshot, lambda: used(governor)):
        with pytest.raises(InvalidInputError, match="finaliser or signal handler"):
            inside(governor, use)
    reserve(governor, 1).close()


def test_a_finaliser_may_close_a_lease(governor: MemoryGovernor) -> None:
    class Owner:
        """Be part of a cycle, which only the collector takes apart."""

        def __init__(self, lease: MemoryLease) -> None:
            self.itself = self
            weakref.finalize(self, lease.close)

    for _ in range(3000):
        Owner(reserve(governor, 1))
        if used(governor) > LIMIT - 10:
            break
    gc.collect()
    assert used(governor) == 0


INTERRUPTS = """
import random, signal, sys, warnings
from nxrt.errors import LeaseRefusedError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, PINNED, Role

warnings.simplefilter("ignore")
governor = MemoryGovernor(MemoryBudget.of(host=1000, pinned=500))
child = governor.child("child")
choose = random.Random(1)
leases = []
is_armed = False

def interrupt(*_):
    if is_armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)

def check():
    signal.setitimer(signal.ITIMER_REAL, 0)
    snapshot = governor.snapshot()
    for usage in snapshot:
        held = sum(lease.nbytes for lease in governor.outstanding() if lease.tier == usage.tier)
        assert usage.used == held == sum(usage.by_holder().values()), usage
        assert 0 <= usage.used <= usage.limit and usage.num_waiting == 0, usage

num_interrupts = 0
while num_interrupts < int(sys.argv[1]):
    try:
        signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-6, 4e-4))
        is_armed = True
        for _ in range(100):
            try:
                nbytes = choose.randrange(200)
                leases.append(child.reserve(HOST, nbytes, role=Role.GRAPH, holder="x"))
                leases[-1].grow(choose.randrange(50))
                leases.append(leases[-1].split(leases[-1].nbytes // 3))
                leases[-1].move(PINNED)
                leases[0].shrink(leases[0].nbytes // 2)
                governor.snapshot()
            except LeaseRefusedError:
                pass
            while len(leases) > choose.randrange(8):
                leases.pop(choose.randrange(len(leases))).close()
            if choose.random() < 0.1:
                try:
                    child.reserve(HOST, 900, role=Role.GRAPH, holder="w", timeout_s=1e-4).close()
                except LeaseRefusedError:
                    pass
        is_armed = False
    except KeyboardInterrupt:
        is_armed = False
        num_interrupts += 1
    check()
for lease in leases:
    lease.close()
governor.write_off_dropped()
assert governor.outstanding() == (), governor.outstanding()
assert [usage.used for usage in governor.snapshot()] == [0, 0]
child.close()
print("done")
"""


def test_the_books_add_up_after_interrupts_at_any_moment() -> None:
    num_interrupts = 500 if IS_LONG else 150
    command = [sys.executable, "-c", INTERRUPTS, str(num_interrupts)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


FORK = """
import os, random, sys, threading
from nxrt.errors import LeaseRefusedError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, Role

governor = MemoryGovernor(MemoryBudget.of(host=1000))
kept = governor.reserve(HOST, 100, role=Role.GRAPH, holder="kept")
is_done = threading.Event()

def hammer():
    while not is_done.is_set():
        try:
            governor.reserve(HOST, 500, role=Role.GRAPH, holder="h", timeout_s=0.001).close()
        except LeaseRefusedError:
            pass

threads = [threading.Thread(target=hammer) for _ in range(4)]
sys.setswitchinterval(1e-6)
for thread in threads:
    thread.start()
codes = []
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        # No thread lives on here; what they held at the fork is still on the books.
        usage = governor.usage(HOST)
        held = sum(lease.nbytes for lease in governor.outstanding())
        whole = usage.used == held == sum(usage.by_holder().values()) and not usage.num_waiting
        with governor.reserve(HOST, 0, role=Role.GRAPH, holder="child"):
            kept.close()
        os._exit(0 if whole and governor.usage(HOST).used == held - 100 else 1)
    codes.append(os.waitpid(pid, 0)[1])
is_done.set()
for thread in threads:
    thread.join()
assert governor.usage(HOST).used == 100
kept.close()
print(set(codes))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_finds_whole_books_and_no_lock_held() -> None:
    num_forks = 200 if IS_LONG else 25
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(num_forks)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "{0}"), done.stderr


def test_a_signal_handler_may_close_and_cancel(governor: MemoryGovernor) -> None:
    lease, token = reserve(governor, LIMIT), CancelToken()

    def handle(*_: object) -> None:
        lease.close()
        token.cancel()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        timer = threading.Timer(
            0.01, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        )
        timer.start()
        reserve(governor, LIMIT, timeout_s=LONG_S, cancel=token).close()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
