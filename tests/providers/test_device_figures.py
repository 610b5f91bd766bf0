"""What the governor says is on the device is what the driver says, and nothing stays."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nxrt import CudaProvider, DType, Graph, MemoryGovernor, Node, Session, device_tier
from nxrt.cli.decode import Progress, run_decode
from nxrt.cli.job import load_job
from nxrt.cli.trace import load_trace
from nxrt.errors import AllocationFailedError
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES, input_specs
from nxrt.memory.tier import Role
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime import driver
from nxrt.runtime.device import Device

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

GRANULE_NBYTES = 2**21
"""What the driver takes at a time; smaller allocations share one. Seen on an H200, 2026-11-30."""

JOB = Path(__file__).parents[2] / "examples" / "glm_decode.toml"


class DriverFigure:
    """Ask the driver how many bytes it has handed out since the last look."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free = self._read()

    def _read(self) -> int:
        return int(self._device.create(driver.api.cuMemGetInfo)[0])

    def taken(self) -> int:
        return self._free - self._read()


@pytest.fixture
def device() -> Iterator[Device]:
    opened = Device(0)
    yield opened
    opened.close()


def session_of(provider: CudaProvider, governor: MemoryGovernor, num_keys: int) -> Session:
    specs = input_specs(DType.F32, B=1, S=1, T=num_keys, H=4, D=128)
    node = Node(
        "DsaIndexSelect", INPUT_NAMES, ("selected",), "pkg.nxrt", {"top_k": 8, "scale": 0.1}
    )
    return Session(Graph((node,), specs, ("selected",)), [provider], governor)


def step_a_while(session: Session) -> None:
    with session.bind() as binding:
        for _ in range(4):
            session.step(binding)
        binding.read("selected")


@pytest.fixture
def neighbour(cuda_provider: CudaProvider) -> Iterator[None]:
    """Hold a small session open: the driver's own pools and the kernels' code are then there."""
    with session_of(cuda_provider, MemoryGovernor(), 100) as session, session.bind() as binding:
        session.run(binding)
        session.capture(binding).replay()
        session.synchronize()
        yield


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("num_keys", [1_000, 65_536, 200_000])
def test_a_session_takes_from_the_driver_what_it_is_charged(
    cuda_provider: CudaProvider, device: Device, num_keys: int
) -> None:
    governor = MemoryGovernor()
    figure = DriverFigure(device)
    with session_of(cuda_provider, governor, num_keys) as session, session.bind() as binding:
        session.run(binding)
        graph = session.capture(binding)
        graph.replay()
        session.synchronize()
        charged = governor.usage(device_tier(0)).used
        assert abs(figure.taken() - charged) <= GRANULE_NBYTES
        assert charged > num_keys * 128 * 4
    assert governor.usage(device_tier(0)).used == 0
    assert abs(figure.taken()) <= GRANULE_NBYTES


@pytest.mark.usefixtures("neighbour")
def test_the_decode_job_is_charged_what_the_driver_gives(device: Device) -> None:
    job = load_job(JOB, provider="cuda", top_k=None, budgets={})
    trace = load_trace(job.trace_path)
    figure, taken = DriverFigure(device), []

    def look(progress: Progress) -> None:
        if progress.phase == "decode" and progress.done == progress.total:
            taken.append(figure.taken())

    result = run_decode(job, trace, look)
    (tier,) = [tier for tier in result.memory if tier.tier == device_tier(0)]
    assert abs(taken[0] - tier.used) <= GRANULE_NBYTES
    assert result.released
    assert abs(figure.taken()) <= GRANULE_NBYTES


def test_a_full_device_is_a_typed_error_and_everything_goes_on(
    cuda_provider: CudaProvider, device: Device
) -> None:
    """A caught refusal keeps nothing alive, even while somebody holds the exception."""
    governor, errors = MemoryGovernor(), []
    with session_of(cuda_provider, governor, 1_000) as session:
        step_a_while(session)
        session.synchronize()
        before = governor.usage(device_tier(0)).used
        backend = session.provider_session
        assert isinstance(backend, CudaProviderSession)
        free = int(device.create(driver.api.cuMemGetInfo)[0])
        for _ in range(5):
            with pytest.raises(AllocationFailedError) as failure:
                backend.allocate(free + 2**20, role=Role.KV_CACHE, holder="too much")
            errors.append(failure.value)
            with backend.allocate(2**20, role=Role.KV_CACHE, holder="enough"):
                step_a_while(session)
        session.synchronize()
        assert governor.usage(device_tier(0)).used == before
        assert np.unique([error.requested for error in errors]).size == 1
