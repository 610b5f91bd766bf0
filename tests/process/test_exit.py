"""A process may end in any way with anything open: its own exit code, and nothing to say."""

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.launching import NUM_RUNS, Ended, run_often

pytestmark = [pytest.mark.gpu, pytest.mark.fake]


@dataclass(frozen=True)
class ExitCase:
    """Hold one way to end, the exit code that it asks for, and the last line it may write."""

    id: str
    code: int = 0
    last_line: str = ""
    when_ready: signal.Signals | None = None


CASES = (
    *map(ExitCase, ("return_", "closed", "forget", "cycle", "finalizer", "in_builtins")),
    *map(ExitCase, ("daemon", "two_daemons", "thread")),
    *map(ExitCase, ("at_exit", "at_exit_beside_daemon", "at_exit_close", "exit_in_thread")),
    ExitCase("exit_code", 7),
    ExitCase("hard_exit", 3),
    ExitCase("exception", 1, "LookupError: on purpose"),
    ExitCase("terminated", -signal.SIGTERM, when_ready=signal.SIGTERM),
    ExitCase("interrupted", -signal.SIGINT, "KeyboardInterrupt", when_ready=signal.SIGINT),
)


def ids(case: ExitCase) -> str:
    return case.id


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_process_ends_as_it_says_with_everything_open(
    child_cache_dir: Path, case: ExitCase
) -> None:
    for ended in run_often(NUM_RUNS, "exits", child_cache_dir, case.id, when_ready=case.when_ready):
        check(ended, case)


DEV_CASES = tuple(case for case in CASES if case.id in {"cycle", "finalizer", "two_daemons"})


@pytest.mark.parametrize("case", DEV_CASES, ids=ids)
def test_development_mode_says_only_what_was_not_closed(
    child_cache_dir: Path, case: ExitCase
) -> None:
    options = ["-X", "dev"]
    for ended in run_often(NUM_RUNS, "exits", child_cache_dir, case.id, options=options):
        assert ended.code == case.code, ended.err
        assert not [line for line in ended.err.splitlines() if not is_about_closing(line)]


def check(ended: Ended, case: ExitCase) -> None:
    assert ended.code == case.code, ended.err
    if not case.last_line:
        assert ended.err == ""
        return
    first, *_, last = ended.err.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", case.last_line), ended.err
    assert ended.err.count("Traceback") == 1


def is_about_closing(line: str) -> bool:
    """Say whether a line belongs to a ResourceWarning; indented ones quote its source."""
    return "ResourceWarning" in line or line.startswith("  ")
