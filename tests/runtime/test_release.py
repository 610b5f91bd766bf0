"""Releases: made once, when they may be, retried where refused, settled on a lost device."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nxrt import ClosedError, DriverError
from nxrt.runtime.recording import while_recording
from nxrt.runtime.release import ReleaseQueue

REFUSED = DriverError(code=1, name="REFUSED", call="cuMemFree", explanation="")


class FakeDevice:
    """Make calls, or fail as a test says."""

    def __init__(self) -> None:
        self.is_lost = False
        self.failures: list[BaseException] = []

    def create(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.failures:
            raise self.failures.pop()
        return function(*args)


class FakeStream:
    """A stream whose fences are reached when a test says so, or when somebody waits."""

    def __init__(self, *, is_reached: bool = False) -> None:
        self.is_closed = False
        self.reached = is_reached
        self.may_wait = threading.Event()
        self.may_wait.set()
        self.num_fences = 0

    def fence(self) -> "FakeStream":
        self.num_fences += 1
        return self

    def is_reached(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.may_wait.wait()
        self.reached = True

    def close(self) -> None:
        self.num_fences -= 1


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def queue(device: FakeDevice) -> ReleaseQueue:
    return ReleaseQueue(device)


def freeing(log: list[str]) -> Callable[..., Any]:
    def cuMemFree(name: str) -> None:  # noqa: N802  (named as the driver's functions are)
        log.append(name)

    return cuMemFree


def submit(queue: ReleaseQueue, log: list[str], name: str, *streams: FakeStream) -> None:
    settle = lambda: log.append(f"settled {name}")  # noqa: E731
    queue.submit(freeing(log), name, after=streams, settle=settle)


def test_a_release_without_streams_is_made_at_once(queue: ReleaseQueue) -> None:
    log: list[str] = []
    submit(queue, log, "a")
    assert log == ["a", "settled a"]
    assert queue.num_pending == 0


def test_a_release_waits_for_its_streams_and_gives_their_fences_back(queue: ReleaseQueue) -> None:
    log: list[str] = []
    stream = FakeStream()
    submit(queue, log, "a", stream)
    assert queue.poll() == 0
    assert (log, queue.num_pending, stream.num_fences) == ([], 1, 1)
    stream.reached = True
    assert queue.poll() == 1
    assert (log, queue.num_pending, stream.num_fences) == (["a", "settled a"], 0, 0)


def test_draining_waits_and_says_how_many_are_back(queue: ReleaseQueue) -> None:
    log: list[str] = []
    for name in "ab":
        submit(queue, log, name, FakeStream())
    assert queue.drain() == 2
    assert queue.drain() == 0
    assert sorted(log) == ["a", "b", "settled a", "settled b"]


def test_draining_counts_what_another_thread_settles_meanwhile(queue: ReleaseQueue) -> None:
    """A reservation waits for memory that is about to be back, whoever gives it back."""
    log: list[str] = []
    stream = FakeStream()
    stream.may_wait.clear()
    submit(queue, log, "a", stream)
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(queue.drain)
        stream.reached = True
        assert queue.poll() == 1
        stream.may_wait.set()
        assert drained.result() == 1


def test_draining_goes_on_where_another_thread_has_given_a_fence_back(queue: ReleaseQueue) -> None:
    log: list[str] = []

    class GivenBack(FakeStream):
        def synchronize(self) -> None:
            self.reached = True
            raise ClosedError("event")

    submit(queue, log, "a", GivenBack())
    submit(queue, log, "b", FakeStream())
    assert queue.drain() == 2


def test_a_refused_release_is_tried_again(device: FakeDevice, queue: ReleaseQueue) -> None:
    log: list[str] = []
    device.failures = [REFUSED]
    submit(queue, log, "a")
    assert (log, queue.num_pending) == ([], 1)
    assert queue.poll() == 1
    assert log == ["a", "settled a"]


def test_a_release_that_is_always_refused_is_given_up_and_not_settled(
    device: FakeDevice, queue: ReleaseQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """What it pays for may still be taken."""
    log: list[str] = []
    device.failures = [REFUSED] * 100
    submit(queue, log, "a")
    for _ in range(20):
        queue.poll()
    assert (log, queue.num_pending) == ([], 0)
    assert "gave up releasing" in caplog.text


def test_a_lost_device_is_not_asked(device: FakeDevice, queue: ReleaseQueue) -> None:
    log: list[str] = []
    submit(queue, log, "a", FakeStream())
    device.is_lost = True
    submit(queue, log, "b", FakeStream())
    assert sorted(log) == ["settled a", "settled b"]


def test_a_recording_thread_releases_afterwards(queue: ReleaseQueue) -> None:
    log: list[str] = []

    def record() -> None:
        submit(queue, log, "a")
        assert queue.poll() == 0
        assert log == []

    while_recording(record)
    assert log == ["a", "settled a"]


def test_an_interrupt_never_makes_a_release_twice(device: FakeDevice, queue: ReleaseQueue) -> None:
    log: list[str] = []

    def interrupted(name: str) -> None:
        log.append(name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.submit(interrupted, "a")
    submit(queue, log, "b")
    queue.poll()
    assert log == ["a", "b", "settled b"]


def test_an_interrupt_before_the_call_keeps_the_release(
    device: FakeDevice, queue: ReleaseQueue
) -> None:
    log: list[str] = []
    device.failures = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        submit(queue, log, "a")
    assert queue.poll() == 1
    assert log == ["a", "settled a"]


def test_references_are_kept_until_the_streams_have_passed(queue: ReleaseQueue) -> None:
    class Owner:
        """Somebody's memory."""

    dropped: list[bool] = []
    owner, stream = Owner(), FakeStream()
    weakref.finalize(owner, dropped.append, True)
    queue.drop([owner], after=[stream])
    del owner
    assert dropped == []
    stream.reached = True
    queue.poll()
    assert dropped == [True]
    queue.drop([], after=[stream])
    assert queue.num_pending == 0


def test_many_threads_settle_each_release_once(queue: ReleaseQueue) -> None:
    log: list[str] = []

    def work(number: int) -> None:
        for index in range(50):
            submit(queue, log, f"{number}.{index}", FakeStream(is_reached=index % 2 == 0))
            queue.poll()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()
    queue.drain()
    assert len(log) == len(set(log)) == 8 * 50 * 2
