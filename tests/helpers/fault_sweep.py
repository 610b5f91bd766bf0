"""Make one driver call of a scenario fail, and find everything that is wrong afterwards.

What a scenario does is in fault_scenarios. A problem is a sentence, not an exception, so that a
sweep goes on; whatever one fault left behind is cleared before the next.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import nxrt
from nxrt.errors import ClosedError, DeviceLostError, NxrtError
from nxrt.runtime import driver
from tests.helpers.created_objects import CreatedObjects
from tests.helpers.cuda_toys import ToyStandIns
from tests.helpers.fake_driver import FakeDriver, Snapshot
from tests.helpers.fault_scenarios import SCENARIOS, Scenario, Subject

FAILING_CODES = (1, 2, 3, 201, 222, 900, 901, 906, 999, 123456)
"""Of failures after which the context goes on."""

LOSING_CODES = (700, 719, 4)
DEINITIALIZED = 4

_CALL = re.compile(r"\bapi\.(cu[A-Z]\w*)")
_SURVIVORS = re.compile(r"cuInit|cuDriver|cuDevice|cuCtx(Push|Pop|Get|Set)")
"""What a lost context still answers."""


@cache
def entry_points() -> tuple[str, ...]:
    """Return the names of all driver functions that nxrt's sources mention, sorted."""
    (folder,) = nxrt.__path__
    texts = [path.read_text() for path in Path(folder).rglob("*.py")]
    return tuple(sorted({name for text in texts for name in _CALL.findall(text)}))


@dataclass
class Tally:
    """Count the faults of this test run, by the function that failed."""

    injected: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        names = set(entry_points())
        number, covered = self.injected.total(), len(names & set(self.injected))
        return f"{number} faults injected, in {covered} of {len(names)} driver functions"


TALLY = Tally()


@dataclass(frozen=True)
class Fault:
    """Name one call of a scenario, from 1, what it answers, and how many calls in a row do."""

    index: int
    call: str
    code: int
    length: int = 1

    def __str__(self) -> str:
        more = f" and {self.length - 1} more" if self.length > 1 else ""
        return f"call {self.index}, {self.call},{more} answers {self.code}"


Traces: TypeAlias = dict[str, tuple[str, ...]]
"""The calls of scenarios without faults, in order."""


class Laboratory:
    """Run scenarios with and without faults, on one double.

    Args:
        fake: the double's control.
        cache_dir: where the toys' code is kept.
        traces: filled with those of the scenarios that are used.
    """

    def __init__(self, fake: FakeDriver, cache_dir: Path, traces: Traces) -> None:
        ToyStandIns(fake).register()
        self.fake = fake
        self._cache_dir = cache_dir
        self._created = CreatedObjects()
        self._traces = traces

    def trace(self, scenario: Scenario) -> tuple[str, ...]:
        """Return the calls of a scenario without faults, in order."""
        if scenario.id not in self._traces:
            for _ in range(2):  # the first fills caches
                subject = self._subject(scenario)
                try:
                    self.fake.set_lazy(scenario.is_lazy)
                    with self.fake.traced() as names:
                        scenario.act(subject)
                    subject.require_working()
                finally:
                    subject.close()
                    self.fake.set_lazy(False)
            self._traces[scenario.id] = tuple(names)
        return self._traces[scenario.id]

    def faults(
        self, scenario: Scenario, codes: Sequence[int], density: int, length: int = 1
    ) -> Iterator[Fault]:
        """Yield `density` of the codes for every call, in turns, so that none is left out.

        Those of several calls in a row begin where the last ended.
        """
        for index, call in [*enumerate(self.trace(scenario), start=1)][::length]:
            for turn in range(min(density, len(codes))):
                code = codes[(index * density + turn) % len(codes)]
                yield Fault(index, call, code, length)

    def first_fault(self, call: str, code: int) -> tuple[Scenario, Fault]:
        """Return the first call of a function in the first scenario that has one.

        Raises:
            LookupError: no scenario calls it.
        """
        for scenario in SCENARIOS:
            trace = self.trace(scenario)
            if call in trace:
                return scenario, Fault(trace.index(call) + 1, call, code)
        raise LookupError(f"no scenario calls {call}; add it to one")

    def fail_once(self, scenario: Scenario, fault: Fault) -> list[str]:
        """Let one call fail and all later ones work; return what is wrong."""
        return self._experiment(scenario, fault, self._plant_once, _problems_after_one)

    def lose(self, scenario: Scenario, fault: Fault) -> list[str]:
        """Let one call fail and the context with it; return what is wrong."""
        return self._experiment(scenario, fault, self._plant_loss, _problems_after_loss)

    def _experiment(
        self,
        scenario: Scenario,
        fault: Fault,
        plant: Callable[[Fault, Sequence[str]], None],
        judge: Callable[[Subject, Fault], list[str]],
    ) -> list[str]:
        trace = self.trace(scenario)
        with self._created.watching(), _errors_logged() as logged:
            before, depth = self.fake.snapshot(), self.fake.stack_depth
            subject = self._subject(scenario)
            TALLY.injected[fault.call] += 1
            self.fake.set_lazy(scenario.is_lazy)
            plant(fault, trace)
            problems = self._act(scenario, subject, fault)
            problems += judge(subject, fault)
            self.fake.set_lazy(False)
            problems += [f"{tier.tier} still has {tier.used} B" for tier in _charged(subject)]
            if judge is _problems_after_one:
                problems += self._leaks(before, depth) + [f"logged: {text}" for text in logged]
            problems += [f"logged: {text}" for text in logged[1:]]
            problems += [f"misuse: {text}" for text in self.fake.violations]
            self._clear(before, depth)
        return [f"{scenario.id}: {fault}: {problem}" for problem in problems]

    def _leaks(self, before: Snapshot, depth: int) -> list[str]:
        left = self.fake.snapshot().difference(before)
        leaks = [f"left behind: {left}"] if left else []
        if self._created.num_contexts:
            leaks.append("the context was not released")
        if self.fake.stack_depth != depth:
            leaks.append(f"{self.fake.stack_depth - depth} contexts stay current")
        return leaks

    def _subject(self, scenario: Scenario) -> Subject:
        subject = Subject(self.fake, self._cache_dir)
        scenario.prepare(subject)
        return subject

    def _act(self, scenario: Scenario, subject: Subject, fault: Fault) -> list[str]:
        num_before = self.fake.calls()
        try:
            scenario.act(subject)
        except NxrtError as error:
            if not _names(error, fault) and not _is_an_answer(fault):
                return [f"neither {fault.call} nor the code is named: {_told(error)}"]
        except Exception as error:  # noqa: BLE001  (any other is what is looked for)
            return [f"{type(error).__name__} escaped: {_told(error)}"]
        has_struck = self.fake.calls() - num_before >= fault.index
        return [] if has_struck else ["the fault did not strike"]

    def _plant_once(self, fault: Fault, _trace: Sequence[str]) -> None:
        for _ in range(fault.length):  # the one that is reached first lets the others wait
            self.fake.fail(None, code=fault.code, nth=fault.index)

    def _plant_loss(self, fault: Fault, trace: Sequence[str]) -> None:
        if fault.code == DEINITIALIZED:
            self.fake.fail_always(None, code=fault.code, nth=fault.index)
            return
        earlier = Counter(trace[: fault.index - 1])
        for name in entry_points():
            if not _SURVIVORS.match(name):
                self.fake.fail_always(name, code=fault.code, nth=earlier[name] + 1)
        if _SURVIVORS.match(fault.call):
            self.fake.fail(fault.call, code=fault.code, nth=earlier[fault.call] + 1)

    def _clear(self, before: Snapshot, depth: int) -> None:
        self.fake.clear_faults()
        while self.fake.stack_depth > depth:
            driver.call(driver.api.cuCtxPopCurrent)
        self._created.destroy(is_anything_left=self.fake.snapshot() != before)
        self.fake.take_violations()


