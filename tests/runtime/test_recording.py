"""What a recording thread may not do is refused or held back; other threads go on."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from nxrt import CaptureError, ClosedError
from nxrt.runtime.recording import (
    is_recording,
    refuse_recording,
    refused,
    when_recorded,
    while_recording,
)


def test_outside_a_recording_actions_run_at_once_and_nothing_is_refused() -> None:
    ran: list[int] = []
    when_recorded(lambda: ran.append(1))
    refuse_recording("anything")
    assert ran == [1]
    assert not is_recording()


def test_actions_of_a_recording_run_at_its_end_in_order() -> None:
    ran: list[int] = []

    def record() -> bool:
        for number in range(3):
            when_recorded(lambda number=number: ran.append(number))  # type: ignore[misc]
        assert ran == []
        return is_recording()

    assert while_recording(record)
    assert ran == [0, 1, 2]
    assert not is_recording()


def test_what_would_break_a_recording_is_refused_with_its_name_and_remembered() -> None:
    def record() -> None:
        for action in ("a stream was synchronized", "memory was allocated"):
            with pytest.raises(CaptureError, match=f"{action} while"):
                refuse_recording(action)
        first = refused()
        assert first is not None
        assert "synchronized" in first.problem

    while_recording(record)
    while_recording(lambda: None)
    assert while_recording(refused) is None


def test_a_second_recording_of_one_thread_is_refused_and_the_first_goes_on() -> None:
    def record() -> bool:
        with pytest.raises(CaptureError, match="records a graph already"):
            while_recording(lambda: None)
        return is_recording()

    assert while_recording(record)


def test_other_threads_are_not_held_back() -> None:
    ran: list[bool] = []

    def record() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(when_recorded, lambda: ran.append(is_recording())).result()
        assert ran == [False]

    while_recording(record)


@pytest.mark.parametrize("error", [ClosedError("buffer"), OSError("not nxrt's own")], ids=repr)
def test_a_failing_action_is_logged_and_the_rest_still_runs(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    def fail() -> None:
        raise error

    def record() -> None:
        when_recorded(fail)
        when_recorded(lambda: ran.append(1))

    with caplog.at_level(logging.ERROR):
        while_recording(record)
    assert ran == [1]
    assert "held back by a recording failed" in caplog.text


def test_an_interrupt_is_raised_after_everything_has_run() -> None:
    ran: list[int] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    def record() -> None:
        when_recorded(interrupt)
        when_recorded(lambda: ran.append(1))

    with pytest.raises(KeyboardInterrupt):
        while_recording(record)
    assert ran == [1]
    assert not is_recording()


def test_actions_run_where_the_recording_fails() -> None:
    ran: list[int] = []

    def record() -> None:
        when_recorded(lambda: ran.append(1))
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        while_recording(record)
    assert ran == [1]
