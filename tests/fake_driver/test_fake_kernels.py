"""Check the stand-ins of nxrt's kernels: a session on the double selects what the CPU selects."""

from pathlib import Path

import pytest

from nxrt import CudaProvider, DType
from nxrt.providers.cpu import CpuProvider
from tests.helpers.cases import drawn_case
from tests.helpers.fake_driver import FakeDriver
from tests.helpers.fake_kernels import SCORE, SELECT
from tests.helpers.targets import Target

pytestmark = pytest.mark.fake


@pytest.mark.parametrize("mode", ["eager", "captured"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=str)
def test_a_session_selects_what_the_reference_selects(
    fake_driver: FakeDriver, cache_dir: Path, dtype: DType, mode: str
) -> None:
    case = drawn_case("fake", dtype=dtype, num_queries=3, num_keys=70, top_k=9)
    before = fake_driver.snapshot()
    with CudaProvider(cache_dir=cache_dir) as provider:
        selected = Target(provider, mode).run(case, repeats=2)
    assert selected.tolist() == Target(CpuProvider(), "eager").run(case).tolist()
    assert fake_driver.snapshot().difference(before) == {}
    assert fake_driver.runs(SCORE) == fake_driver.runs(SELECT) > 0
