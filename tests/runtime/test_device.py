"""Devices, streams, events, memory, modules and staging on a real device."""

import time
from collections.abc import Iterator

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
from nxrt.runtime.compiler import CompileOptions, Compiler
from nxrt.runtime.device import Device
from nxrt.runtime.device_memory import DeviceAllocator, PinnedAllocator, copy_to_host, fill_bytes
from nxrt.runtime.module import KernelArguments, LaunchConfig, Module, launch
from nxrt.runtime.source import KernelSource
from nxrt.runtime.staging import StagingRing
from nxrt.runtime.stream import Event, Stream

pytestmark = pytest.mark.gpu

SPIN = """
extern "C" __global__ void spin_then_write(unsigned char* out, unsigned long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    *out = 7;
}
"""


@pytest.fixture
def device() -> Iterator[Device]:
    opened = Device(0)
    yield opened
    opened.close()


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    with Stream(device) as opened:
        yield opened


def compiled(device: Device, text: str) -> Module:
    options = CompileOptions(device.capabilities.arch)
    return Module(device, Compiler().compile(KernelSource("test.cu", text), options).cubin)


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


def test_freeing_waits_for_the_kernel_that_uses_the_memory(device: Device, stream: Stream) -> None:
    """Buffers are freed without a synchronisation of ours: the driver's own wait is relied on."""
    module = compiled(device, SPIN)
    allocator = LeasedAllocator(DeviceAllocator(device), MemoryGovernor())
    buffer = allocator.allocate(256, role=Role.WORKSPACE, holder="test")
    arguments = KernelArguments(["pointer", "u64"])
    arguments.set(buffer.pointer, 400_000_000)
    config = LaunchConfig((1, 1, 1), (1, 1, 1))
    with device.current():
        function = module.function("spin_then_write")
        launch(function, config, arguments, stream=stream)
        started = time.perf_counter()
        buffer.close()
        assert time.perf_counter() - started > 0.02
    stream.synchronize()
    module.close()


def test_events_measure_device_time(device: Device, stream: Stream) -> None:
    first, second = Event(device, is_timed=True), Event(device, is_timed=True)
    first.record(stream)
    second.record(stream)
    second.synchronize()
    with device.current():
        assert second.elapsed_us(first) >= 0
    first.close()
    second.close()


def test_garbage_is_no_module(device: Device) -> None:
    with pytest.raises(DriverError, match="no loadable module"):
        Module(device, b"garbage" * 100)


def test_code_of_another_architecture_is_refused(device: Device) -> None:
    source = KernelSource("test.cu", 'extern "C" __global__ void k() {}')
    other = "sm_120" if device.capabilities.compute_capability[0] != 12 else "sm_80"
    cubin = Compiler().compile(source, CompileOptions(other)).cubin
    with pytest.raises(DriverError, match="no code for this device"):
        Module(device, cubin)


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
    with pytest.raises(CaptureError, match="host memory was read or written"):
        capture(
            stream, lambda: ring.upload(1, np.zeros(4, np.uint8), stream=stream), owned=[]
        )  # fmt: skip
    ring.close()
    stream.synchronize()
