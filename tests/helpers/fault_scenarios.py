"""What sessions on the driver's double go through while one call after the other is made to fail.

Each scenario is prepared without faults and then acts with one. Results are compared wherever
something is read, so that a fault that nobody reports cannot pass. Faults are planted elsewhere.
"""

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nxrt import Binding, CudaProvider, DType, Graph, MemoryGovernor, Session, TensorSpec
from nxrt.errors import DeviceFaultError
from nxrt.providers.base import Replayable
from nxrt.runtime.device import Device
from nxrt.runtime.device_memory import copy_on_device, fill_bytes
from nxrt.runtime.stream import Event, Stream
from tests.helpers.cuda_toys import toy_node
from tests.helpers.fake_driver import FakeDriver
from tests.helpers.faulty_toys import Trouble
from tests.helpers.graph_rig import Floats, floats, toys_plugin

COUNT = 6
"""Elements of the usual binding."""

FACTOR = np.float32(3)
GRAPH = Graph(
    (
        toy_node("Accumulate", "x", output="sums", name="sum", factor=float(FACTOR)),
        toy_node("Gather", "sums", "index", output="picked", name="pick"),
    ),
    {"x": TensorSpec(DType.F32, ("N",)), "index": TensorSpec(DType.I64, ("N",))},
    (),
)
"""A workspace, three launches, and a kernel that reports bad data."""


class WrongResultError(AssertionError):
    """Is raised where a result differs although no call reported anything."""


class Subject:
    """Hold one provider, one session and what was made from them; opened step by step.

    Args:
        fake: the double's control.
        cache_dir: where the toys' code is, or will be.
    """

    def __init__(self, fake: FakeDriver, cache_dir: Path) -> None:
        self.fake = fake
        self.governor = MemoryGovernor()
        self.provider: CudaProvider | None = None
        self.session: Session | None = None
        self.graphs: list[Replayable] = []
        self.bindings: list[Binding] = []
        self.streams: list[Stream] = []
        self.has_bad_data = False
        """Say whether a kernel was given some, and may still report it."""
        self._cache_dir = cache_dir
        self._start = 0

    @property
    def opened(self) -> Session:
        """Return the session, which must be there."""
        assert self.session is not None
        return self.session

    @property
    def device(self) -> Device:
        """Return the provider's device."""
        assert self.provider is not None
        return self.provider._device

    def open(self) -> None:
        """Open whatever of provider and session is not open."""
        if self.provider is None or self.provider._is_closed:
            self.provider = CudaProvider(cache_dir=self._cache_dir)
            self.provider.registry.register(toys_plugin(Trouble()))
        if self.session is None or self.session._is_closed:
            self.session = Session(GRAPH, [self.provider], self.governor, max_graphs=2)

    def warm(self) -> None:
        """Open, and run the usual binding once."""
        self.open()
        self.opened.run(self.bound())

    def bound(self, count: int = COUNT) -> Binding:
        """Return a new binding with inputs written."""
        binding = self.opened.bind({"N": count})
        self.bindings.append(binding)
        self.write(binding)
        return binding

    def stream(self) -> Stream:
        """Return a stream like one of the caller's."""
        self.streams.append(Stream(self.device))
        return self.streams[-1]

    def inputs(self, binding: Binding) -> tuple[Floats, Any]:
        """Return the inputs as last written; each writing has its own."""
        (count,) = binding.view("x").shape
        return floats(count, self._start), (np.arange(count) + self._start) % count

    def write(self, binding: Binding, *, stream: object | None = None) -> None:
        """Write inputs that nothing had before."""
        self._start += 1
        x, index = self.inputs(binding)
        binding.write("x", x, stream=stream)
        binding.write("index", index, stream=stream)

    def check(self, binding: Binding, *, stream: object | None = None) -> None:
        """Read the result and compare it with that of the inputs written last."""
        x, index = self.inputs(binding)
        expected = np.cumsum(FACTOR * x)[index].astype(np.float32)
        found = binding.read("picked", stream=stream)
        if found.tobytes() != expected.tobytes():
            raise WrongResultError(f"the result is {found}, not {expected}")

    def write_and(self, run: Callable[[], None], binding: Binding) -> None:
        """Write, run, check."""
        self.write(binding)
        run()
        self.check(binding)

    def require_working(self) -> None:
        """Run, capture, replay and step: in the same session where it is still open."""
        self.open()
        session = self.opened
        if self.has_bad_data:
            with suppress(DeviceFaultError):
                session.synchronize()
        for binding in [known for known in self.bindings if not known.is_closed]:
            if binding.is_made_by(session.provider_session):
                self.write(binding)  # as many copies as there are slots: all are used again
                self.write_and(lambda binding=binding: session.run(binding), binding)  # type: ignore[misc]
        with session.bind({"N": COUNT}) as binding:
            self.write(binding)
            session.run(binding)
            with closing(session.capture(binding)) as graph:
                self.write_and(graph.replay, binding)
            session.step(binding)
            self.write_and(lambda: session.step(binding), binding)
        session.synchronize()

    def close(self) -> None:
        """Close everything, in the order of its making reversed; may be repeated."""
        for graph in self.graphs:
            graph.close()
        for binding in self.bindings:
            binding.close()
        for stream in self.streams:
            stream.close()
        if self.session is not None:
            self.session.close()
        if self.provider is not None:
            self.provider.close()


