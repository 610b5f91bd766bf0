"""Make every driver call of every scenario fail, one at a time: nothing leaks, the next run works.

`NXRT_FAULT_DENSITY` says how many codes are tried at each call; all of them from 10 on.
"""

import os

import pytest

from tests.helpers.fault_scenarios import SCENARIOS, Scenario
from tests.helpers.fault_sweep import FAILING_CODES, LOSING_CODES, Laboratory

pytestmark = pytest.mark.fake

DENSITY = int(os.environ.get("NXRT_FAULT_DENSITY", "1"))

BURST = 3
"""Calls that fail in a row; nxrt tries a release more often than that."""

every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.id)


@every_scenario
def test_any_call_may_fail_once(laboratory: Laboratory, scenario: Scenario) -> None:
    faults = list(laboratory.faults(scenario, FAILING_CODES, DENSITY))
    assert len(faults) >= scenario.min_calls * DENSITY
    problems = [text for fault in faults for text in laboratory.fail_once(scenario, fault)]
    assert not problems, "\n".join(problems)


@every_scenario
def test_any_call_may_lose_the_device(laboratory: Laboratory, scenario: Scenario) -> None:
    faults = list(laboratory.faults(scenario, LOSING_CODES, DENSITY))
    assert len(faults) >= scenario.min_calls
    problems = [text for fault in faults for text in laboratory.lose(scenario, fault)]
    assert not problems, "\n".join(problems)


@every_scenario
def test_any_call_may_fail_with_the_calls_after_it(
    laboratory: Laboratory, scenario: Scenario
) -> None:
    """What gives back or undoes fails as well, for a while."""
    faults = laboratory.faults(scenario, FAILING_CODES, DENSITY, length=BURST)
    problems = [text for fault in faults for text in laboratory.fail_once(scenario, fault)]
    assert not problems, "\n".join(problems)
