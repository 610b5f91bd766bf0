"""What only a real device shows: time that passes there, and what its compiled code is."""

import time

import pytest

from nxrt import DriverError, InvalidInputError, MemoryGovernor, Role, device_tier
from nxrt.memory.allocator import LeasedAllocator
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.device import Device
from nxrt.runtime.device_memory import DeviceAllocator
from nxrt.runtime.module import KernelArguments, LaunchConfig, Module, launch
from nxrt.runtime.stream import Event, Stream
from tests.helpers.modules import compiled

pytestmark = pytest.mark.gpu

SPIN = """
extern "C" __global__ void spin_then_write(unsigned char* out, unsigned long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    *out = 7;
}
"""


def spin(module: Module, pointer: int, stream: Stream) -> None:
    """Keep the stream busy for a fifth of a second or more, then write one byte."""
    arguments = KernelArguments(["pointer", "u64"])
    arguments.set(pointer, 400_000_000)
    config = LaunchConfig((1, 1, 1), (1, 1, 1))
    launch(module.function("spin_then_write"), config, arguments, stream=stream)


def test_freeing_neither_waits_nor_comes_early(device: Device, stream: Stream) -> None:
    module = compiled(device, SPIN)
    governor = MemoryGovernor()
    allocator = LeasedAllocator(DeviceAllocator(device, [stream]), governor)
    buffer = allocator.allocate(256, role=Role.WORKSPACE, holder="test")
    spin(module, buffer.pointer, stream)
    started = time.perf_counter()
    buffer.close()
    elapsed = time.perf_counter() - started
    assert governor.usage(device_tier(0)).used == 256
    assert device.releases.num_pending == 1
    stream.synchronize()
    device.releases.poll()
    assert governor.usage(device_tier(0)).used == 0
    assert elapsed < 0.1
    module.close()


def test_an_event_is_reached_when_its_work_is_done(device: Device, stream: Stream) -> None:
    module = compiled(device, SPIN)
    allocator = LeasedAllocator(DeviceAllocator(device, [stream]), MemoryGovernor())
    with allocator.allocate(256, role=Role.WORKSPACE, holder="test") as buffer:
        spin(module, buffer.pointer, stream)
        event = stream.fence()
        assert not event.is_reached()
        event.synchronize()
        assert event.is_reached()
        event.close()
    module.close()


def test_events_measure_device_time(device: Device, stream: Stream) -> None:
    module = compiled(device, SPIN)
    allocator = LeasedAllocator(DeviceAllocator(device, [stream]), MemoryGovernor())
    first, second = Event(device, is_timed=True), Event(device, is_timed=True)
    with allocator.allocate(256, role=Role.WORKSPACE, holder="test") as buffer:
        spin(module, buffer.pointer, stream)  # loads the code
        stream.synchronize()
        started = time.perf_counter()
        first.record(stream)
        spin(module, buffer.pointer, stream)
        second.record(stream)
        second.synchronize()
        host_us = (time.perf_counter() - started) * 1e6
        assert 100_000 < second.elapsed_us(first) < host_us
    first.close()
    second.close()
    module.close()


def test_code_of_another_architecture_is_refused(device: Device) -> None:
    source = KernelSource("test.cu", 'extern "C" __global__ void k() {}')
    other = "sm_120" if device.capabilities.compute_capability[0] != 12 else "sm_80"
    cubin = Compiler().compile(source, CompileOptions(other)).cubin
    with pytest.raises(DriverError, match="no code for this device"):
        Module(device, cubin)


def test_arguments_are_checked_against_the_code(device: Device) -> None:
    module = compiled(device, 'extern "C" __global__ void k(int a, double* b) {}')
    function = module.function("k")
    assert function.arguments(["i32", "pointer"]).kinds == ("i32", "pointer")
    for kinds in (["i32"], ["i32", "pointer", "u32"], ["u64", "pointer"]):
        with pytest.raises(InvalidInputError, match=r"arguments of k.*\[4, 8\] B"):
            function.arguments(kinds)
    module.close()
