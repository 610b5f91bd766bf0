"""Devices, streams, events, memory, modules and staging on a real device."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nxrt import (
    AllocationFailedError,
    CaptureError,
    ClosedError,
    DriverError,
    InvalidInputError,
    MemoryGovernor,
    Role,
    device_tier,
)
from nxrt.memory.allocator import LeasedAllocator
from nxrt.memory.tier import PINNED
from nxrt.runtime import driver
from nxrt.runtime.capture import capture
from nxrt.runtime.device import Device
from nxrt.runtime.device_memory import DeviceAllocator, PinnedAllocator, copy_to_host, fill_bytes
from nxrt.runtime.module import KernelArguments, LaunchConfig, Module, launch
from nxrt.runtime.staging import StagingRing
from nxrt.runtime.stream import ForeignStream, Stream
from tests.helpers.modules import compiled

pytestmark = [pytest.mark.gpu, pytest.mark.fake]


def test_capabilities_are_read(device: Device) -> None:
    has = device.capabilities
    assert has.name
    assert has.total_memory > 2**30
    assert has.arch.startswith("sm_")
    assert min(has.num_multiprocessors, has.max_grid_x, has.l2_nbytes) > 0


@pytest.mark.parametrize("ordinal", [-1, 64, True])
def test_a_device_that_does_not_exist_is_refused(ordinal: int) -> None:
    with pytest.raises(InvalidInputError, match="device"):
        Device(ordinal)


def test_the_callers_context_is_put_back(device: Device) -> None:
    before = int(driver.call(driver.api.cuCtxGetCurrent))
    with device.current():
        assert int(driver.call(driver.api.cuCtxGetCurrent)) != 0
    assert int(driver.call(driver.api.cuCtxGetCurrent)) == before


def test_a_closed_device_is_refused() -> None:
    device = Device(0)
    device.close()
    device.close()
    with pytest.raises(ClosedError):
        Stream(device)


def test_memory_keeps_what_is_written(device: Device, stream: Stream) -> None:
    allocator = LeasedAllocator(DeviceAllocator(device), MemoryGovernor())
    target = np.zeros(1000, np.uint8)
    with (
        allocator.allocate(1000, role=Role.WORKSPACE, holder="test") as buffer,
        device.current(),
    ):
        fill_bytes(buffer.pointer, 0x5A, 1000, stream=stream)
        copy_to_host(target, buffer.pointer, stream=stream)
        stream.synchronize()
    assert (target == 0x5A).all()


def test_a_size_no_device_has_is_refused_and_the_next_works(device: Device) -> None:
    governor = MemoryGovernor()
    allocator = LeasedAllocator(DeviceAllocator(device), governor)
    with pytest.raises(AllocationFailedError) as failure:
        allocator.allocate(2**50, role=Role.WORKSPACE, holder="huge")
    assert isinstance(failure.value.__cause__, DriverError)
    assert governor.usage(device_tier(0)).used == 0
    with allocator.allocate(1024, role=Role.WORKSPACE, holder="small") as buffer:
        assert buffer.pointer


def test_garbage_is_no_module(device: Device) -> None:
    with pytest.raises(DriverError, match="no loadable module"):
        Module(device, b"garbage" * 100)


def test_an_entry_point_that_is_not_there_is_named(device: Device) -> None:
    module = compiled(device, 'extern "C" __global__ void k() {}')
    with pytest.raises(DriverError, match="no such symbol"):
        module.function("other")
    module.close()


def test_an_empty_grid_is_refused_at_launch(device: Device, stream: Stream) -> None:
    module = compiled(device, 'extern "C" __global__ void k() {}')
    with device.current(), pytest.raises(DriverError, match="an empty grid"):
        launch(
            module.function("k"), LaunchConfig((0, 1, 1), (1, 1, 1)), KernelArguments([]),
            stream=stream,
        )  # fmt: skip
    module.close()


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 1024, 5000])
def test_staging_carries_any_size_through_small_slots(
    device: Device, stream: Stream, nbytes: int
) -> None:
    governor = MemoryGovernor()
    memory = LeasedAllocator(DeviceAllocator(device), governor)
    ring = StagingRing(
        device, LeasedAllocator(PinnedAllocator(device), governor), slot_nbytes=256, num_slots=2
    )
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes).astype(np.uint8)
    target = np.zeros_like(source)
    with memory.allocate(nbytes, role=Role.WORKSPACE, holder="test") as buffer:
        written = source.copy()
        ring.upload(buffer.pointer, written, stream=stream)
        written[:] = 0
        ring.download(target, buffer.pointer, stream=stream)
    ring.close()
    ring.close()
    assert (target == source).all()
    assert governor.usage(PINNED).used == 0


def test_staging_refuses_to_be_recorded(device: Device, stream: Stream) -> None:
    governor = MemoryGovernor()
    ring = StagingRing(device, LeasedAllocator(PinnedAllocator(device), governor))
    lease = governor.reserve(device_tier(0), 0, role=Role.GRAPH, holder="test")
    with pytest.raises(CaptureError, match="host memory was copied while"):
        capture(
            stream,
            lambda source: ring.upload(1, np.zeros(4, np.uint8), stream=source),
            lease=lambda: lease,
            resources=tuple,
        )
    lease.close()
    ring.close()
    stream.synchronize()


def test_a_closed_event_is_refused(device: Device, stream: Stream) -> None:
    event = stream.fence()
    event.close()
    event.close()
    for use in (event.synchronize, event.is_reached, lambda: event.record(stream)):
        with pytest.raises(ClosedError, match="event"):
            use()


def test_memory_keeps_its_device() -> None:
    governor = MemoryGovernor()
    device = Device(0)
    buffer = LeasedAllocator(DeviceAllocator(device), governor).allocate(
        64, role=Role.WORKSPACE, holder="test"
    )
    device.close()
    assert governor.usage(device_tier(0)).used == 64
    buffer.close()
    assert governor.usage(device_tier(0)).used == 0
    with pytest.raises(ClosedError):
        Stream(device)


def test_a_use_of_a_device_counts_once(device: Device) -> None:
    use = device.retain()
    use.close()
    use.close()
    Stream(device).close()


def test_a_stream_waits_for_another_on_the_device(device: Device, stream: Stream) -> None:
    target = np.zeros(8, np.uint8)
    allocator = LeasedAllocator(DeviceAllocator(device), MemoryGovernor())
    with (
        Stream(device) as other,
        allocator.allocate(8, role=Role.WORKSPACE, holder="test") as buffer,
    ):
        fill_bytes(buffer.pointer, 3, 8, stream=other)
        stream.wait_for(other)
        copy_to_host(target, buffer.pointer, stream=stream)
        stream.synchronize()
    assert (target == 3).all()


@pytest.mark.parametrize("given", ["nothing", -1, 2**64, 1.5, None])
def test_what_is_no_stream_is_refused(device: Device, given: object) -> None:
    with pytest.raises(InvalidInputError, match="stream"):
        ForeignStream(device, given)


def test_a_callers_stream_is_taken_as_a_handle_or_by_the_protocol(
    device: Device, stream: Stream
) -> None:
    class Theirs:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, stream.handle)

    for given in (stream.handle, Theirs(), 0):
        taken = ForeignStream(device, given)
        taken.synchronize()
        taken.close()
    stream.synchronize()  # its owner's, and still open


def test_a_slot_is_not_written_before_its_last_copy_has_run(
    request: pytest.FixtureRequest, device: Device, stream: Stream
) -> None:
    if request.config.getoption("--fake-driver"):
        request.getfixturevalue("fake_driver").set_lazy(True)
    governor = MemoryGovernor()
    pinned = LeasedAllocator(PinnedAllocator(device, [stream]), governor)
    ring = StagingRing(device, pinned, slot_nbytes=16, num_slots=2)
    source = np.arange(250, dtype=np.uint8)
    target = np.zeros_like(source)
    memory = LeasedAllocator(DeviceAllocator(device, [stream]), governor)
    with memory.allocate(source.nbytes, role=Role.WORKSPACE, holder="test") as buffer:
        ring.upload(buffer.pointer, source, stream=stream)
        ring.download(target, buffer.pointer, stream=stream)
    ring.close()
    assert (target == source).all()


def test_an_event_is_not_destroyed_under_a_call(stream: Stream) -> None:
    event = stream.fence()
    has_entered, has_left = threading.Event(), threading.Event()

    def use() -> None:
        has_entered.set()
        while not event._is_closed:
            pass
        has_left.set()

    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(event._inside.run, use)
        has_entered.wait()
        event.close()
        assert has_left.is_set()
        used.result()


def test_many_threads_drain_and_poll_at_once(device: Device, stream: Stream) -> None:
    governor = MemoryGovernor()
    allocator = LeasedAllocator(DeviceAllocator(device, [stream]), governor)

    def work() -> None:
        for index in range(100):
            allocator.allocate(64, role=Role.WORKSPACE, holder="test").close()
            (device.releases.drain if index % 2 else device.releases.poll)()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result()
    device.releases.drain()
    assert governor.usage(device_tier(0)).used == 0
