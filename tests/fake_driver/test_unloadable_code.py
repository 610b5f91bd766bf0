"""Code that the driver does not load: compiled anew once, and then said so."""

from pathlib import Path

import pytest

from nxrt import CompileError, CudaProvider, DriverError, MemoryGovernor, Session
from tests.helpers.cases import drawn_case
from tests.helpers.fake_driver import FakeDriver

pytestmark = pytest.mark.fake

CASE = drawn_case("unloadable", num_queries=1, num_keys=8, top_k=2)


def open_and_close(cache_dir: Path) -> CudaProvider:
    """Open a session over a cache folder; return the provider, closed, for its counts."""
    with CudaProvider(cache_dir=cache_dir) as provider:
        Session(CASE.graph, [provider], MemoryGovernor()).close()
        return provider


@pytest.mark.parametrize("code", [200, 209])
def test_an_entry_that_does_not_load_is_replaced_and_compiled_once(
    fake_driver: FakeDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    assert open_and_close(tmp_path).cache_stats.compilations == 1
    fake_driver.fail("cuModuleLoadData", code=code)
    stats = open_and_close(tmp_path).cache_stats
    assert (stats.compilations, stats.rejected_entries) == (1, 1)
    assert caplog.text.count("the driver does not load it") == 1
    assert open_and_close(tmp_path).cache_stats.compilations == 0


def test_code_that_never_loads_is_one_typed_error_and_leaves_nothing(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    before = fake_driver.snapshot()
    fake_driver.fail_always("cuModuleLoadData", code=209)
    with pytest.raises(CompileError, match="does not load") as failure:
        open_and_close(tmp_path)
    cause = failure.value.__cause__
    assert isinstance(cause, DriverError)
    assert cause.code == 209
    fake_driver.clear_faults()
    assert fake_driver.snapshot().difference(before) == {}
    open_and_close(tmp_path)
