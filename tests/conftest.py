"""Tests marked gpu run where a device is, and are skipped elsewhere unless one is required."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxrt.providers.cpu import CpuProvider
from nxrt.providers.cuda import CudaProvider
from nxrt.runtime import driver
from tests.helpers.targets import Target

IS_CUDA_REQUIRED = os.environ.get("NXRT_REQUIRE_CUDA") == "1"


@pytest.fixture(autouse=True)
def _require_device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None:
        require_cuda()


def require_cuda() -> None:
    status = driver.probe()
    if status.is_available:
        return
    if IS_CUDA_REQUIRED:
        pytest.fail(f"NXRT_REQUIRE_CUDA=1 and {status.reason}")
    pytest.skip(status.reason)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a compile cache of this test run's own, shared by its tests."""
    return tmp_path_factory.mktemp("compile-cache")


@pytest.fixture(scope="session")
def cuda_provider(cache_dir: Path) -> Iterator[CudaProvider]:
    require_cuda()
    with CudaProvider(cache_dir=cache_dir) as provider:
        yield provider


@pytest.fixture(
    params=[
        "cpu-eager",
        pytest.param("cuda-eager", marks=pytest.mark.gpu),
        pytest.param("cuda-captured", marks=pytest.mark.gpu),
    ]
)
def target(request: pytest.FixtureRequest, _require_device: None) -> Target:
    """Run a test on the CPU, and on CUDA both eagerly and from a captured graph."""
    name, mode = request.param.split("-")
    if name == "cpu":
        return Target(CpuProvider(), mode)
    return Target(request.getfixturevalue("cuda_provider"), mode)
