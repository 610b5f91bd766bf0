"""Check watermarks: told once on the way up, again only after a clear fall, with no lock held."""

import logging
from typing import Any

import pytest

from nxrt.errors import BudgetError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, PINNED, Role
from nxrt.memory.watermark import WatermarkReached
from tests.helpers.reserving import Waiters, close_all, reserve, used

LIMIT = 1000


@pytest.fixture
def governor() -> MemoryGovernor:
    return MemoryGovernor(MemoryBudget.of(host={"limit": LIMIT, "watermark": "90%"}))


@pytest.fixture
def told(governor: MemoryGovernor) -> list[WatermarkReached]:
    reached: list[WatermarkReached] = []
    governor.register_watcher(HOST, reached.append, name="test")
    return reached


def test_nobody_is_told_below_the_watermark(
    governor: MemoryGovernor, told: list[WatermarkReached]
) -> None:
    reserve(governor, 899).close()
    assert told == []


def test_reaching_the_watermark_is_told_with_the_figures(
    governor: MemoryGovernor, told: list[WatermarkReached]
) -> None:
    with reserve(governor, 800), reserve(governor, 150):
        assert told == [WatermarkReached("process", HOST, 900, 950, LIMIT)]


def test_it_is_told_once_while_use_stays_near(
    governor: MemoryGovernor, told: list[WatermarkReached]
) -> None:
    with reserve(governor, 860):  # 860 is above 900 less a twentieth
        for _ in range(5):
            reserve(governor, 100).close()
    assert len(told) == 1


def test_it_is_told_again_after_a_clear_fall(
    governor: MemoryGovernor, told: list[WatermarkReached]
) -> None:
    with reserve(governor, 854):
        for _ in range(5):
            reserve(governor, 100).close()
    assert len(told) == 5


@pytest.mark.parametrize("how", ["grow", "move", "commit", "wait", "lower"])
def test_every_way_up_is_told(
    governor: MemoryGovernor, told: list[WatermarkReached], how: str
) -> None:
    held = reserve(governor, 850)
    other = reserve(governor, 100, tier=PINNED)
    if how == "grow":
        held.grow(50)
    elif how == "move":
        other.move(HOST)
    elif how == "commit":
        governor.record_committed(HOST, 500, role=Role.WEIGHTS, holder="w").close()
    elif how == "lower":
        governor.set_limit(HOST, 900)
    else:
        with Waiters(governor) as waiters:
            waiting = waiters.add(950, "patient")
            held.close()
            waiting.result().close()
    assert len(told) == 1
    close_all(held, other)


def test_a_watcher_may_use_the_governor(governor: MemoryGovernor) -> None:
    """It frees what it holds, as a cache would, and even asks for more."""
    cached = reserve(governor, 500, "cache")

    def make_room(_reached: WatermarkReached) -> None:
        cached.close()
        reserve(governor, 1).close()

    governor.register_watcher(HOST, make_room, name="cache")
    with reserve(governor, 450):
        assert used(governor) == 450


def test_a_watcher_that_raises_stops_nobody(
    governor: MemoryGovernor, caplog: pytest.LogCaptureFixture
) -> None:
    reached: list[Any] = []

    def fails(_reached: WatermarkReached) -> None:
        raise ValueError("broken")

    governor.register_watcher(HOST, fails, name="fails")
    governor.register_watcher(HOST, reached.append, name="works")
    with caplog.at_level(logging.INFO), reserve(governor, 950):
        assert len(reached) == 1
    levels = [(record.levelname, record.tier, record.used) for record in caplog.records]  # type: ignore[attr-defined]
    assert levels == [("INFO", "host", 950), ("WARNING", "host", 950)]


def test_a_closed_registration_is_told_nothing(
    governor: MemoryGovernor,
) -> None:
    reached: list[Any] = []
    with governor.register_watcher(HOST, reached.append, name="x"):
        pass
    reserve(governor, 950).close()
    assert reached == []


def test_each_level_has_a_watermark_of_its_own() -> None:
    governor = MemoryGovernor()
    engine = governor.child("engine", MemoryBudget.of(host={"watermark": 100}))
    reached: list[str] = []
    for level in (governor, engine):
        level.register_watcher(HOST, lambda event: reached.append(event.level), name="x")
    with reserve(governor, 500), reserve(engine, 100):
        assert reached == ["process/engine"]


def test_a_share_of_no_limit_is_an_error_that_says_so() -> None:
    governor = MemoryGovernor(MemoryBudget.of(host={"watermark": "90%"}))
    with pytest.raises(BudgetError, match="watermark of host: got 90% of a limit that is not set"):
        reserve(governor, 1)
    assert governor.snapshot() == ()
