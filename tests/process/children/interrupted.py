"""Interrupt calls of nxrt at random moments, and see what is left of the session.

Arguments: the cache folder, the work (one of `WORKS`), how many interrupts, and a seed. Writes one
JSON object: see `Report`. An interrupt between two calls of nxrt is put off until the next one, as
what this script itself would lose is not nxrt's.
"""

import dataclasses
import faulthandler
import gc
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Protocol, TypeVar

import nxrt
from nxrt.runtime.recording import is_recording
from tests.helpers.cases import OUTPUT
from tests.process.children import interrupts
from tests.process.children.world import Opened, case_of, same, use_stand_ins, write

LATEST_S = 0.004
WORKS_FOR_S = 0.15
PACKAGE = str(Path(nxrt.__file__).parent)


class Closable(Protocol):
    """Something that the work makes and closes."""

    def close(self) -> None:
        """Give it up; may be repeated."""


Made = TypeVar("Made", bound=Closable)

_kept: list[Closable] = []

_is_wanted = False
"""An interrupt that comes late, when the work is over, is dropped."""


@dataclass
class Report:
    """Say what was left.

    Args:
        num_interrupts: how many were raised.
        faults: what must not be: wrong results, a thread that counts as recording, other errors,
            a driver that is misused.
        charged: bytes that are still charged after everything was closed.
        lost: handles and blocks that live on then, by kind; only where the double counts them.
    """

    num_interrupts: int = 0
    faults: list[str] = field(default_factory=list)
    charged: int = 0
    lost: dict[str, int] = field(default_factory=dict)


def interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt where nxrt is at work, and come back later where it is not."""
    if not _is_wanted:
        return
    codes = [caller.f_code for caller in interrupts.callers(frame)]
    is_at_work = any(code.co_filename.startswith(PACKAGE) for code in codes)
    if is_at_work and not any(_swallows(code) for code in codes):
        interrupts.interrupt(signal_number, frame)
    else:
        interrupts.come_back()


def _swallows(code: CodeType) -> bool:
    """Say whether Python itself drops what is raised there, and only writes that it did."""
    return code.co_name == "__del__" or code.co_filename.endswith(("weakref.py", "_weakrefset.py"))


def run(opened: Opened) -> None:
    opened.session.run(opened.binding)


def step(opened: Opened) -> None:
    opened.session.step(opened.binding)


def read_and_write(opened: Opened) -> None:
    write(opened.binding, opened.case)
    opened.session.run(opened.binding)
    opened.binding.read(OUTPUT)


def capture(opened: Opened) -> None:
    graph = kept(opened.session.capture(opened.binding))
    graph.replay()
    graph.close()


def bind(opened: Opened) -> None:
    binding = kept(opened.session.bind())
    opened.session.step(binding)
    binding.close()


def session(opened: Opened) -> None:
    inner = kept(nxrt.Session(opened.case.graph, [opened.provider], opened.governor))
    inner.bind()
    inner.close()


def provider(opened: Opened) -> None:
    kept(nxrt.CudaProvider(cache_dir=opened.cache_dir)).close()


def kept(made: Made) -> Made:
    """Keep what was made until `close_kept`, as a with-block does."""
    _kept.append(made)
    return made


def close_kept() -> None:
    """Close what the interrupted work made; its own `close` may have been what was interrupted."""
    while _kept:
        _kept.pop().close()


WORKS = {
    work.__name__: work for work in (run, step, read_and_write, capture, bind, session, provider)
}


def interrupted(work: Callable[[Opened], None], opened: Opened, delay_s: float) -> bool:
    """Repeat some work until it is interrupted; say whether it was."""
    global _is_wanted
    deadline = time.monotonic() + WORKS_FOR_S
    _is_wanted = True
    try:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        while time.monotonic() < deadline:
            work(opened)
    except KeyboardInterrupt:
        return True
    finally:
        _is_wanted = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False


def check(opened: Opened, seed: int, report: Report) -> None:
    """Use the session with new inputs, and note what is wrong."""
    if is_recording():
        report.faults.append("this thread counts as recording")
    case = case_of(seed)
    write(opened.binding, case)
    for use in (opened.session.run, opened.session.step):
        write_blank(opened)
        use(opened.binding)
        if not same(opened.binding.read(OUTPUT), case):
            report.faults.append(f"{use.__name__} gives a wrong result")


def write_blank(opened: Opened) -> None:
    blank = opened.case.expected()
    blank[...] = -7
    opened.binding.write(OUTPUT, blank)


def main(cache_dir: Path, work: str, count: int, seed: int) -> Report:
    fake = use_stand_ins()
    signal.alarm(0)
    faulthandler.dump_traceback_later(40, exit=True)
    signal.signal(signal.SIGALRM, interrupt)
    moments = random.Random(seed)
    report = Report()
    nxrt.CudaProvider(cache_dir=cache_dir).close()
    before = None if fake is None else fake.snapshot()
    opened = Opened(cache_dir)
    for turn in range(count):
        delay_s = moments.uniform(1e-5, LATEST_S)
        try:
            report.num_interrupts += interrupted(WORKS[work], opened, delay_s)
            close_kept()
            check(opened, 1 + turn % 5, report)
        except Exception as error:  # noqa: BLE001  (reported)
            report.faults.append(f"{type(error).__name__}: {error}")
            break
    try:
        opened.close()
    except nxrt.NxrtError as error:
        report.faults.append(f"closing: {error}")
    gc.collect()
    report.charged = sum(tier.used for tier in opened.governor.snapshot())
    if fake is not None and before is not None:
        report.lost = fake.snapshot().difference(before)
        report.faults += fake.take_violations()
    return report


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(dataclasses.asdict(found)))
