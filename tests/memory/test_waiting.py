"""Check waiting: first come, first served; whoever gives up leaves no trace."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nxrt.errors import InvalidInputError, LeaseCancelledError, LeaseRefusedError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, PINNED, Role
from nxrt.memory.waiting import CancelToken
from tests.helpers.reserving import LONG_S, Waiters, close_all, reserve, until, used

LIMIT = 1000


@pytest.fixture
def governor() -> Iterator[MemoryGovernor]:
    governor = MemoryGovernor(MemoryBudget.of(host=LIMIT))
    yield governor
    usage = governor.usage(HOST)
    assert (usage.used, usage.num_waiting, governor.outstanding()) == (0, 0, ())
    # Nothing is kept for anybody any more.
    reserve(governor, LIMIT).close()


def test_what_fits_does_not_wait(governor: MemoryGovernor) -> None:
    reserve(governor, LIMIT, timeout_s=LONG_S).close()


def test_a_request_waits_until_the_bytes_are_back(governor: MemoryGovernor) -> None:
    with Waiters(governor) as waiters:
        held = reserve(governor, LIMIT)
        waiting = waiters.add(300, "patient")
        held.shrink(299)
        assert not waiting.done()
        held.shrink(1)
        with waiting.result() as lease:
            assert (lease.nbytes, lease.holder, used(governor)) == (300, "patient", LIMIT)
        held.close()


def test_what_is_granted_is_charged_before_the_waiter_wakes(governor: MemoryGovernor) -> None:
    """The bytes are handed over: nobody can take them in between."""
    with Waiters(governor) as waiters:
        held = reserve(governor, LIMIT)
        waiting = waiters.add(LIMIT, "patient")
        held.close()
        assert used(governor) == LIMIT
        waiting.result().close()


def test_requests_are_served_in_the_order_in_which_they_came(governor: MemoryGovernor) -> None:
    with Waiters(governor) as waiters:
        held = [reserve(governor, 100) for _ in range(10)]
        futures = [waiters.add(100, str(n)) for n in range(10)]
        for n, lease in enumerate(held):
            lease.close()
            futures[n].result()
            assert governor.usage(HOST).num_waiting == 9 - n
        close_all(*[future.result() for future in futures])


def test_a_later_smaller_request_does_not_overtake(governor: MemoryGovernor) -> None:
    with Waiters(governor) as waiters:
        held = reserve(governor, 600)
        large = waiters.add(500, "large")
        small = waiters.add(100, "small")
        with pytest.raises(LeaseRefusedError) as caught:
            reserve(governor, 1, "impatient")
        assert (caught.value.reason, caught.value.available) == ("queue", 0)
        assert not large.done()
        assert not small.done()
        held.close()
        close_all(large.result(), small.result())


def test_growing_does_not_overtake_either(governor: MemoryGovernor) -> None:
    with Waiters(governor) as waiters, reserve(governor, 10) as growing:
        held = reserve(governor, 600)
        large = waiters.add(500, "large")
        with pytest.raises(LeaseRefusedError):
            growing.grow(1)
        held.close()
        large.result().close()


def test_a_steady_stream_of_small_requests_starves_nobody(governor: MemoryGovernor) -> None:
    stop = threading.Event()
    refusals: list[str] = []

    def stream() -> None:
        while not stop.is_set():
            try:
                reserve(governor, 300, "stream").close()
            except LeaseRefusedError as error:
                refusals.append(error.reason)

    with Waiters(governor) as waiters:
        threads = [threading.Thread(target=stream) for _ in range(3)]
        held = reserve(governor, 300)
        for thread in threads:
            thread.start()
        large = waiters.add(LIMIT, "large")
        held.close()
        with large.result(timeout=LONG_S):
            stop.set()
            for thread in threads:
                thread.join()


def test_who_waits_for_a_cap_of_its_own_delays_nobody(governor: MemoryGovernor) -> None:
    engine = governor.child("engine", MemoryBudget.of(host=100))
    with Waiters(governor) as waiters:
        held = reserve(engine, 100)
        waiting = waiters.add(100, "inside", governor=engine)
        reserve(governor, 800, "outside").close()
        with pytest.raises(LeaseRefusedError) as caught:
            reserve(governor, 801, "outside")  # the 100 that wait would not fit then
        assert caught.value.reason == "queue"
        held.close()
        waiting.result().close()
    engine.close()


def test_another_tier_has_a_line_of_its_own(governor: MemoryGovernor) -> None:
    with Waiters(governor) as waiters:
        held = reserve(governor, LIMIT)
        waiting = waiters.add(1, "host")
        reserve(governor, 5, tier=PINNED).close()
        held.close()
        waiting.result().close()


def test_moving_away_serves_who_waits(governor: MemoryGovernor) -> None:
    with Waiters(governor) as waiters:
        held = reserve(governor, LIMIT)
        waiting = waiters.add(LIMIT, "host")
        held.move(PINNED)
        close_all(held, waiting.result())


def test_waiting_in_vain_leaves_no_trace_but_a_count(governor: MemoryGovernor) -> None:
    with reserve(governor, 600):
        before = governor.usage(HOST)
        with pytest.raises(LeaseRefusedError, match="waited in vain") as caught:
            reserve(governor, 401, "patient", timeout_s=0.01)
        after = governor.usage(HOST)
    assert (caught.value.reason, caught.value.available) == ("timeout", 400)
    assert (after.used, after.peak, after.holders) == (before.used, before.peak, before.holders)
    assert (after.num_refused, after.num_timed_out, after.num_waiting) == (1, 1, 0)


def test_who_gives_up_lets_those_behind_pass(governor: MemoryGovernor) -> None:
    token = CancelToken()
    with Waiters(governor) as waiters, reserve(governor, 600):
        large = waiters.add(500, "large", cancel=token)
        small = waiters.add(100, "small")
        token.cancel()
        small.result().close()
        with pytest.raises(LeaseCancelledError, match=r"'large' for 500 B on host was cancelled"):
            large.result()
    assert governor.usage(HOST).num_cancelled == 1
    assert governor.usage(HOST).num_refused == 0


def test_a_token_that_was_cancelled_before_ends_the_wait_at_once(governor: MemoryGovernor) -> None:
    token = CancelToken()
    token.cancel()
    token.cancel()
    with reserve(governor, LIMIT), pytest.raises(LeaseCancelledError):
        reserve(governor, 1, timeout_s=LONG_S, cancel=token)


def test_a_token_does_not_matter_where_nothing_waits(governor: MemoryGovernor) -> None:
    token = CancelToken()
    token.cancel()
    reserve(governor, 1, timeout_s=LONG_S, cancel=token).close()


def test_one_token_ends_many_waits(governor: MemoryGovernor) -> None:
    token = CancelToken()
    with Waiters(governor) as waiters, reserve(governor, LIMIT):
        futures = [waiters.add(1, str(n), cancel=token) for n in range(8)]
        token.cancel()
        for future in futures:
            with pytest.raises(LeaseCancelledError):
                future.result()


def test_what_can_never_fit_is_refused_at_once(governor: MemoryGovernor) -> None:
    with pytest.raises(LeaseRefusedError) as caught:
        reserve(governor, LIMIT + 1, timeout_s=LONG_S)
    assert caught.value.reason == "limit"


def test_a_limit_lowered_below_a_waiting_request_ends_it(governor: MemoryGovernor) -> None:
    with Waiters(governor) as waiters, reserve(governor, 500):
        waiting = waiters.add(900, "large")
        behind = waiters.add(100, "small")
        governor.set_limit(HOST, 899)
        behind.result().close()
        with pytest.raises(LeaseRefusedError) as caught:
            waiting.result()
        assert (caught.value.reason, caught.value.limit) == ("limit", 899)
    governor.set_limit(HOST, LIMIT)


def test_a_raised_limit_serves_who_waits(governor: MemoryGovernor) -> None:
    with Waiters(governor) as waiters, reserve(governor, LIMIT):
        waiting = waiters.add(1, "patient")
        governor.set_limit(HOST, LIMIT + 1)
        waiting.result().close()
    governor.set_limit(HOST, LIMIT)


def test_an_interrupt_during_the_wait_leaves_no_trace(governor: MemoryGovernor) -> None:
    def interrupt() -> None:
        until(lambda: governor.usage(HOST).num_waiting == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with reserve(governor, LIMIT):
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            reserve(governor, 1, timeout_s=LONG_S)
        thread.join()
        usage = governor.usage(HOST)
        assert (usage.used, usage.num_waiting) == (LIMIT, 0)


@pytest.mark.parametrize("timeout_s", [-1, float("nan")], ids=repr)
def test_what_is_no_time_is_refused(governor: MemoryGovernor, timeout_s: Any) -> None:
    with reserve(governor, LIMIT), pytest.raises(InvalidInputError, match="timeout_s"):
        reserve(governor, 1, timeout_s=timeout_s)


def test_who_waits_is_counted_at_its_levels(governor: MemoryGovernor) -> None:
    engine = governor.child("engine")
    with reserve(governor, LIMIT), Waiters(governor) as waiters:
        token = CancelToken()
        futures = [
            waiters.add(1, "x", governor=level, cancel=token) for level in (governor, engine)
        ]
        assert [level.usage(HOST).num_waiting for level in (governor, engine)] == [2, 1]
        token.cancel()
        assert all(isinstance(future.exception(), LeaseCancelledError) for future in futures)
    engine.close()


def test_roles_and_requests_of_a_waiter_are_those_it_asked_for(governor: MemoryGovernor) -> None:
    with Waiters(governor) as waiters:
        held = reserve(governor, LIMIT)
        waiting = waiters.add(10, "cache", role=Role.KV_CACHE, request="7")
        held.close()
        with waiting.result() as lease:
            assert (lease.role, lease.request) == (Role.KV_CACHE, "7")
            assert governor.usage(HOST).by_request() == {"7": 10}
