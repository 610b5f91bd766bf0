"""Check reclaimers: asked in order, once, with no lock held; and only the books are believed."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nxrt.errors import LeaseRefusedError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, PINNED, Role
from tests.helpers.reserving import LONG_S, Waiters, close_all, reserve, used

LIMIT = 1000


@pytest.fixture
def governor() -> Iterator[MemoryGovernor]:
    governor = MemoryGovernor(MemoryBudget.of(host=LIMIT, pinned=LIMIT))
    yield governor
    assert governor.outstanding() == ()


class Cache:
    """Hold leases that can be given back, and note what it was asked for."""

    def __init__(self, governor: MemoryGovernor, *sizes: int, name: str = "cache") -> None:
        self.name = name
        self.leases = [reserve(governor, size, name) for size in sizes]
        self.asked: list[int] = []

    def give_back(self, nbytes: int) -> int:
        """Close leases until so many bytes are free, and say twice as many are."""
        self.asked.append(nbytes)
        given = 0
        while self.leases and given < nbytes:
            lease = self.leases.pop()
            given += lease.nbytes
            lease.close()
        return 2 * given

    def close(self) -> None:
        close_all(*self.leases)


def register(
    governor: MemoryGovernor,
    reclaim: Callable[[int], object],
    name: str = "cache",
    priority: int = 0,
) -> None:
    governor.register_reclaimer(HOST, reclaim, priority=priority, name=name)


def test_a_request_that_fits_asks_nobody(governor: MemoryGovernor) -> None:
    cache = Cache(governor, 900)
    register(governor, cache.give_back)
    reserve(governor, 100).close()
    assert cache.asked == []
    cache.close()


def test_a_request_is_granted_what_a_reclaimer_gives_back(governor: MemoryGovernor) -> None:
    cache = Cache(governor, *[100] * 9)
    register(governor, cache.give_back)
    with reserve(governor, 350):
        assert cache.asked == [250]
        assert governor.usage(HOST).by_holder() == {"cache": 600, "test": 350}
    assert governor.usage(HOST).num_refused == 0
    cache.close()


def test_reclaimers_are_asked_by_priority_and_then_by_age(governor: MemoryGovernor) -> None:
    order: list[str] = []
    for name, priority in (("late", 5), ("first", -1), ("second", 0), ("third", 0)):
        register(governor, lambda _, name=name: order.append(name), name, priority)  # type: ignore[misc]
    with reserve(governor, LIMIT), pytest.raises(LeaseRefusedError) as caught:
        reserve(governor, 1)
    assert order == ["first", "second", "third", "late"]
    assert [name for name, _ in caught.value.asked] == order


def test_nobody_is_asked_further_once_the_request_fits(governor: MemoryGovernor) -> None:
    first, second = Cache(governor, 500, name="first"), Cache(governor, 500, name="second")
    register(governor, first.give_back, priority=1)
    register(governor, second.give_back, priority=2)
    reserve(governor, 200).close()
    assert (first.asked, second.asked) == ([200], [])
    second.close()


def test_the_next_one_is_asked_for_what_is_still_lacking(governor: MemoryGovernor) -> None:
    first, second = Cache(governor, 150, name="first"), Cache(governor, 850, name="second")
    register(governor, first.give_back, priority=1)
    register(governor, second.give_back, priority=2)
    reserve(governor, 400).close()
    assert (first.asked, second.asked) == ([400], [250])


def test_an_answer_that_is_a_lie_is_not_believed(governor: MemoryGovernor) -> None:
    register(governor, lambda _: 10**18)
    with reserve(governor, LIMIT):
        with pytest.raises(LeaseRefusedError) as caught:
            reserve(governor, 1)
        assert (used(governor), caught.value.available) == (LIMIT, 0)
    assert caught.value.asked == (("cache", "released 0 B"),)


def test_one_raises_one_frees_nothing_one_asks_again(
    governor: MemoryGovernor, caplog: pytest.LogCaptureFixture
) -> None:
    """The order is kept, the error is on record, nothing hangs, and there is one pass."""
    order: list[str] = []

    def fails(_nbytes: int) -> None:
        order.append("fails")
        raise ValueError("broken")

    def asks_again(_nbytes: int) -> None:
        order.append("asks again")
        for timeout_s in (0.0, LONG_S):
            with pytest.raises(LeaseRefusedError):
                reserve(governor, 1, "inside", timeout_s=timeout_s)
        with reserve(governor, 5, "inside", tier=PINNED):
            assert governor.snapshot()
        governor.relieve(HOST, 1)

    register(governor, fails, "fails")
    register(governor, lambda _: order.append("nothing"), "nothing")
    register(governor, asks_again, "asks again")
    with (
        caplog.at_level(logging.WARNING),
        reserve(governor, LIMIT),
        pytest.raises(LeaseRefusedError) as caught,
    ):
        reserve(governor, 1)
    assert order == ["fails", "nothing", "asks again"]
    assert caught.value.asked[0] == ("fails", "ValueError('broken')")
    (record,) = caplog.records
    assert (record.reclaimer, record.tier, record.nbytes) == ("fails", "host", 1)  # type: ignore[attr-defined]
    assert record.exc_info is not None
    assert used(governor) == 0


def test_a_reclaimer_after_one_that_raises_still_helps(governor: MemoryGovernor) -> None:
    def fails(_nbytes: int) -> None:
        raise ValueError("broken")

    cache = Cache(governor, LIMIT)
    register(governor, fails, priority=-1)
    register(governor, cache.give_back)
    reserve(governor, LIMIT).close()


def test_an_interrupt_of_a_reclaimer_passes_and_leaves_no_trace(governor: MemoryGovernor) -> None:
    def interrupt(_nbytes: int) -> None:
        raise KeyboardInterrupt

    registration = governor.register_reclaimer(HOST, interrupt, name="interrupt")
    with reserve(governor, LIMIT):
        for timeout_s in (0.0, LONG_S):
            with pytest.raises(KeyboardInterrupt):
                reserve(governor, 1, timeout_s=timeout_s)
        usage = governor.usage(HOST)
        assert (usage.used, usage.num_waiting) == (LIMIT, 0)
    registration.close()
    with reserve(governor, LIMIT), pytest.raises(LeaseRefusedError):
        reserve(governor, 1)


def test_a_reclaimer_that_takes_more_than_it_gives_helps_nobody(governor: MemoryGovernor) -> None:
    taken: list[MemoryLease] = []
    held = reserve(governor, 600)

    def swap(_nbytes: int) -> None:
        held.close()
        taken.append(reserve(governor, LIMIT, "swap"))

    register(governor, swap)
    with pytest.raises(LeaseRefusedError):
        reserve(governor, 500)
    assert used(governor) == LIMIT
    close_all(*taken)


def test_moving_to_another_tier_is_giving_back(governor: MemoryGovernor) -> None:
    held = reserve(governor, LIMIT)
    register(governor, lambda _: held.move(PINNED))
    with reserve(governor, LIMIT):
        assert (used(governor), used(governor, PINNED)) == (LIMIT, LIMIT)
    held.close()


def test_growing_and_moving_ask_too(governor: MemoryGovernor) -> None:
    cache = Cache(governor, 300, 300, 300)
    register(governor, cache.give_back)
    with reserve(governor, 100) as lease:
        lease.grow(200)
        lease.move(PINNED)
        with reserve(governor, 700):
            lease.move(HOST)
    assert cache.asked == [200, 300, 300]


def test_what_can_never_fit_disturbs_nobody(governor: MemoryGovernor) -> None:
    cache = Cache(governor, 500)
    register(governor, cache.give_back)
    with pytest.raises(LeaseRefusedError):
        reserve(governor, LIMIT + 1)
    assert cache.asked == []
    cache.close()


def test_who_stands_behind_others_in_line_disturbs_nobody(governor: MemoryGovernor) -> None:
    cache = Cache(governor, 100)
    with Waiters(governor) as waiters:
        held = reserve(governor, 500)
        waiting = waiters.add(600, "large")
        register(governor, cache.give_back)
        with pytest.raises(LeaseRefusedError, match="earlier requests wait"):
            reserve(governor, 1)
        assert cache.asked == []
        held.close()
        waiting.result().close()
    cache.close()


def test_what_is_given_back_for_a_request_in_line_is_its_own(governor: MemoryGovernor) -> None:
    """Nobody can take the bytes between the reclaimer and the request that asked."""
    held = reserve(governor, LIMIT)
    refusals: list[str] = []

    def give_back(_nbytes: int) -> None:
        held.close()
        with pytest.raises(LeaseRefusedError) as caught:
            reserve(governor, 1, "thief")
        refusals.append(caught.value.reason)

    register(governor, give_back)
    with reserve(governor, LIMIT, "patient", timeout_s=LONG_S) as lease:
        assert (lease.holder, used(governor), refusals) == ("patient", LIMIT, ["limit"])


def test_a_closed_registration_is_not_asked(governor: MemoryGovernor) -> None:
    cache = Cache(governor, LIMIT)
    with governor.register_reclaimer(HOST, cache.give_back, name="cache") as registration:
        registration.close()
    with pytest.raises(LeaseRefusedError) as caught:
        reserve(governor, 1)
    assert caught.value.asked == ()
    cache.close()


def test_a_method_leaves_with_its_object(governor: MemoryGovernor) -> None:
    cache = Cache(governor)
    register(governor, cache.give_back)
    del cache
    gc.collect()
    with reserve(governor, LIMIT), pytest.raises(LeaseRefusedError) as caught:
        reserve(governor, 1)
    assert caught.value.asked == ()


def test_only_those_who_can_help_at_the_refusing_level_are_asked(governor: MemoryGovernor) -> None:
    asked: list[str] = []
    levels = {name: governor.child(name, MemoryBudget.of(host=500)) for name in ("a", "b")}
    below = levels["a"].child("below")
    for name, level in {"process": governor, "below a": below, **levels}.items():
        level.register_reclaimer(HOST, lambda _, name=name: asked.append(name), name=name)  # type: ignore[misc]
    governor.register_reclaimer(PINNED, lambda _: asked.append("pinned"), name="pinned")
    with reserve(levels["a"], 500):
        with pytest.raises(LeaseRefusedError):
            reserve(levels["a"], 1)
        assert asked == ["below a", "a"]
        asked.clear()
        with reserve(governor, 500), pytest.raises(LeaseRefusedError):
            reserve(levels["b"], 1)
    assert asked == ["process", "below a", "a", "b"]
    for level in (below, *levels.values()):
        level.close()


def test_nobody_is_asked_after_the_time_is_over() -> None:
    governor = MemoryGovernor(MemoryBudget.of(host=LIMIT), reclaim_timeout_s=0.01)
    asked: list[str] = []

    def slow(_nbytes: int) -> None:
        asked.append("slow")
        threading.Event().wait(0.02)

    register(governor, slow)
    register(governor, lambda _: asked.append("late"), priority=1)
    with reserve(governor, LIMIT):
        started = time.monotonic()
        with pytest.raises(LeaseRefusedError):
            reserve(governor, 1)
        assert time.monotonic() - started < LONG_S
    assert asked == ["slow"]


def test_a_request_that_waits_asks_within_its_own_time(governor: MemoryGovernor) -> None:
    asked: list[str] = []

    def slow(_nbytes: int) -> None:
        asked.append("slow")
        threading.Event().wait(0.02)

    register(governor, slow)
    register(governor, lambda _: asked.append("late"), priority=1)
    with reserve(governor, LIMIT), pytest.raises(LeaseRefusedError, match="waited in vain"):
        reserve(governor, 1, timeout_s=0.01)
    assert asked == ["slow"]


def test_many_threads_may_ask_at_once(governor: MemoryGovernor) -> None:
    cache = Cache(governor, *[50] * 20)
    lock = threading.Lock()

    def give_back(nbytes: int) -> None:
        with lock:
            cache.give_back(nbytes)

    register(governor, give_back)
    with Waiters(governor) as waiters:
        futures = [waiters.add(50, str(n)) for n in range(16)]
        close_all(*[future.result() for future in futures])
    cache.close()
    assert used(governor) == 0


def test_relieving_asks_without_reserving(governor: MemoryGovernor) -> None:
    cache = Cache(governor, 300, 300, 300)
    register(governor, cache.give_back)
    assert governor.relieve(HOST, 400) == 600
    assert (cache.asked, used(governor)) == ([400], 300)
    assert governor.relieve(PINNED, 1) == 0
    assert governor.relieve(HOST, 0) == 0
    cache.close()


def test_what_is_still_in_use_is_waited_for_before_and_after_each_reclaimer(
    governor: MemoryGovernor,
) -> None:
    """Deferred frees come back only when somebody waits for them."""
    late = [reserve(governor, 100, "late")]
    cached = [reserve(governor, 300, name) for name in ("a", "b", "c")]
    calls: list[str] = []

    def settle() -> bool:
        calls.append("settle")
        close_all(*late)
        return bool(late)

    def evict(_nbytes: int) -> None:
        calls.append("evict")
        late.append(cached.pop())

    for n in range(3):
        register(governor, evict, str(n))
    reserve(governor, 100, settle=settle).close()
    assert calls == ["settle"]
    reserve(governor, 700, settle=settle).close()
    assert calls == ["settle", "settle", "evict", "settle", "evict", "settle"]
    close_all(*cached)


def test_weights_that_were_recorded_can_be_given_back_too(governor: MemoryGovernor) -> None:
    lease = governor.record_committed(HOST, LIMIT + 500, role=Role.WEIGHTS, holder="engine")
    register(governor, lease.shrink)
    with reserve(governor, 100):
        assert governor.usage(HOST).committed == 900
    lease.close()