def _problems_after_one(subject: Subject, fault: Fault) -> list[str]:
    problems = []
    subject.fake.clear_faults()
    for action in (subject.require_working, subject.close, subject.close):
        try:
            action()
        except Exception as error:  # noqa: BLE001  (no fault is planted any more)
            problems.append(f"{action.__name__} afterwards: {_told(error)}")
    return problems


def _problems_after_loss(subject: Subject, fault: Fault) -> list[str]:
    problems = []
    provider = subject.provider
    if provider is not None:
        if provider.health.is_ready:
            with suppress(NxrtError):
                _uses(subject)[0]()
        if provider.health.is_ready:
            problems.append("the provider still says that it is ready")
        problems += _refusal_problems(subject, fault)
    num_calls = subject.fake.calls()
    try:
        subject.close()
        subject.close()
    except Exception as error:  # noqa: BLE001  (closing must be silent)
        problems.append(f"closing is not silent: {_told(error)}")
    if subject.fake.calls() != num_calls:
        problems.append("closing asks the driver")
    return problems


def _refusal_problems(subject: Subject, fault: Fault) -> list[str]:
    problems = []
    num_calls = subject.fake.calls()
    for use in _uses(subject):
        try:
            use()
        except DeviceLostError as error:
            if error.code != fault.code:
                problems.append(f"{use.__name__} names code {error.code}")
        except ClosedError:
            pass
        except Exception as error:  # noqa: BLE001  (any other is what is looked for)
            problems.append(f"{use.__name__} on a lost device: {_told(error)}")
        else:
            problems.append(f"{use.__name__} works on a lost device")
    if subject.fake.calls() != num_calls:
        problems.append("the driver was asked after the device was lost")
    return problems


def _uses(subject: Subject) -> list[Callable[[], object]]:
    """Return what must be refused on a lost device; the first asks the driver on any other."""
    provider = subject.provider
    assert provider is not None
    uses: list[Callable[[], object]] = [
        lambda: provider.open(subject.governor),
        lambda: subject.device.create(driver.api.cuStreamCreate, 1),
    ]
    if subject.session is not None:
        session = subject.session
        uses += [session.synchronize, lambda: session.bind({"N": 3})]
        if subject.bindings:
            binding = subject.bindings[0]
            uses += [
                lambda: binding.read("picked"),
                lambda: subject.write(binding),
                lambda: session.run(binding),
                lambda: session.capture(binding),
                lambda: session.step(binding),
            ]
    return uses + [graph.replay for graph in subject.graphs]


def _charged(subject: Subject) -> list[Any]:
    return [tier for tier in subject.governor.snapshot() if tier.used]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _names(error: BaseException, fault: Fault) -> bool:
    texts: list[str] = []
    link: BaseException | None = error
    while link is not None:
        texts += [str(link), *getattr(link, "__notes__", ())]
        link = link.__cause__ or link.__context__
    call = fault.call if fault.length == 1 else ""  # of several, one is enough
    return any(call in text and f"({fault.code})" in text for text in texts)


def _is_an_answer(fault: Fault) -> bool:
    """Say whether the code is how the function says no to a question, and not a failure."""
    return (fault.call, fault.code) == ("cuFuncGetParamInfo", 1)


@contextmanager
def _errors_logged() -> Iterator[list[str]]:
    """Lend a list of what is logged as an error inside the with-block."""
    texts: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Keeping(logging.ERROR)
    logger = logging.getLogger("nxrt")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
