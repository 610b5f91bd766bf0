"""Bad data that kernels meet on the device: reported once, with node and step, and never lost."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from nxrt import Binding, CaptureError, DType, Role, Session, TensorSpec
from nxrt.errors import DeviceFaultError
from nxrt.runtime.error_latch import SOURCE
from tests.helpers.cuda_toys import NEGATIVE, PAST, toy_node
from tests.helpers.graph_rig import SUMMED, Rig, backend_of, bound, floats

pytestmark = [pytest.mark.gpu, pytest.mark.fake]

NUM_X = 6
GOOD, BELOW, BEYOND = [0, 5, 2], [1, -3, 4], [0, 1, NUM_X]
INPUTS = {
    "x": TensorSpec(DType.F32, (NUM_X,)),
    "i": TensorSpec(DType.I64, ("N",)),
    "j": TensorSpec(DType.I64, ("N",)),
}
GATHERING = (
    toy_node("Gather", "x", "i", output="y", name="gather i"),
    toy_node("Gather", "x", "j", output="z", name="gather j"),
)


@pytest.fixture
def session(rig: Rig) -> Iterator[Session]:
    with rig.session(GATHERING, INPUTS) as session:
        yield session


@pytest.fixture
def binding(session: Session) -> Iterator[Binding]:
    with session.bind({"N": 3}) as binding:
        binding.write("x", floats(NUM_X))
        aim(binding)
        yield binding


def aim(binding: Binding, i: list[int] = GOOD, j: list[int] = GOOD) -> None:
    """Write both indices."""
    binding.write("i", np.array(i, np.int64))
    binding.write("j", np.array(j, np.int64))


def fault_of(read: Any, *arguments: Any) -> DeviceFaultError:
    with pytest.raises(DeviceFaultError) as failure:
        read(*arguments)
    return failure.value


def test_good_data_reports_nothing(session: Session, binding: Binding) -> None:
    for _ in range(4):
        session.step(binding)
        assert np.array_equal(binding.read("y"), floats(NUM_X)[GOOD])
    session.synchronize()


@pytest.mark.parametrize(
    ("index", "bits", "meaning"),
    [(BELOW, 1, NEGATIVE), (BEYOND, 2, PAST), ([-1, 0, 99], 3, f"{NEGATIVE}; {PAST}")],
)
def test_a_fault_names_node_step_and_meaning_and_is_raised_once(
    session: Session, binding: Binding, index: list[int], bits: int, meaning: str
) -> None:
    session.run(binding)
    aim(binding, index)
    session.run(binding)
    fault = fault_of(binding.read, "y")
    assert (fault.node, fault.step, fault.bits, fault.meaning) == ("gather i", 1, bits, meaning)
    assert not hasattr(fault, "__notes__")
    assert np.array_equal(binding.read("z"), floats(NUM_X)[GOOD])
    session.synchronize()


@pytest.mark.parametrize("is_captured", [False, True], ids=["step", "capture"])
def test_the_step_is_that_of_the_fault_however_many_replays_follow(
    session: Session, binding: Binding, is_captured: bool
) -> None:
    session.run(binding)  # step 0
    replay = session.capture(binding).replay if is_captured else lambda: session.step(binding)
    for step in range(1, 12):
        aim(binding, BELOW if step in (4, 7) else GOOD)
        replay()
    fault = fault_of(session.synchronize)
    assert (fault.node, fault.step) == ("gather i", 4)
    replay()
    aim(binding, BEYOND)
    replay()
    fault = fault_of(session.synchronize)
    assert (fault.step, fault.meaning) == (13, PAST)


def test_faults_of_two_nodes_are_raised_together_earliest_first(
    session: Session, binding: Binding
) -> None:
    session.step(binding)
    aim(binding, GOOD, BEYOND)
    session.step(binding)
    aim(binding, BELOW, GOOD)
    session.step(binding)
    fault = fault_of(session.synchronize)
    assert (fault.node, fault.step) == ("gather j", 1)
    (note,) = fault.__notes__
    assert "'gather i' met bad data in step 2" in note
    session.synchronize()


def test_a_fault_outlives_the_graph_that_met_it(session: Session, binding: Binding) -> None:
    session.run(binding)
    graph = session.capture(binding)
    aim(binding, BELOW)
    graph.replay()
    graph.close()
    aim(binding)
    with closing(session.capture(binding)) as other:
        other.replay()
        session.step(binding)
    assert fault_of(binding.read, "y").step == 1
    session.synchronize()


def test_a_fault_outlives_the_binding_and_its_updated_graph(
    session: Session, binding: Binding
) -> None:
    session.step(binding)
    session.step(binding)
    aim(binding, BELOW)
    session.step(binding)
    binding.close()
    with session.bind({"N": 3}) as other:
        other.write("x", floats(NUM_X))
        aim(other)
        session.step(other)
        assert session.step_stats.updates == 1
        assert fault_of(other.read, "y").step == 2
        session.step(other)
        assert np.array_equal(other.read("y"), floats(NUM_X)[GOOD])


def test_a_failed_capture_loses_no_fault(session: Session, binding: Binding) -> None:
    session.run(binding)
    aim(binding, BELOW)
    session.run(binding)
    with pytest.raises(CaptureError, match="a stream was synchronized"):
        backend_of(session).capture(lambda _: session.synchronize(), resources=lambda: (), kept=())
    assert fault_of(session.synchronize).step == 1


def test_a_capture_alone_neither_counts_nor_reports(session: Session, binding: Binding) -> None:
    session.run(binding)
    aim(binding, BELOW)
    for _ in range(3):
        session.capture(binding)
    session.synchronize()
    session.run(binding)
    assert fault_of(session.synchronize).step == 1


def test_of_two_readers_exactly_one_is_told(session: Session, binding: Binding) -> None:
    session.run(binding)
    for step in range(1, 40):
        aim(binding, BELOW)
        session.step(binding)
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(binding.read, name) for name in ("y", "z")]
            errors = [read.exception() for read in reads]
        told = [error for error in errors if error is not None]
        assert [type(error) for error in told] == [DeviceFaultError]
        assert f"in step {step}" in str(told[0])


def test_sessions_report_apart(rig: Rig, session: Session, binding: Binding) -> None:
    with rig.session(GATHERING, INPUTS) as other, other.bind({"N": 3}) as theirs:
        theirs.write("x", floats(NUM_X))
        aim(theirs)
        aim(binding, BELOW)
        session.run(binding)
        other.run(theirs)
        other.synchronize()
        assert fault_of(session.synchronize).node == "gather i"


def latch_nbytes(rig: Rig) -> int:
    tiers = rig.governor.snapshot()
    held = [holder for tier in tiers for holder in tier.holders if holder.holder == "error latch"]
    assert all(holder.role is Role.WORKSPACE for holder in held)
    return sum(holder.used for holder in held)


def test_a_session_without_reporting_kernels_pays_nothing(rig: Rig) -> None:
    with rig.session(SUMMED) as session, bound(session, 5) as binding:
        session.run(binding)
        session.step(binding)
        binding.read("y")
        session.synchronize()
        assert latch_nbytes(rig) == 0
        with closing(session.capture(binding)) as graph:
            assert graph.num_nodes == 3  # scale, and the two of the sum
        if rig.fake is not None:
            assert rig.fake.runs("nxrt_latch_advance") == rig.fake.runs("nxrt_latch_take") == 0
            assert rig.fake.calls("cuModuleLoadData") == 2


def test_what_a_reporting_session_pays_is_charged_and_goes_back(rig: Rig) -> None:
    assert SOURCE.is_file()
    before = rig.figures()["pending"]
    with rig.session(GATHERING, INPUTS):
        assert latch_nbytes(rig) > 0
    assert latch_nbytes(rig) == before == 0


def test_a_fault_that_nobody_read_is_told_at_the_close(rig: Rig) -> None:
    session = rig.session(GATHERING, INPUTS)
    binding = session.bind({"N": 3})
    binding.write("x", floats(NUM_X))
    aim(binding, BELOW)
    session.run(binding)
    assert fault_of(session.close).node == "gather i"
    session.close()
