"""Check the ledger under threads, interrupts, finalisers and forks: never above the governor.

NXRT_LONG_TESTS=1 runs the long forms.
"""

import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from nxrt.errors import StateGroupOutOfMemoryError
from nxrt.memory.books import Books, exclusive
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.state_bytes import StateGroupBytes
from nxrt.memory.state_ledger import StateGroupCharge, StateGroupLedger
from nxrt.memory.tier import Role, device_tier
from tests.helpers.reserving import at_once, eager_switching, reserve, used

IS_LONG = os.environ.get("NXRT_LONG_TESTS") == "1"
NUM_THREADS = 32
SIZE = StateGroupBytes(compressed=70, carry=20, index=10)
DEVICE = device_tier(0)


@contextmanager
def sampled(ledger: StateGroupLedger, limit: int) -> Iterator[list[int]]:
    """Take snapshots all the while; none may show more than the governor charged."""
    is_done = threading.Event()
    seen: list[int] = []
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            while not is_done.is_set():
                taken = ledger.snapshot()
                usage = taken.governor.tier(DEVICE)
                charged = usage.by_role().get(Role.STATE_GROUP, 0) if usage else 0
                assert 0 <= taken.resident <= taken.charged == charged <= limit
                assert taken.resident == sum(taken.by_class().values())
                assert all(group.bytes.total <= group.charged for group in taken.groups)
                seen.append(taken.resident)
        except BaseException as error:  # noqa: BLE001  (raised below, where pytest sees it)
            failures.append(error)

    watcher = threading.Thread(target=watch)
    with eager_switching():
        watcher.start()
        try:
            yield seen
        finally:
            is_done.set()
            watcher.join()
    assert failures == []
    assert seen


@pytest.mark.parametrize("num_winners", [0, 1, 7, 31])
def test_exactly_as_many_win_as_fit(num_winners: int) -> None:
    limit = num_winners * SIZE.total + SIZE.total - 1
    governor = MemoryGovernor(MemoryBudget.of(device=limit))
    ledger = StateGroupLedger(governor)
    won: list[StateGroupCharge] = []
    refused: list[StateGroupOutOfMemoryError] = []

    def charge(request: int) -> None:
        try:
            won.append(ledger.try_charge((request, 0), SIZE))
        except StateGroupOutOfMemoryError as error:
            refused.append(error)

    with sampled(ledger, limit):
        at_once([lambda n=n: charge(n) for n in range(NUM_THREADS)])  # type: ignore[misc]
    assert (len(won), ledger.charge_failures) == (num_winners, NUM_THREADS - num_winners)
    assert all(error.requested > error.limit - error.resident for error in refused)
    assert len(refused) == NUM_THREADS - num_winners
    held = governor.usage(DEVICE).by_holder()
    assert ledger.resident == sum(held.values()) == num_winners * SIZE.total
    assert held.keys() == {f"{ledger.name}/{charge.key[0]}" for charge in won}
    with sampled(ledger, limit):
        closes: list[Callable[[], object]] = [one.close for one in won]
        at_once(closes * 2 or [ledger.snapshot])
    assert (ledger.resident, ledger.active_group_count, used(governor, DEVICE)) == (0, 0, 0)
    governor.close()


def close_all(charges: list[StateGroupCharge]) -> None:
    for charge in charges:
        charge.close()


def act_at_random(ledger: StateGroupLedger, shared: StateGroupCharge, seed: int) -> None:
    choose = random.Random(seed)
    size: Callable[[], StateGroupBytes] = lambda: StateGroupBytes(  # noqa: E731
        compressed=choose.randrange(60), scratch=choose.randrange(60)
    )
    held: list[StateGroupCharge] = []
    for _ in range(100_000 // NUM_THREADS if IS_LONG else 30):
        try:
            match choose.randrange(6):
                case 0 if held:
                    held.pop().close()
                case 1 if held:
                    held[-1].exchange(size())
                case 2:
                    shared.exchange(size())
                case 3:
                    with suppress(ValueError), ledger.reserve((seed % 5, 0), size()):
                        raise ValueError("in the middle of a step")
                case 4:
                    with ledger.reserve((seed % 5, 0), size()) as pending:
                        held.append(pending.commit())
                case _:
                    held.append(ledger.try_charge((seed % 5, 0), size()))
        except StateGroupOutOfMemoryError:
            close_all(held)
            held.clear()
    close_all(held)


def test_many_threads_never_attribute_more_than_is_charged() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device=1500))
    with governor.child("engine", MemoryBudget.of(device=1400)) as engine:
        ledger = StateGroupLedger(engine)
        shared = ledger.try_charge((9, 0), SIZE)
        with sampled(ledger, 1400):
            at_once(
                [lambda n=n: act_at_random(ledger, shared, n) for n in range(NUM_THREADS)]  # type: ignore[misc]
            )
        assert ledger.resident == shared.total == shared.lease_nbytes == used(governor, DEVICE)
        shared.close()
        assert (ledger.resident, ledger.snapshot().charged, used(governor, DEVICE)) == (0, 0, 0)
        assert ledger.peak <= 1400


