"""DsaIndexSelect on a device: launches, workspace, capture, threads, faults."""

import threading
from typing import Any

import numpy as np
import pytest

from nxrt import (
    CaptureDeclinedError,
    CaptureError,
    CudaProvider,
    MemoryGovernor,
)
from nxrt.kernels.dsa_index_select.routes import BLOCK_T
from tests.helpers.cases import OUTPUT, IndexSelectCase, drawn_case
from tests.helpers.changed_kernels import changed_kernel
from tests.helpers.sessions import dynamic_session, kernel_of, running, workspace_bytes, write
from tests.helpers.targets import Target, poison_workspace
from tests.kernels.dsa_index_select.test_table import REAL_GEOMETRY, glm

pytestmark = [pytest.mark.gpu, pytest.mark.fake]


def test_real_geometry_takes_one_launch_of_many_blocks(cuda_provider: CudaProvider) -> None:
    with running(cuda_provider, REAL_GEOMETRY) as (session, binding, guarded):
        session.run(binding)
        assert guarded.read().tobytes() == REAL_GEOMETRY.expected().tobytes()
        stats = kernel_of(session).stats
        counts = (stats.filter_launches, stats.score_launches, stats.select_launches)
        assert counts == (1, 0, 0)
        assert stats.last_filter_grid == -(-2304 // 224)  # a warp of each block has the sample


def test_without_the_filter_it_takes_two(cuda_provider: CudaProvider) -> None:
    with (
        changed_kernel(cuda_provider, has_filter=False),
        running(cuda_provider, REAL_GEOMETRY) as (session, binding, guarded),
    ):
        session.run(binding)
        assert guarded.read().tobytes() == REAL_GEOMETRY.expected().tobytes()
        stats = kernel_of(session).stats
        assert (stats.score_launches, stats.select_launches) == (1, 1)
        assert (stats.last_score_grid, stats.last_select_grid) == (2304 // BLOCK_T, 1)


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_a_small_grid_turns_its_loops(cuda_provider: CudaProvider, limit: int, mode: str) -> None:
    case = drawn_case("grid", num_queries=5, num_keys=521, top_k=4)
    with changed_kernel(cuda_provider, grid_limit=limit):
        assert Target(cuda_provider, mode).run(case).tobytes() == case.expected().tobytes()
        with running(cuda_provider, case) as (session, binding, _):
            session.run(binding)
            stats = kernel_of(session).stats
            assert (stats.last_score_grid, stats.last_select_grid) == (limit, limit)


def test_workspace_is_allocated_once_and_stays(cuda_provider: CudaProvider) -> None:
    with running(cuda_provider, glm("twice", 1, 12)) as (session, binding, _):
        workspace = kernel_of(session).workspace
        pointers = []
        for _ in range(2):
            session.run(binding)
            assert workspace.block is not None
            pointers.append(workspace.block.pointer)
        assert workspace.block is not None
        assert (workspace.block.nbytes, workspace.num_allocations) == (512, 1)
        assert pointers[0] == pointers[1]


def test_a_captured_graph_has_two_nodes_and_sees_new_inputs(cuda_provider: CudaProvider) -> None:
    first, second = glm("seed-1", 4, 12, seed=1), glm("seed-2", 4, 12, seed=2)
    governor = MemoryGovernor()
    with running(cuda_provider, first, governor) as (session, binding, guarded):
        session.run(binding)
        graph = session.capture(binding)
        assert graph.num_nodes == 2
        before = (governor.snapshot(), cuda_provider.cache_stats, kernel_of(session).stats)
        for case in (second, first, second):
            for name, array in case.inputs.items():
                binding.write(name, array)
            guarded.poison()
            graph.replay()
            assert guarded.read().tobytes() == case.expected().tobytes()
        after = (governor.snapshot(), cuda_provider.cache_stats, kernel_of(session).stats)
        assert after == before
        assert session.num_replays == 3


def test_capture_is_declined_before_a_real_launch(cuda_provider: CudaProvider) -> None:
    case = glm("cold", 2, 9)
    with running(cuda_provider, case) as (session, binding, guarded):
        with pytest.raises(CaptureDeclinedError, match="DsaIndexSelect: it has not been launched"):
            session.capture(binding)
        session.run(binding)
        graph = session.capture(binding)
        guarded.poison()
        graph.replay()
        assert guarded.read().tobytes() == case.expected().tobytes()


def test_zero_rows_do_not_count_as_warm(cuda_provider: CudaProvider) -> None:
    case = drawn_case("no-rows", batch=0, num_queries=2, num_keys=9, top_k=4)
    with running(cuda_provider, case) as (session, binding, _):
        session.run(binding)
        assert kernel_of(session).stats.executions == 0
        assert kernel_of(session).workspace.block is None
        with pytest.raises(CaptureDeclinedError, match="at least one row"):
            session.capture(binding)


def test_an_execution_without_keys_warms_only_its_like(cuda_provider: CudaProvider) -> None:
    with (
        dynamic_session(cuda_provider, MemoryGovernor()) as session,
        session.bind({"T": 0}) as empty,
        session.bind({"T": 12}) as narrow,
    ):
        session.run(empty)
        assert kernel_of(session).stats.score_launches == 0
        with pytest.raises(CaptureDeclinedError, match="one key"):
            session.capture(narrow)
        assert session.capture(empty).num_nodes == 1


def test_a_larger_shape_is_declined_with_its_bytes_and_the_old_graph_replays(
    cuda_provider: CudaProvider,
) -> None:
    small = drawn_case("small", num_queries=1, num_keys=12, top_k=4)
    with (
        dynamic_session(cuda_provider, MemoryGovernor()) as session,
        session.bind({"T": 12}) as narrow,
        session.bind({"T": 8192}) as wide,
    ):
        write(narrow, small)
        session.run(narrow)
        graph = session.capture(narrow)
        with pytest.raises(CaptureDeclinedError, match="has 512 B and this shape needs 40,960 B"):
            session.capture(wide)
        graph.replay()
        assert narrow.read(OUTPUT).tobytes() == small.expected().tobytes()


def test_growth_inside_capture_is_refused_even_without_the_audit(
    cuda_provider: CudaProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = drawn_case("large", num_queries=1, num_keys=8192, top_k=4)
    with (
        dynamic_session(cuda_provider, MemoryGovernor()) as session,
        session.bind({"T": 12}) as narrow,
        session.bind({"T": 8192}) as wide,
    ):
        write(wide, case)
        session.run(narrow)
        monkeypatch.setattr(session, "_audit", lambda _: None)
        with pytest.raises(CaptureError, match="40,960 B and has 512 B") as failure:
            session.capture(wide)
        assert failure.value.kernel == "DsaIndexSelect"
        session.run(wide)
        graph = session.capture(wide)
        wide.write(OUTPUT, np.zeros(case.output_shape, np.int64))
        graph.replay()
        assert wide.read(OUTPUT).tobytes() == case.expected().tobytes()


def test_growth_after_capture_keeps_the_old_graph_valid(cuda_provider: CudaProvider) -> None:
    governor = MemoryGovernor()
    small = drawn_case("small", num_queries=1, num_keys=12, top_k=4)
    large = drawn_case("large", num_queries=1, num_keys=8192, top_k=4)
    with (
        dynamic_session(cuda_provider, governor) as session,
        session.bind({"T": 12}) as narrow,
        session.bind({"T": 8192}) as wide,
    ):
        write(narrow, small)
        write(wide, large)
        session.run(narrow)
        graph = session.capture(narrow)
        session.run(wide)
        assert wide.read(OUTPUT).tobytes() == large.expected().tobytes()
        assert workspace_bytes(governor) == 512 + 40_960
        poison_workspace(session)
        graph.replay()
        assert narrow.read(OUTPUT).tobytes() == small.expected().tobytes()
        graph.close()
        session.capture(wide).close()  # takes over the larger block
        session.synchronize()
        assert workspace_bytes(governor) == 40_960


def test_threads_take_turns_on_one_session(cuda_provider: CudaProvider) -> None:
    """Each with other data and another number of keys: arguments must not be mixed up."""
    sizes = (700, 64, 1500, 333)
    cases = [drawn_case(str(n), num_queries=1, num_keys=n, top_k=4, seed=n) for n in sizes]
    failures: list[str] = []
    with dynamic_session(cuda_provider, MemoryGovernor()) as session:

        def work(case: IndexSelectCase, num_keys: int) -> None:
            with session.bind({"T": num_keys}) as binding:
                write(binding, case)
                for index in range(20):
                    (session.run if index % 2 else session.step)(binding)
                    if binding.read(OUTPUT).tobytes() != case.expected().tobytes():
                        failures.append(case.id)

        run_threads([lambda c=c, n=n: work(c, n) for c, n in zip(cases, sizes, strict=True)])
    assert not failures


def test_two_sessions_on_two_streams_do_not_disturb_each_other(
    cuda_provider: CudaProvider,
) -> None:
    cases = [
        drawn_case("a", num_queries=3, num_keys=900, top_k=50, seed=1),
        drawn_case("b", num_queries=2, num_keys=5000, top_k=70, seed=2),
    ]
    failures: list[str] = []

    def work(case: IndexSelectCase) -> None:
        with running(cuda_provider, case) as (session, binding, guarded):
            session.run(binding)
            for _ in range(20):
                guarded.poison()
                session.run(binding)
                if guarded.read().tobytes() != case.expected().tobytes():
                    failures.append(case.id)

    run_threads([lambda case=case: work(case) for case in cases])
    assert not failures


def run_threads(actions: list[Any]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
