"""DsaIndexSelect on a device, when something fails or does not fit: nothing is left behind."""

from typing import Any

import pytest

from nxrt import (
    AllocationFailedError,
    CudaProvider,
    DriverError,
    InvalidNodeError,
    LeaseRefusedError,
    MemoryBudget,
    MemoryGovernor,
    TensorView,
    device_tier,
)
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES
from nxrt.runtime.device_memory import DeviceAllocator
from nxrt.runtime.module import BoundLaunch
from nxrt.runtime.stream import Stream
from nxrt.tensor import DType
from tests.helpers.cases import OUTPUT, drawn_case
from tests.helpers.sessions import dynamic_session, kernel_of, running, workspace_bytes, write
from tests.kernels.dsa_index_select.test_table import glm

pytestmark = [pytest.mark.gpu, pytest.mark.fake]


def test_a_refused_workspace_leaves_everything_as_it_was(cuda_provider: CudaProvider) -> None:
    budget = MemoryBudget.of(device=560_000)
    governor = MemoryGovernor(budget)
    small = drawn_case("small", num_queries=1, num_keys=12, top_k=4)
    with (
        dynamic_session(cuda_provider, governor) as session,
        session.bind({"T": 12}) as narrow,
        session.bind({"T": 14_000}) as wide,
    ):
        write(narrow, small)
        session.run(narrow)
        before = governor.usage(device_tier(0)).used
        with pytest.raises(LeaseRefusedError, match="DsaIndexSelect"):
            session.run(wide)
        assert governor.usage(device_tier(0)).used == before
        session.run(narrow)
        assert narrow.read(OUTPUT).tobytes() == small.expected().tobytes()
    assert governor.usage(device_tier(0)).used == 0


def test_a_failing_allocation_keeps_the_published_workspace(
    cuda_provider: CudaProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    governor = MemoryGovernor()
    with (
        dynamic_session(cuda_provider, governor) as session,
        session.bind({"T": 12}) as narrow,
        session.bind({"T": 8192}) as wide,
    ):
        session.run(narrow)
        block = kernel_of(session).workspace.block
        with monkeypatch.context() as patch:
            patch.setattr(DeviceAllocator, "allocate", fail_with(MemoryError("planted")))
            with pytest.raises(AllocationFailedError, match="planted"):
                session.run(wide)
        assert kernel_of(session).workspace.block is block
        assert workspace_bytes(governor) == 512
        session.run(wide)


@pytest.mark.parametrize("launch_index", [0, 1])
def test_a_failing_launch_keeps_the_published_workspace(
    cuda_provider: CudaProvider, monkeypatch: pytest.MonkeyPatch, launch_index: int
) -> None:
    governor = MemoryGovernor()
    with (
        dynamic_session(cuda_provider, governor) as session,
        session.bind({"T": 12}) as narrow,
        session.bind({"T": 8192}) as wide,
    ):
        session.run(narrow)
        block, stats = kernel_of(session).workspace.block, kernel_of(session).stats
        real = BoundLaunch.enqueue
        calls = iter(range(9))

        def failing_enqueue(launch: BoundLaunch, stream: Stream) -> None:
            if next(calls) == launch_index:
                raise DriverError(code=1, name="PLANTED", call="cuLaunchKernel", explanation="")
            real(launch, stream)

        with monkeypatch.context() as patch:
            patch.setattr(BoundLaunch, "enqueue", failing_enqueue)
            with pytest.raises(DriverError, match="PLANTED"):
                session.run(wide)
        assert kernel_of(session).workspace.block is block
        assert kernel_of(session).stats.executions == stats.executions
        assert workspace_bytes(governor) == 512
        session.run(wide)
        session.synchronize()


def fail_with(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_strided_device_tensors_are_refused(cuda_provider: CudaProvider) -> None:
    case = glm("strided", 2, 9)
    with running(cuda_provider, case) as (session, binding, guarded):
        query = binding.view("query")
        strides = (*query.strides[:-2], 1, query.shape[2])
        turned = TensorView(query.storage, query.dtype, query.shape, strides)
        inputs = [turned, *(binding.view(n) for n in ("key", "weights", "attention_bias"))]
        with pytest.raises(InvalidNodeError, match="query layout"):
            kernel_of(session).execute(
                inputs, [guarded.view], stream=session._backend.stream
            )  # fmt: skip


def test_host_tensors_are_refused_on_the_device(cuda_provider: CudaProvider) -> None:
    case = glm("host", 2, 9)
    with running(cuda_provider, case) as (session, _, guarded):
        inputs = [TensorView.of_array(array) for array in case.inputs.values()]
        with pytest.raises(ValueError, match="accepted: cuda:0"):
            kernel_of(session).execute(inputs, [guarded.view], stream=session._backend.stream)


def test_tensors_of_another_dtype_than_compiled_for_are_refused(
    cuda_provider: CudaProvider,
) -> None:
    half, single = glm("half", 1, 9, dtype=DType.F16), glm("single", 1, 9)
    with running(cuda_provider, single) as (_, binding, guarded):
        inputs = [binding.view(name) for name in INPUT_NAMES]
        with (
            running(cuda_provider, half) as (session, _, _),
            pytest.raises(InvalidNodeError, match="created for"),
        ):
            kernel_of(session).execute(inputs, [guarded.view], stream=session._backend.stream)
