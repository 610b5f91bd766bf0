"""Whatever can be closed: a second close does nothing, and a use afterwards is a ClosedError.

In both cases the driver is not asked.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxrt import ClosedError, MemoryGovernor, Role
from nxrt.memory.allocator import LeasedAllocator
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime.device import Device
from nxrt.runtime.device_memory import PinnedAllocator
from nxrt.runtime.module import LaunchConfig, launch
from nxrt.runtime.staging import StagingRing
from nxrt.runtime.stream import Event, Stream
from nxrt.runtime.workspace import Workspace
from tests.helpers.cuda_toys import SOURCE, ToyStandIns
from tests.helpers.fake_driver import FakeDriver
from tests.helpers.fault_scenarios import Subject

pytestmark = pytest.mark.fake

NBYTES = 64
Uses = list[Callable[[], object]]


@pytest.fixture
def subject(fake_driver: FakeDriver, cache_dir: Path) -> Iterator[Subject]:
    ToyStandIns(fake_driver).register()
    subject = Subject(fake_driver, cache_dir)
    subject.warm()
    yield subject
    subject.close()
    assert all(tier.used == 0 for tier in subject.governor.snapshot())


def backend_of(subject: Subject) -> CudaProviderSession:
    backend = subject.opened.provider_session
    assert isinstance(backend, CudaProviderSession)
    return backend


def a_stream(subject: Subject) -> tuple[Any, Uses]:
    stream, other = Stream(subject.device), backend_of(subject).stream
    return stream, [
        lambda: stream.handle,
        lambda: stream.native,
        stream.synchronize,
        stream.fence,
        lambda: stream.wait_for(other),
        lambda: other.wait_for(stream),
    ]


def an_event(subject: Subject) -> tuple[Any, Uses]:
    event, stream = Event(subject.device), backend_of(subject).stream
    return event, [
        lambda: event.handle,
        lambda: event.record(stream),
        event.is_reached,
        event.synchronize,
        lambda: event.elapsed_us(event),
    ]


def a_module(subject: Subject) -> tuple[Any, Uses]:
    backend = backend_of(subject)
    module = backend._context.load(SOURCE)
    function = module.function("toy_spin")
    arguments = function.arguments(["u64"])
    arguments.set(0)
    config = LaunchConfig((1, 1, 1), (1, 1, 1))
    return module, [
        lambda: module.function("toy_spin"),
        lambda: launch(function, config, arguments, stream=backend.stream),
    ]


def a_graph_allocation(subject: Subject) -> tuple[Any, Uses]:
    memory = backend_of(subject).allocate(NBYTES, role=Role.ACTIVATION, holder="test")
    return memory, [lambda: memory.pointer, memory.share]


def a_buffer(subject: Subject) -> tuple[Any, Uses]:
    allocator = backend_of(subject)._allocator
    buffer = allocator.allocate(NBYTES, role=Role.ACTIVATION, holder="test")
    return buffer, [lambda: buffer.pointer]


def a_captured_graph(subject: Subject) -> tuple[Any, Uses]:
    graph = subject.opened.capture(subject.bindings[0])
    return graph, [graph.replay]


def a_binding(subject: Subject) -> tuple[Any, Uses]:
    session, binding = subject.opened, subject.bound()
    return binding, [
        lambda: binding.view("x"),
        lambda: binding.read("picked"),
        lambda: binding.write("x", np.zeros(1, np.float32)),
        lambda: session.run(binding),
        lambda: session.step(binding),
        lambda: session.capture(binding),
    ]


def a_stepped_binding(subject: Subject) -> tuple[Any, Uses]:
    session, binding = subject.opened, subject.bound()
    session.step(binding)
    return binding, [lambda: session.step(binding), lambda: session.run(binding)]


def a_session(subject: Subject) -> tuple[Any, Uses]:
    session, binding = subject.opened, subject.bindings[0]
    session.step(binding)
    graph = session.capture(binding)
    return session, [
        graph.replay,
        session.synchronize,
        lambda: session.bind({"N": 3}),
        lambda: session.run(binding),
        lambda: session.step(binding),
        lambda: session.capture(binding),
        lambda: binding.read("picked"),
        lambda: binding.write("x", np.zeros(1, np.float32)),
    ]


def a_provider(subject: Subject) -> tuple[Any, Uses]:
    provider = subject.provider
    return provider, [lambda: provider.open(MemoryGovernor())]  # type: ignore[union-attr]


def a_staging_ring(subject: Subject) -> tuple[Any, Uses]:
    backend = backend_of(subject)
    pinned = PinnedAllocator(backend.stream.device, [backend.stream])
    allocator = LeasedAllocator(pinned, MemoryGovernor())
    ring, array = StagingRing(backend.stream.device, allocator), np.zeros(4, np.uint8)
    return ring, [
        lambda: ring.upload(1, array, stream=backend.stream),
        lambda: ring.download(array, 1, stream=backend.stream),
    ]


def a_workspace(subject: Subject) -> tuple[Any, Uses]:
    backend = backend_of(subject)
    allocator: LeasedAllocator = backend._allocator
    workspace = Workspace(allocator, holder="test")
    with workspace.lend(NBYTES, stream=backend.stream):
        pass

    def lend() -> None:
        with workspace.lend(NBYTES, stream=backend.stream):
            pass

    return workspace, [lend]


def an_error_latch(subject: Subject) -> tuple[Any, Uses]:
    backend = backend_of(subject)
    latch = backend._opened_latch()
    backend._latch = None
    return latch, [
        lambda: latch.slot("node", {}),
        lambda: latch.advance(backend.stream),
        latch.check,
    ]


def a_device(subject: Subject) -> tuple[Any, Uses]:
    subject.close()
    device = Device(0)
    return device, [lambda: Stream(device), lambda: Event(device), device.retain]


CLOSABLES = (
    a_stream,
    an_event,
    a_module,
    a_graph_allocation,
    a_buffer,
    a_captured_graph,
    a_binding,
    a_stepped_binding,
    a_session,
    a_provider,
    a_staging_ring,
    a_workspace,
    an_error_latch,
    a_device,
)

every_closable = pytest.mark.parametrize("make", CLOSABLES, ids=lambda make: make.__name__)


@every_closable
def test_a_second_close_does_nothing(subject: Subject, make: Any) -> None:
    closable, _ = make(subject)
    closable.close()
    num_calls = subject.fake.calls()
    closable.close()
    assert subject.fake.calls() == num_calls


@every_closable
def test_a_use_after_close_is_refused_without_the_driver(subject: Subject, make: Any) -> None:
    closable, uses = make(subject)
    closable.close()
    num_calls = subject.fake.calls()
    for number, use in enumerate(uses):
        with pytest.raises(ClosedError):
            use()
        assert subject.fake.calls() == num_calls, f"use {number} asks the driver"
