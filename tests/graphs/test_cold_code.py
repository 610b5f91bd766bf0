"""Code before a recording: compiled and loaded when the session is made, launched once before."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nxrt import CaptureDeclinedError, CudaProvider, Session
from nxrt.graph_cache import StepStats
from tests.helpers.cases import OUTPUT, drawn_case
from tests.helpers.fake_driver import FakeDriver
from tests.helpers.faulty_toys import Trouble
from tests.helpers.graph_rig import SUMMED, Rig, bound, floats, toys_plugin
from tests.helpers.sessions import write

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

CASE = drawn_case("cold", num_queries=2, num_keys=50, top_k=5)
PER_KERNEL = {"cuLaunchKernel", "cuLaunchCooperativeKernel", "cuStreamIsCapturing"}
"""What may be called between the begin and the end of a recording."""


def cold_rig(rig: Rig, folder: Path) -> Rig:
    """Return a rig whose provider has an empty compile cache; the caller closes it."""
    provider = CudaProvider(cache_dir=folder)
    provider.registry.register(toys_plugin(Trouble()))
    return Rig(provider, rig.fake, rig.trouble, rig.governor)


def called(fake: FakeDriver | None, action: Callable[..., object], *args: object) -> list[str]:
    """Return the driver calls that an action makes; none where there is no telling."""
    if fake is None:
        action(*args)
        return []
    with fake.traced() as calls:
        action(*args)
    return calls


def recorded(calls: list[str]) -> list[str]:
    """Return the calls between the begin and the end of a recording."""
    if not calls:
        return []
    begin, end = calls.index("cuStreamBeginCapture"), calls.index("cuStreamEndCapture")
    return [call for call in calls[begin + 1 : end] if "Ctx" not in call]


def test_a_cold_session_declines_to_record_until_it_has_run(rig: Rig, tmp_path: Path) -> None:
    cold = cold_rig(rig, tmp_path)
    with cold.provider, cold.session(SUMMED) as session, bound(session, 9) as binding:
        with pytest.raises(CaptureDeclinedError) as refusal:
            session.capture(binding)
        assert [name for name, _ in refusal.value.offenders] == ["scale", "sum"]
        for _ in range(3):
            session.step(binding)
            assert np.array_equal(binding.read("y"), np.cumsum(3 * floats(9)))
        assert session.step_stats == StepStats(eager=1, captures=1, replays=2)


def test_nothing_is_compiled_or_loaded_by_a_recording(rig: Rig, tmp_path: Path) -> None:
    traces = []
    for _ in ("cold", "warm"):
        opened = cold_rig(rig, tmp_path)
        with opened.provider, opened.session(SUMMED) as session, bound(session, 9) as binding:
            session.run(binding)
            session.synchronize()
            before = opened.provider.cache_stats
            calls = called(rig.fake, session.capture, binding)
            assert opened.provider.cache_stats == before
            assert set(recorded(calls)) <= PER_KERNEL
            traces.append(calls)
    assert traces[0] == traces[1]


def test_a_cold_selection_is_recorded_as_a_warm_one(rig: Rig, tmp_path: Path) -> None:
    traces = []
    for _ in ("cold", "warm"):
        opened = cold_rig(rig, tmp_path)
        with opened.provider, Session(CASE.graph, [opened.provider], rig.governor) as session:
            binding = session.bind()
            write(binding, CASE)
            session.step(binding)
            session.synchronize()
            before = opened.provider.cache_stats
            calls = called(rig.fake, session.step, binding)
            assert opened.provider.cache_stats == before
            assert session.step_stats == StepStats(eager=1, captures=1, replays=1)
            assert set(recorded(calls)) <= PER_KERNEL
            assert binding.read(OUTPUT).tobytes() == CASE.expected().tobytes()
            traces.append(calls)
    assert traces[0] == traces[1]
