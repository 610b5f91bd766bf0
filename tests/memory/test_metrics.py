"""Check the figures for Prometheus: of one snapshot, and of the levels that were asked for."""

import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from nxrt.errors import LeaseRefusedError
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.metrics import GovernorCollector
from nxrt.memory.tier import HOST, Role
from tests.helpers.reserving import reserve

LIMIT = 1000


@pytest.fixture
def governor() -> MemoryGovernor:
    return MemoryGovernor(MemoryBudget.of(host={"limit": LIMIT, "watermark": "90%"}))


def samples(governor: MemoryGovernor, depth: int = 1) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(GovernorCollector(governor, depth=depth))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_metrics_read_one_snapshot(governor: MemoryGovernor) -> None:
    engine = governor.child("engine")
    inner = engine.child("request")
    weights = governor.record_committed(HOST, 900, role=Role.WEIGHTS, holder="w")
    with weights, reserve(inner, 90, role=Role.KV_CACHE), pytest.raises(LeaseRefusedError):
        reserve(engine, 11)
    with reserve(inner, 90, role=Role.KV_CACHE):
        found = samples(governor)
    process, below = ("process", "host"), ("process/engine", "host")
    assert found["nxrt_memory_used_bytes", *process] == 90
    assert found["nxrt_memory_limit_bytes", *process] == LIMIT
    assert found["nxrt_memory_available_bytes", *process] == 910
    assert found["nxrt_memory_peak_bytes", *process] == 990
    assert found["nxrt_memory_watermark_bytes", *process] == 900
    assert found["nxrt_memory_committed_bytes", *process] == 0
    assert found["nxrt_memory_oversubscribed_bytes", *process] == 0
    assert found["nxrt_memory_waiting", *process] == 0
    assert found["nxrt_memory_refused_total", *process] == 1
    assert found["nxrt_memory_refused_total", *below] == 1
    assert found["nxrt_memory_timed_out_total", *below] == 0
    assert found["nxrt_memory_cancelled_total", *below] == 0
    assert found["nxrt_memory_role_bytes", *below, "kv_cache"] == 90
    assert ("nxrt_memory_limit_bytes", *below) not in found
    assert not [key for key in found if "process/engine/request" in key]
    assert ("nxrt_memory_used_bytes", "process/engine/request", "host") in samples(governor, 2)


def test_metrics_are_not_imported_with_the_package() -> None:
    program = "import nxrt, sys; print('prometheus_client' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
