"""The laboratory that the tests of faults share; it says in the end how many were injected."""

from pathlib import Path

import pytest

from tests.helpers.fake_driver import FakeDriver
from tests.helpers.fault_sweep import TALLY, Laboratory, Traces


@pytest.fixture(scope="session")
def traces() -> Traces:
    """Return the calls of each scenario, found once."""
    return {}


@pytest.fixture
def laboratory(fake_driver: FakeDriver, cache_dir: Path, traces: Traces) -> Laboratory:
    return Laboratory(fake_driver, cache_dir, traces)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TALLY.injected:
        terminalreporter.write_line(str(TALLY))
