"""Measuring on a device: captured, in turns, the straightforward kernel over the same inputs."""

import pytest

from benchmarks import index_select, peers
from benchmarks.cases import IndexSelectShape
from benchmarks.ceilings import Ceilings
from benchmarks.index_select import measure_cpu, measure_cuda, straightforward, timed_replays
from benchmarks.inputs import KeyPool, graph_of, opened
from nxrt import CpuProvider, CudaProvider, MemoryGovernor, Session
from tests.helpers.sessions import kernel_of

ON_CUDA = [pytest.mark.gpu, pytest.mark.fake]
SMALL = IndexSelectShape(1, 1, 96, H=8, D=64, K=16)


def test_the_cpu_is_measured_beside_a_product() -> None:
    with CpuProvider() as provider:
        found = measure_cpu(provider, SMALL, repeats=3)
    assert (found.repeats, found.floor) == (3, "one BLAS product")
    assert found.ratio == pytest.approx(found.median_us / found.floor_us)


class TestOnADevice:
    pytestmark = ON_CUDA

    @pytest.fixture(autouse=True)
    def _short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(index_select, "BUSY_NBYTES", 4096)
        monkeypatch.setattr(index_select, "REPEATS", 3)
        monkeypatch.setattr(index_select, "FEW_REPEATS", 6)
        monkeypatch.setattr(peers, "has_torch", lambda: False)

    def test_every_set_has_a_graph_and_takes_its_turn(self, cuda_provider: CudaProvider) -> None:
        with opened(cuda_provider, SMALL, 3) as (session, bindings):
            elapsed = timed_replays(session, bindings, 5)
            assert session.num_captures == 3
            per_event = index_select.REPLAYS_AT_ONCE
            assert session.num_replays == 3 + per_event * (index_select.WARM_UP + 5)
        assert len(elapsed) == 5
        assert min(elapsed) >= 0

    def test_a_row_has_the_straightforward_kernel_beside_it(
        self, cuda_provider: CudaProvider
    ) -> None:
        found = measure_cuda(cuda_provider, SMALL, Ceilings(1e12, 1e12), KeyPool([SMALL]))
        assert found.repeats == 3
        assert found.exact_us is not None
        assert found.torch_us is None

    def test_a_point_of_the_curve_has_no_rivals(self, cuda_provider: CudaProvider) -> None:
        ceilings, pool = Ceilings(1e12, 1e12), KeyPool([SMALL])
        found = measure_cuda(cuda_provider, SMALL, ceilings, pool, has_rivals=False)
        assert (found.exact_us, found.torch_us) == (None, None)

    def test_the_straightforward_kernel_filters_nothing(self, cuda_provider: CudaProvider) -> None:
        with straightforward(cuda_provider):
            session = Session(graph_of(SMALL), [cuda_provider], MemoryGovernor())
        with session, session.bind() as binding:
            session.run(binding)
            stats = kernel_of(session).stats
        assert (stats.score_launches, stats.select_launches, stats.filter_launches) == (1, 1, 0)
