"""What calls cost is measured to the end, whatever the kernels' launches are."""

import pytest

from benchmarks import host_cost
from benchmarks.cases import IndexSelectShape
from nxrt import CudaProvider

pytestmark = [pytest.mark.gpu, pytest.mark.fake]


def test_every_call_has_its_bare_one_beside_it(
    cuda_provider: CudaProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_cost, "BATCH", 2)
    monkeypatch.setattr(host_cost, "ROUNDS", 3)
    monkeypatch.setattr(host_cost, "SMALL", IndexSelectShape(1, 1, 300, H=8, K=20))
    rows = host_cost.measure_host_cost(cuda_provider)
    assert len(rows) == 4
    assert all(row.bare_us > 0 for row in rows)
