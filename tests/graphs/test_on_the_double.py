"""What no card can be asked for: planted failures, a lost context, the number of driver calls."""

import pytest

from nxrt import DriverError, select_provider
from tests.helpers.fake_driver import FakeDriver
from tests.helpers.graph_rig import Rig, bound, floats

pytestmark = pytest.mark.fake


@pytest.mark.parametrize("code", [2, 46, 101])
def test_auto_takes_the_cpu_where_the_device_cannot_be_used(
    fake_driver: FakeDriver, code: int
) -> None:
    fake_driver.fail("cuDevicePrimaryCtxRetain", code=code)
    choice = select_provider("auto")
    with choice.provider as provider:
        assert provider.name == "cpu"
        assert "cannot be used" in choice.reason


def test_a_failure_names_what_was_enqueued_since_the_last_wait(
    rig: Rig,
) -> None:
    with rig.session() as session:
        binding = bound(session, 8)
        for _ in range(3):
            session.run(binding)
        session.synchronize()
        session.run(binding)
        assert rig.fake is not None
        rig.fake.lose_contexts(719)
        with pytest.raises(DriverError) as failure:
            session.synchronize()
    (note,) = failure.value.__notes__
    assert note.endswith(": ['scale']")


def test_a_device_without_room_for_a_graph_runs_eagerly(rig: Rig) -> None:
    assert rig.fake is not None
    with rig.session() as session, bound(session, 8) as binding:
        session.run(binding)
        rig.fake.fail_always("cuGraphInstantiate", code=2)
        session.step(binding)
        assert session.step_stats.eager == 1
        rig.fake.clear_faults()
        session.step(binding)
        assert session.step_stats.captures == 1
        assert (binding.read("y") == 2 * floats(8)).all()


def test_closing_many_bindings_asks_the_driver_little(rig: Rig) -> None:
    assert rig.fake is not None
    with rig.session() as session:
        bindings = [bound(session, 8) for _ in range(100)]
        session.synchronize()
        rig.fake.set_lazy(True)
        for binding in bindings:
            session.run(binding)
        before = rig.fake.calls("cuEventQuery")
        for binding in bindings:
            binding.close()
        assert rig.fake.calls("cuEventQuery") - before <= 2 * 2 * len(bindings)
        assert rig.used == 100 * 2 * 32
        session.synchronize()
        assert rig.used == 0