def test_a_finaliser_may_close_a_charge_in_the_middle_of_a_call_of_the_governor() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device=1000))
    ledger = StateGroupLedger(governor)

    class Owner:
        """Be part of a cycle, which only the collector takes apart."""

        def __init__(self, charge: StateGroupCharge) -> None:
            self.itself = self
            weakref.finalize(self, charge.close)

    for _ in range(3):
        Owner(ledger.try_charge((0, 0), SIZE))
    exclusive(lambda _books: gc.collect())(governor._ledger)
    assert (ledger.resident, used(governor, DEVICE)) == (0, 0)
    Owner(ledger.try_charge((0, 0), SIZE))
    ledger._books._exclusively(gc.collect)
    assert (ledger.resident, used(governor, DEVICE)) == (0, 0)


def test_no_finaliser_waits_for_who_waits_for_the_governor() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device=1000))
    ledger = StateGroupLedger(governor)
    charge = ledger.try_charge((0, 0), SIZE)
    shrunk = ledger.try_charge((1, 0), SIZE)
    users = (ledger.snapshot, lambda: shrunk.exchange(StateGroupBytes()), charge.close)
    threads = [threading.Thread(target=user, daemon=True) for user in users]

    def finalise(_books: Books) -> None:
        for thread in threads:
            thread.start()
        threading.Event().wait(0.02)  # long enough for them to stand before the governor
        charge.close()

    exclusive(finalise)(governor._ledger)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    shrunk.close()
    assert used(governor, DEVICE) == 0


INTERRUPTS = """
import random, signal, sys, warnings
from nxrt.errors import StateGroupOutOfMemoryError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.state_bytes import StateGroupBytes
from nxrt.memory.state_ledger import StateGroupLedger
from nxrt.memory.tier import device_tier

warnings.simplefilter("ignore")
governor = MemoryGovernor(MemoryBudget.of(device=1000))
ledger = StateGroupLedger(governor)
choose = random.Random(1)
charges = []
is_armed = False

def interrupt(*_):
    if is_armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)

def check():
    signal.setitimer(signal.ITIMER_REAL, 0)
    taken = ledger.snapshot()
    assert taken.resident == sum(taken.by_class().values()) <= taken.charged <= 1000, taken
    assert all(charge.lease_nbytes >= charge.total for charge in charges if not charge.is_closed)

num_interrupts = 0
while num_interrupts < int(sys.argv[1]):
    try:
        signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-6, 4e-4))
        is_armed = True
        for _ in range(100):
            try:
                key = choose.randrange(3), 0
                size = StateGroupBytes(index=choose.randrange(200))
                charges.append(ledger.try_charge(key, size))
                charges[-1].exchange(StateGroupBytes(carry=choose.randrange(200)))
                with ledger.reserve(key, size):
                    ledger.snapshot()
            except StateGroupOutOfMemoryError:
                pass
            while len(charges) > choose.randrange(8):
                charges.pop(choose.randrange(len(charges))).close()
        is_armed = False
    except KeyboardInterrupt:
        is_armed = False
        num_interrupts += 1
    check()
for charge in charges:
    charge.close()
charges.clear()
ledger.close()
ledger.write_off_dropped()
assert ledger.resident == 0
governor.write_off_dropped()
assert governor.outstanding() == (), governor.outstanding()
print("done")
"""

FORK = """
import os, sys, threading
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.state_bytes import StateGroupBytes
from nxrt.memory.state_ledger import StateGroupLedger
from nxrt.memory.tier import device_tier

governor = MemoryGovernor(MemoryBudget.of(device=10_000))
ledger = StateGroupLedger(governor)
kept = ledger.try_charge((0, 0), StateGroupBytes(index=100))
is_done = threading.Event()

def hammer():
    while not is_done.is_set():
        with ledger.try_charge((1, 0), StateGroupBytes(index=50)) as charge:
            charge.exchange(StateGroupBytes(index=90))
            charge.exchange(StateGroupBytes(carry=10))
            ledger.snapshot()

threads = [threading.Thread(target=hammer) for _ in range(4)]
sys.setswitchinterval(1e-6)
for thread in threads:
    thread.start()
codes = []
for _ in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        # No thread lives on here; what they held at the fork is still on the books.
        taken = ledger.snapshot()
        whole = taken.resident == sum(taken.by_class().values()) <= taken.charged
        with ledger.try_charge((2, 0), StateGroupBytes(index=7)):
            kept.exchange(StateGroupBytes(index=200))
            kept.close()
        os._exit(0 if whole and ledger.resident == taken.resident - 100 else 1)
    codes.append(os.waitpid(pid, 0)[1])
is_done.set()
for thread in threads:
    thread.join()
assert ledger.resident == governor.usage(device_tier(0)).used == 100
kept.close()
print(set(codes))
"""


@pytest.mark.parametrize(
    ("script", "count", "expected"),
    [(INTERRUPTS, 500 if IS_LONG else 100, "done"), (FORK, 200 if IS_LONG else 25, "{0}")],
    ids=["interrupts", "forks"],
)
def test_the_books_are_whole_after(script: str, count: int, expected: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", script, str(count)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_what_others_hold_is_seen_by_the_ledger_only_as_used() -> None:
    governor = MemoryGovernor(MemoryBudget.of(device=1000))
    ledger = StateGroupLedger(governor)
    with reserve(governor, 300, tier=DEVICE):
        assert (ledger.device_used(0), ledger.resident, ledger.snapshot().charged) == (300, 0, 0)
