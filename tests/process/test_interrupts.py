"""KeyboardInterrupt at any moment costs at most the objects in hand; everything goes on.

Python may raise it between a driver call and the name that its result is given, so that the object
made or released at that moment can be lost. It must never be released twice, the books must never
say less than what is taken, and no lock or recording may be left behind. The mark that a thread is
inside a call can be left too: closing then waits its time (30 s; the child shortens it), says so,
and loses that object.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.targets import MAX_REPEATS
from tests.process.launching import run_child

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

NUM_INTERRUPTS = min(70, MAX_REPEATS)
"""For each work."""

SEED = int(os.environ.get("NXRT_INTERRUPT_SEED", "1"))


WORKS = ("run", "step", "read_and_write", "capture", "bind", "session", "provider")
NBYTES = ("device_nbytes", "pinned_nbytes")


@pytest.mark.parametrize("work", WORKS)
def test_session_goes_on_after_interrupts(child_cache_dir: Path, work: str) -> None:
    ended = run_child("interrupted", child_cache_dir, work, NUM_INTERRUPTS, SEED)
    assert (ended.code, ended.err) == (0, "")
    report: dict[str, Any] = json.loads(ended.out)
    assert report["faults"] == []
    assert report["num_interrupts"] > NUM_INTERRUPTS // 2
    lost = report["lost"]
    assert min(lost.values(), default=0) >= 0, "more was released than made"
    assert report["charged"] >= sum(lost.get(kind, 0) for kind in NBYTES), report
    # A use of the device that is lost keeps its context: one, however many are lost.
    num_lost = sum(count for kind, count in lost.items() if kind not in (*NBYTES, "context"))
    assert num_lost <= report["num_interrupts"], report
