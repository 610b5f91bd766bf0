"""Releases held back on a thread that records, and only there."""

import logging
import threading

import pytest

from nxrt.errors import ClosedError
from nxrt.memory.allocator import HostAllocator, LeasedAllocator
from nxrt.memory.deferral import release, releases_deferred
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, Role


def test_outside_a_release_runs_at_once() -> None:
    done: list[int] = []
    release(lambda: done.append(1))
    assert done == [1]


def test_inside_releases_run_at_the_end_in_order() -> None:
    done: list[int] = []
    with releases_deferred():
        release(lambda: done.append(1))
        release(lambda: done.append(2))
        assert done == []
    assert done == [1, 2]


def test_an_error_in_the_block_does_not_lose_them() -> None:
    done: list[int] = []

    def fail_after_a_release() -> None:
        with releases_deferred():
            release(lambda: done.append(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_a_release()
    assert done == [1]


def test_nested_blocks_end_with_the_outermost() -> None:
    done: list[int] = []
    with releases_deferred():
        release(lambda: done.append(1))
        with releases_deferred():
            release(lambda: done.append(2))
        assert done == []
    assert done == [1, 2]


def test_other_threads_are_not_held_back() -> None:
    done: list[int] = []
    with releases_deferred():
        thread = threading.Thread(target=lambda: release(lambda: done.append(1)))
        thread.start()
        thread.join()
        assert done == [1]


def test_one_failing_release_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def fail() -> None:
        raise ClosedError("planted")

    with caplog.at_level(logging.ERROR), releases_deferred():
        release(fail)
        release(lambda: done.append(1))
    assert done == [1]
    assert "stays charged" in caplog.text


def test_a_buffer_stays_charged_until_it_is_really_freed() -> None:
    governor = MemoryGovernor()
    allocator = LeasedAllocator(HostAllocator(), governor)
    buffer = allocator.allocate(100, role=Role.WORKSPACE, holder="test")
    with releases_deferred():
        buffer.close()
        buffer.close()
        assert governor.usage(HOST).used == 100
        with pytest.raises(ClosedError):
            _ = buffer.pointer
    assert governor.usage(HOST).used == 0
