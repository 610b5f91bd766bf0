"""Check the contract of `Allocator` on every implementation: one suite, one line for each of them.

To add one, write a factory and list it in `FACTORIES`. Addresses are never touched here except
where the host can reach them.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from nxrt.errors import AllocationFailedError, DriverError
from nxrt.memory.allocator import Allocator, HostAllocator, LeasedAllocator
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import Role, TierKind
from nxrt.runtime.device import Device
from nxrt.runtime.device_memory import DeviceAllocator, PinnedAllocator
from nxrt.runtime.stream import Stream
from nxrt.storage import DeviceType, ForeignStorage
from nxrt.tensor import MAX_SIZE, DType, TensorView

AllocatorFactory = Callable[[], AbstractContextManager[Allocator]]
"""Opens whatever the allocator needs, lends the allocator, and closes it all again."""

SIZES = (1, 3, 255, 256, 257, 4096, 1 << 20)
ALIGNMENT = 256


@contextmanager
def host() -> Iterator[Allocator]:
    yield HostAllocator()


@contextmanager
def on_device(kind: type[DeviceAllocator | PinnedAllocator]) -> Iterator[Allocator]:
    device = Device()
    with Stream(device) as stream:
        yield kind(device, [stream])
    device.close()


ON_DEVICE = (pytest.mark.gpu, pytest.mark.fake)
FACTORIES = (
    pytest.param(host, id="host"),
    pytest.param(partial(on_device, DeviceAllocator), id="device", marks=ON_DEVICE),
    pytest.param(partial(on_device, PinnedAllocator), id="pinned", marks=ON_DEVICE),
)
"""Those that need a device are marked; they run on the driver's test double too."""

HOST_REACHABLE = [factory for factory in FACTORIES if factory.id != "device"]


def give_back(allocator: Allocator, pointer: int, nbytes: int) -> None:
    """Give a block back, and see that its payer is told exactly once."""
    settled: list[int] = []
    allocator.deallocate(pointer, nbytes, lambda: settled.append(pointer))
    if not settled:
        allocator.reclaim()
    assert settled == [pointer]


@pytest.fixture(params=FACTORIES)
def allocator(request: pytest.FixtureRequest) -> Iterator[Allocator]:
    factory: AllocatorFactory = request.param
    with factory() as opened:
        yield opened


def test_tier_and_device_name_the_same_memory(allocator: Allocator) -> None:
    is_on_device = allocator.tier.kind is TierKind.DEVICE
    assert allocator.device.type is (DeviceType.CUDA if is_on_device else DeviceType.CPU)
    assert allocator.device.ordinal == allocator.tier.ordinal


@pytest.mark.parametrize("nbytes", SIZES)
def test_address_is_not_null_and_aligned(allocator: Allocator, nbytes: int) -> None:
    pointer = allocator.allocate(nbytes)
    assert type(pointer) is int
    assert pointer > 0
    assert pointer % ALIGNMENT == 0
    give_back(allocator, pointer, nbytes)


def test_live_blocks_do_not_overlap(allocator: Allocator) -> None:
    blocks = sorted((allocator.allocate(nbytes), nbytes) for nbytes in SIZES * 3)
    overlapping = [one for one, two in pairwise(blocks) if one[0] + one[1] > two[0]]
    for block in blocks:
        give_back(allocator, *block)
    assert not overlapping


@pytest.mark.parametrize("step", [1, -1], ids=["oldest first", "newest first"])
def test_blocks_may_be_given_back_in_any_order(allocator: Allocator, step: int) -> None:
    blocks = [(allocator.allocate(nbytes), nbytes) for nbytes in SIZES]
    for block in blocks[::step]:
        give_back(allocator, *block)


def test_block_may_be_given_back_by_another_thread(allocator: Allocator) -> None:
    pointer = allocator.allocate(4096)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(give_back, allocator, pointer, 4096).result()


def test_many_threads_may_allocate_at_once(allocator: Allocator) -> None:
    def take_and_give(nbytes: int) -> None:
        for _ in range(20):
            give_back(allocator, allocator.allocate(nbytes), nbytes)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(take_and_give, 256 * n) for n in range(1, 9)]:
            done.result()


@pytest.mark.parametrize("nbytes", [2**62, MAX_SIZE])
def test_size_that_nobody_has_is_refused_and_the_next_one_served(
    allocator: Allocator, nbytes: int
) -> None:
    with pytest.raises((MemoryError, DriverError)):
        allocator.allocate(nbytes)
    give_back(allocator, allocator.allocate(256), 256)


@pytest.mark.parametrize("allocator", HOST_REACHABLE, indirect=True)
def test_bytes_that_the_host_reaches_keep_what_is_written(allocator: Allocator) -> None:
    blocks = [(allocator.allocate(1000), 1000) for _ in range(5)]
    arrays = [
        TensorView(ForeignStorage(*block, allocator.device), DType.U8, (1000,)).to_array()
        for block in blocks
    ]
    for value, array in enumerate(arrays):
        array[:] = value
    assert [np.unique(array).tolist() for array in arrays] == [[n] for n in range(5)]
    for block in blocks:
        give_back(allocator, *block)


@pytest.mark.parametrize("nbytes", [0, *SIZES])
def test_charged_block_is_charged_until_it_is_closed(allocator: Allocator, nbytes: int) -> None:
    governor = MemoryGovernor()
    leased = LeasedAllocator(allocator, governor)
    with leased.allocate(nbytes, role=Role.ACTIVATION, holder="contract") as buffer:
        assert buffer.device == allocator.device
        assert governor.usage(allocator.tier).used == nbytes
    assert governor.usage(allocator.tier).used == 0


def test_size_that_nobody_has_gives_its_lease_back(allocator: Allocator) -> None:
    governor = MemoryGovernor()
    leased = LeasedAllocator(allocator, governor)
    with pytest.raises(AllocationFailedError):
        leased.allocate(2**62, role=Role.ACTIVATION, holder="contract")
    assert governor.usage(allocator.tier).used == 0
