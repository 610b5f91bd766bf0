"""Tests marked gpu run where a device is, and are skipped elsewhere unless one is required.

With --fake-driver the tests marked fake run, and no others, on a test double of the driver. Those
that are marked both run in both worlds; without a device they are left to the double.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxrt.providers.cpu import CpuProvider
from nxrt.providers.cuda import CudaProvider
from nxrt.runtime import driver
from tests.helpers.emulated import NUM_ORDERS, host_compiler
from tests.helpers.fake_driver import FakeDriver, build, load
from tests.helpers.fake_kernels import register_all
from tests.helpers.targets import MAX_REPEATS, Target

IS_CUDA_REQUIRED = os.environ.get("NXRT_REQUIRE_CUDA") == "1"
FAKE = pytest.StashKey[FakeDriver]()
ON_CUDA = [pytest.mark.gpu, pytest.mark.fake(is_quick_only=True)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fake-driver",
        action="store_true",
        help="run the tests marked fake, on a test double of the CUDA driver (needs cc and c++)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fake-driver"):
        try:
            host_compiler()  # each test would ask for it
            config.stash[FAKE] = load(build(Path(config.rootpath, ".pytest_cache", "fake-driver")))
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_report_header(config: pytest.Config) -> str:
    if FAKE in config.stash:
        return "driver: a test double; tests not marked fake are deselected"
    return "driver: the real one; tests that need its double are deselected (--fake-driver)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_double = FAKE in config.stash
    has_device = not is_double and (IS_CUDA_REQUIRED or driver.probe().is_available)

    def runs(item: pytest.Item) -> bool:
        fake = item.get_closest_marker("fake")
        if is_double and fake is not None and fake.kwargs.get("is_quick_only", False):
            return item.get_closest_marker("slow") is None
        is_for_double = fake is not None
        if is_double or not is_for_double:
            return is_for_double == is_double
        return has_device and item.get_closest_marker("gpu") is not None

    deselected = [item for item in items if not runs(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if runs(item)]


@pytest.fixture(autouse=True)
def _require_device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None:
        require_cuda()


@pytest.fixture(autouse=True)
def _checked_driver(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begin every test on the double afresh, and fail it where it misused the driver."""
    fake = request.config.stash.get(FAKE, None)
    if fake is None:
        yield
        return
    fake.reset()
    register_all(fake)
    yield
    fake.clear_faults()
    fake.set_lazy(False)
    fake.restore_contexts()
    fake.check()


@pytest.fixture
def fake_driver(request: pytest.FixtureRequest, _checked_driver: None) -> FakeDriver:
    """Return the control of the double; there is none without --fake-driver."""
    return request.config.stash[FAKE]


def require_cuda() -> None:
    status = driver.probe()
    if status.is_available:
        return
    if IS_CUDA_REQUIRED:
        pytest.fail(f"NXRT_REQUIRE_CUDA=1 and {status.reason}")
    pytest.skip(status.reason)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a compile cache shared by a run's tests: its own, or that of NXRT_TEST_CACHE_DIR."""
    given = os.environ.get("NXRT_TEST_CACHE_DIR")
    return Path(given) if given else tmp_path_factory.mktemp("compile-cache")


@pytest.fixture(scope="session")
def cuda_provider(cache_dir: Path) -> Iterator[CudaProvider]:
    require_cuda()
    with CudaProvider(cache_dir=cache_dir) as provider:
        yield provider


@pytest.fixture(
    params=[
        "cpu-eager",
        pytest.param("cuda-eager", marks=ON_CUDA),
        pytest.param("cuda-captured", marks=ON_CUDA),
    ]
)
def target(request: pytest.FixtureRequest, _require_device: None) -> Target:
    """Run a test on the CPU, and on CUDA both eagerly and from a captured graph.

    The double runs the kernels' own sources on the host, in what is not slow; each launch of a
    kernel takes the next order of turns.
    """
    name, mode = request.param.split("-")
    if name == "cpu":
        return Target(CpuProvider(), mode)
    max_repeats = NUM_ORDERS if FAKE in request.config.stash else MAX_REPEATS
    return Target(request.getfixturevalue("cuda_provider"), mode, max_repeats)
