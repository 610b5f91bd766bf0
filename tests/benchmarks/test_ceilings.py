"""Floors from measured rates, and the kernel that measures reading."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from benchmarks import ceilings, peers
from benchmarks.cases import IndexSelectShape
from benchmarks.ceilings import SOURCE, Ceilings, bound_read, measure_ceilings
from nxrt import CudaProvider, MemoryGovernor, Role
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.device_memory import copy_to_device, copy_to_host, fill_bytes
from nxrt.runtime.stream import Stream
from tests.conftest import FAKE
from tests.helpers.fake_driver import FakeDriver
from tests.helpers.fake_kernels import EmulatedKernels

ON_CUDA = [pytest.mark.gpu, pytest.mark.fake]
DECODE, PREFILL = IndexSelectShape(64, 1, 65_536), IndexSelectShape(1, 1024, 65_536)


@pytest.mark.parametrize(
    ("shape", "floor_us", "source"),
    [(DECODE, DECODE.nbytes / 4e6, "bytes"), (PREFILL, PREFILL.operations / 8e8, "matrix")],
)
def test_the_floor_is_the_larger_of_bytes_and_flops(
    shape: IndexSelectShape, floor_us: float, source: str
) -> None:
    found = Ceilings(4e12, 3e12, 8e14).floor(shape)
    assert found[0] == pytest.approx(floor_us)
    assert found[1] == source


def test_without_a_matrix_rate_the_floor_is_from_bytes_and_says_so() -> None:
    bytes_only = Ceilings(4e12, 3e12)
    floor_us, source = bytes_only.floor(PREFILL)
    assert floor_us == pytest.approx(PREFILL.nbytes / 4e6)
    assert source == "bytes only"
    assert "floors are from bytes only" in str(bytes_only)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_the_reading_kernel_compiles(arch: str) -> None:
    compiled = Compiler().compile(KernelSource.load(SOURCE), CompileOptions(arch))
    assert compiled.cubin


@pytest.fixture
def _reading_kernel(request: pytest.FixtureRequest) -> None:
    fake: FakeDriver | None = request.config.stash.get(FAKE, None)
    if fake is not None:
        EmulatedKernels(fake, SOURCE, ()).register()


@pytest.fixture
def stream(cuda_provider: CudaProvider) -> Iterator[Stream]:
    with closing(cuda_provider.open(MemoryGovernor())) as backend:
        yield backend.stream


class TestOnADevice:
    pytestmark = ON_CUDA

    @pytest.mark.parametrize("num_vectors", [0, 1, 4097, 200_003])
    @pytest.mark.usefixtures("_reading_kernel")
    def test_every_byte_is_read_once(self, cuda_provider: CudaProvider, num_vectors: int) -> None:
        words = np.random.default_rng(1).integers(0, 2**32, 4 * num_vectors, np.uint32)
        total = np.zeros(1, np.uint32)
        with ExitStack() as stack:
            backend = stack.enter_context(closing(cuda_provider.open(MemoryGovernor())))
            sizes = (max(16, words.nbytes), 4)
            values, checksum = (
                stack.enter_context(
                    closing(backend.allocate(size, role=Role.WORKSPACE, holder="test"))
                )
                for size in sizes
            )
            module = stack.enter_context(closing(ceilings.loaded(backend.stream)))
            copy_to_device(values.pointer, words, stream=backend.stream)
            fill_bytes(checksum.pointer, 0, 4, stream=backend.stream)
            launch = bound_read(module, values.pointer, checksum.pointer, words.nbytes)
            launch.enqueue(backend.stream)
            copy_to_host(total, checksum.pointer, stream=backend.stream)
            backend.synchronize()
        assert total[0] == words.sum(dtype=np.uint64) % 2**32

    @pytest.mark.usefixtures("_reading_kernel")
    def test_rates_are_measured(
        self, cuda_provider: CudaProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peers, "has_torch", lambda: False)
        found = measure_ceilings(cuda_provider, nbytes=2**20)
        assert found.read_bytes_per_s > 0
        assert found.copy_bytes_per_s > 0
        assert found.matrix_flops_per_s is None