@dataclass(frozen=True)
class Scenario:
    """Say what is done without faults, what with one, and how many calls that makes at least.

    Where it is lazy, work runs only when waited for: while acting, and after the fault too.
    """

    id: str
    prepare: Callable[[Subject], object]
    act: Callable[[Subject], object]
    min_calls: int
    is_lazy: bool = False


def _run(subject: Subject) -> None:
    binding = subject.bound()
    subject.opened.run(binding)
    subject.check(binding)
    binding.close()


def _capture(subject: Subject) -> None:
    (binding,) = subject.bindings
    graph = subject.opened.capture(binding)
    subject.graphs.append(graph)
    subject.write_and(graph.replay, binding)
    graph.close()


def _step(subject: Subject) -> None:
    (first,), step = subject.bindings, subject.opened.step
    subject.write_and(lambda: step(first), first)
    subject.write_and(lambda: step(first), first)
    second = subject.bound()
    first.close()
    subject.write_and(lambda: step(second), second)
    for count in (COUNT - 1, COUNT - 2):  # two graphs are kept: these evict
        other = subject.bound(count)
        subject.write_and(lambda other=other: step(other), other)  # type: ignore[misc]


def _grow(subject: Subject) -> None:
    (narrow,), run = subject.bindings, subject.opened.run
    wide = subject.bound(40 * COUNT)
    run(wide)
    subject.check(wide)
    subject.write_and(lambda: run(narrow), narrow)


def _meet_bad_data(subject: Subject) -> None:
    (binding,), session = subject.bindings, subject.opened
    subject.has_bad_data = True
    binding.write("index", np.full(COUNT, -1))
    session.run(binding)
    try:
        session.synchronize()
    except DeviceFaultError as fault:
        if (fault.node, fault.bits) != ("pick", 1):
            raise WrongResultError(str(fault)) from fault
    else:
        raise WrongResultError("bad data were not reported")
    subject.write_and(lambda: session.run(binding), binding)


def _run_twice(subject: Subject) -> None:
    (binding,), session = subject.bindings, subject.opened
    for _ in range(2):
        subject.write_and(lambda: session.run(binding), binding)


def _close_while_busy(subject: Subject) -> None:
    (first,), session = subject.bindings, subject.opened
    session.run(first)
    first.close()
    second = subject.bound()
    session.run(second)
    second.close()
    session.synchronize()


def _use_a_callers_stream(subject: Subject) -> None:
    (binding,), (stream,), session = subject.bindings, subject.streams, subject.opened
    subject.write(binding, stream=stream.handle)
    session.run(binding, stream=stream.handle)
    subject.check(binding, stream=stream.handle)
    subject.write(binding)
    session.step(binding, stream=stream.handle)
    subject.check(binding)


def _prepare_everything(subject: Subject) -> None:
    subject.warm()
    (binding,) = subject.bindings
    subject.graphs.append(subject.opened.capture(binding))
    subject.opened.step(binding)


def _use_events_and_copies(subject: Subject) -> None:
    (stream,), (binding,), device = subject.streams, subject.bindings, subject.device
    x, sums = binding.view("x"), binding.view("sums")
    with device.current():
        fill_bytes(sums.pointer, 0, sums.spec.nbytes(), stream=stream)
    begun = Event(device, is_timed=True)
    ended = None
    try:
        ended = Event(device, is_timed=True)
        begun.record(stream)
        copy_on_device(sums.pointer, x.pointer, x.spec.nbytes(), stream=stream)
        ended.record(stream)
        ended.synchronize()
        if not ended.is_reached() or ended.elapsed_us(begun) < 0:
            raise WrongResultError("time runs backwards")
    finally:
        begun.close()
        if ended is not None:
            ended.close()
    if binding.read("sums").tobytes() != subject.inputs(binding)[0].tobytes():
        raise WrongResultError("the copy was not made")


def _close_provider_first(subject: Subject) -> None:
    assert subject.provider is not None
    subject.provider.close()
    subject.opened.close()


def _with_stream(subject: Subject) -> None:
    subject.warm()
    subject.stream()


def _close_session(subject: Subject) -> None:
    subject.opened.close()


def _close_provider(subject: Subject) -> None:
    subject.opened.close()
    assert subject.provider is not None
    subject.provider.close()


def _nothing(subject: Subject) -> None:
    pass


SCENARIOS = (
    Scenario("open", _nothing, Subject.open, 100),
    Scenario("run", Subject.open, _run, 60),
    Scenario("capture", Subject.warm, _capture, 40),
    Scenario("step", Subject.warm, _step, 200),
    Scenario("grow", Subject.warm, _grow, 50),
    Scenario("bad data", Subject.warm, _meet_bad_data, 30),
    Scenario("run while busy", Subject.warm, _run_twice, 30, is_lazy=True),
    Scenario("close while busy", Subject.warm, _close_while_busy, 100, is_lazy=True),
    Scenario("caller's stream", _with_stream, _use_a_callers_stream, 100),
    Scenario("events and copies", _with_stream, _use_events_and_copies, 20),
    Scenario("close session", _prepare_everything, _close_session, 60),
    Scenario("close provider", _prepare_everything, _close_provider, 60),
    Scenario("close provider first", _prepare_everything, _close_provider_first, 60),
)
