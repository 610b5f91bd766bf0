"""Check sessions and bindings on the CPU with toy kernels: placement, copies, clean ends."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nxrt.binding import Binding
from nxrt.errors import (
    CaptureDeclinedError,
    ClosedError,
    InvalidInputError,
    LeaseRefusedError,
    NxrtError,
    PluginError,
    UnsupportedGraphError,
)
from nxrt.graph import Graph, Node
from nxrt.kernels.api import KernelMatch
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.tier import HOST, Role
from nxrt.placement import Placement
from nxrt.providers.cpu import CpuProvider, CpuProviderSession
from nxrt.session import Session
from nxrt.storage import DeviceId, DeviceType, ForeignStorage
from nxrt.tensor import DType, TensorSpec, TensorView
from tests.helpers.toy_kernels import (
    DOMAIN,
    KERNEL_NBYTES,
    StubFactory,
    ToyFactory,
    Toys,
    X,
    add,
    double,
    raising,
    toy_node,
    toy_provider,
)

DOUBLE = toy_node("Double", "x", output="y")
ON_DEVICE = TensorView(ForeignStorage(256, 12, DeviceId(DeviceType.CUDA)), DType.F32, (3,))
CHAIN = (DOUBLE, toy_node("Add", "y", None, "x", output="z"))


@pytest.fixture
def toys() -> Toys:
    return Toys()


@pytest.fixture
def session(toys: Toys) -> Iterator[Session]:
    with toys.session(*CHAIN) as session:
        yield session


@pytest.fixture
def binding(session: Session) -> Iterator[Binding]:
    with session.bind({"N": 3}) as binding:
        yield binding


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def graph_of(*nodes: Node) -> Graph:
    return Graph(nodes, {"x": X}, ())


def stub_session(toys: Toys, stub: StubFactory) -> Session:
    """Return a session of a good node and one of the stub."""
    return toys.session(DOUBLE, toy_node("Stub", "y", output="z", name="bad"), Stub=stub)


def test_nodes_run_in_order_and_pass_values_on(session: Session, binding: Binding) -> None:
    binding.write("x", floats(1, 2, 3))
    session.run(binding)
    assert binding.read("y").tolist() == [2, 4, 6]
    assert binding.read("z").tolist() == [3, 6, 9]


def test_bindings_of_different_sizes_do_not_disturb_each_other(session: Session) -> None:
    with session.bind({"N": 1}) as small, session.bind({"N": 2}) as large:
        small.write("x", floats(1))
        large.write("x", floats(2, 3))
        session.run(large)
        session.run(small)
        assert (small.read("z").tolist(), large.read("z").tolist()) == ([3], [6, 9])


def test_binding_of_size_zero_runs(session: Session) -> None:
    with session.bind({"N": 0}) as binding:
        session.run(binding)
        assert binding.read("z").shape == (0,)


def test_omitted_input_arrives_as_none(session: Session, binding: Binding, toys: Toys) -> None:
    binding.write("x", floats(1, 2, 3))
    session.run(binding)
    assert [view is None for view in toys.journal.inputs[1]] == [False, True, False]


def test_omitted_input_is_none_when_it_is_claimed(toys: Toys) -> None:
    node = toy_node("Double", None, "x", output="y")
    with pytest.raises(UnsupportedGraphError, match="the first input is missing"):
        toys.session(node)


def test_placements_say_who_serves_what(session: Session) -> None:
    assert session.placements == (
        Placement("Double", "cpu", "toy", f"{DOMAIN}::Double v1"),
        Placement("Add", "cpu", "toy", f"{DOMAIN}::Add v1"),
    )


def test_kernels_of_two_nodes_of_one_operator_can_both_be_inspected(toys: Toys) -> None:
    nodes = toy_node("Double", "x", output="y"), toy_node("Double", "y", output="z")
    with toys.session(*nodes) as session:
        assert len(session.kernels) == 2


def test_first_provider_that_takes_every_node_is_chosen(toys: Toys) -> None:
    lacking, complete = CpuProvider(), toys.provider()
    with Session(graph_of(*CHAIN), [lacking, complete], toys.governor) as session:
        assert session.provider is complete


def test_session_needs_a_provider(toys: Toys) -> None:
    with pytest.raises(InvalidInputError, match="providers: got none"):
        Session(graph_of(*CHAIN), [], toys.governor)


def test_unsupported_graph_lists_the_decline_of_every_provider(toys: Toys) -> None:
    refusing = StubFactory(on_claim=lambda: KernelMatch.declined("never on Sundays"))
    providers = [CpuProvider(), toy_provider({"Double": refusing})]
    with pytest.raises(UnsupportedGraphError) as caught:
        Session(graph_of(DOUBLE), providers, toys.governor)
    first, second = caught.value.declines
    assert f"cpu declines 'Double': {DOMAIN}::Double is not registered" in first
    assert second == "cpu declines 'Double': never on Sundays"


def test_unsupported_graph_lists_the_decline_of_every_node(toys: Toys) -> None:
    nodes = [toy_node(op, "x", output=op.lower()) for op in ("Missing", "Double", "Absent")]
    with pytest.raises(UnsupportedGraphError) as caught:
        toys.session(*nodes)
    starts = [decline.split(":")[0] for decline in caught.value.declines]
    assert starts == ["cpu declines 'Missing'", "cpu declines 'Absent'"]


def test_unsupported_graph_creates_nothing(toys: Toys) -> None:
    nodes = toy_node("Double", "x", output="y"), toy_node("Missing", "x", output="z")
    with pytest.raises(UnsupportedGraphError):
        toys.session(*nodes)
    assert (toys.journal.events, toys.used) == ([], 0)


@pytest.mark.parametrize("outputs", [(), (X, X)], ids=["too few", "too many"])
def test_claim_with_a_wrong_number_of_outputs_is_a_plugin_error(
    toys: Toys, outputs: tuple[TensorSpec, ...]
) -> None:
    stub = StubFactory(on_claim=lambda: KernelMatch.supported(outputs))
    with pytest.raises(PluginError, match="claim of 'bad'"):
        stub_session(toys, stub)


def test_stray_error_in_create_is_a_plugin_error_with_its_cause(toys: Toys) -> None:
    cause = ValueError("bug")
    with pytest.raises(PluginError) as caught:
        stub_session(toys, StubFactory(on_create=raising(cause)))
    assert (caught.value.plugin, caught.value.action) == ("toy", "create of 'bad'")
    assert caught.value.__cause__ is cause


def test_typed_error_in_create_is_passed_on(toys: Toys) -> None:
    error = ClosedError("something")
    with pytest.raises(ClosedError) as caught:
        stub_session(toys, StubFactory(on_create=raising(error)))
    assert caught.value is error


@pytest.mark.parametrize("result", [None, "kernel", ToyFactory()], ids=["None", "str", "factory"])
def test_create_that_returns_no_kernel_is_a_plugin_error(toys: Toys, result: object) -> None:
    with pytest.raises(PluginError, match=r"create of 'bad': it returned .*, not a Kernel"):
        stub_session(toys, StubFactory(on_create=lambda: result))


@pytest.mark.parametrize("error", [ValueError("bug"), ClosedError("it"), KeyboardInterrupt()])
def test_failing_create_closes_every_earlier_kernel(toys: Toys, error: Any) -> None:
    with pytest.raises((NxrtError, KeyboardInterrupt)):
        stub_session(toys, StubFactory(on_create=raising(error)))
    assert toys.journal.events == ["create Double", "close Double"]
    assert (toys.governor.usage(HOST).peak, toys.used) == (KERNEL_NBYTES, 0)


def test_missing_dimension_is_refused(session: Session) -> None:
    with pytest.raises(InvalidInputError, match=r"dims\['N'\]: got nothing; accepted: a size"):
        session.bind()


def test_unknown_dimension_is_refused_and_the_known_named(session: Session) -> None:
    with pytest.raises(InvalidInputError, match="dims: got 'M'; accepted: N"):
        session.bind({"N": 1, "M": 2})


@pytest.mark.parametrize("size", [-1, True, 1.0, "3", None, 2**63])
def test_what_is_no_size_is_refused(session: Session, toys: Toys, size: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"dims\['N'\]: got .* accepted: an integer from 0"):
        session.bind({"N": size})
    assert toys.used == 2 * KERNEL_NBYTES


def test_numpy_size_is_a_size(session: Session) -> None:
    size: Any = np.int64(3)
    with session.bind({"N": size}) as binding:
        assert binding.view("x").shape == (3,)


def test_view_of_the_callers_array_is_used_without_copying(session: Session) -> None:
    x, z = floats(1, 2, 3), np.zeros(3, np.float32)
    views = {"x": TensorView.of_array(x), "z": TensorView.of_array(z)}
    with session.bind({"N": 3}, views=views) as binding:
        session.run(binding)
        assert z.tolist() == [3, 6, 9]
        x[:] = 1
        session.run(binding)
        assert z.tolist() == [3, 3, 3]


def test_view_of_the_callers_array_is_not_charged(session: Session, toys: Toys) -> None:
    before = toys.used
    views = {name: TensorView.of_array(floats(0, 0, 0)) for name in "xyz"}
    with session.bind({"N": 3}, views=views):
        assert toys.used == before


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (
            TensorView.of_array(np.zeros(3, np.int32)),
            r"view of x: got i32\[3\]; accepted: f32\[3\]",
        ),
        (TensorView.of_array(np.zeros(4, np.float32)), r"view of x: got f32\[4\]"),
        (ON_DEVICE, r"view of x: got memory on cuda:0; accepted: memory on cpu:0"),
    ],
    ids=["dtype", "shape", "device"],
)
def test_view_that_does_not_fit_is_refused(
    session: Session, view: TensorView, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        session.bind({"N": 3}, views={"x": view})


@pytest.mark.parametrize("what", ["views", "roles"])
def test_unknown_value_is_refused_and_the_known_named(session: Session, what: str) -> None:
    given: dict[str, Any] = {what: {"nobody": TensorView.of_array(floats(0))}}
    with pytest.raises(InvalidInputError, match=f"name in {what}: got 'nobody'; accepted: x, y, z"):
        session.bind({"N": 3}, **given)


def test_values_are_charged_for_what_they_are_held_for(session: Session, toys: Toys) -> None:
    with session.bind({"N": 3}, roles={"x": Role.KV_CACHE}):
        held = {h.holder: (h.role, h.used) for h in toys.governor.usage(HOST).holders}
    assert held["x"] == (Role.KV_CACHE, 12)
    assert held["y"] == (Role.ACTIVATION, 12)


def test_write_begins_at_the_offset(binding: Binding) -> None:
    binding.write("x", floats(1, 2, 3))
    binding.write("x", floats(9), offset=1)
    assert binding.read("x").tolist() == [1, 9, 3]


def test_write_takes_the_elements_row_major(binding: Binding) -> None:
    binding.write("x", floats(1, 2, 3)[::-1].reshape(1, 3).T)
    assert binding.read("x").tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("array", "offset"),
    [
        (np.zeros(3, np.float64), 0),
        (np.zeros(3, np.int32), 0),
        (floats(0, 0, 0, 0), 0),
        (floats(0), 3),
        (floats(0), -1),
        (floats(), 4),
    ],
    ids=["wider", "other kind", "too many", "past the end", "before the start", "nothing outside"],
)
def test_write_that_does_not_fit_is_refused_and_writes_nothing(
    binding: Binding, array: Any, offset: int
) -> None:
    binding.write("x", floats(1, 2, 3))
    with pytest.raises(InvalidInputError, match=r"x (dtype|elements): got"):
        binding.write("x", array, offset=offset)
    assert binding.read("x").tolist() == [1, 2, 3]


@pytest.mark.parametrize("use", ["read", "write"])
def test_copy_of_a_strided_view_is_refused(session: Session, use: str) -> None:
    views = {"x": TensorView.of_array(floats(1, 2, 3)[::-1])}
    with (
        session.bind({"N": 3}, views=views) as binding,
        pytest.raises(InvalidInputError, match="x layout: got strides"),
    ):
        binding.read("x") if use == "read" else binding.write("x", floats(1, 2, 3))


def test_what_was_read_does_not_follow_later_writes(binding: Binding) -> None:
    binding.write("x", floats(1, 2, 3))
    before = binding.read("x")
    binding.write("x", floats(7, 8, 9))
    assert before.tolist() == [1, 2, 3]


def test_unknown_value_cannot_be_read(binding: Binding) -> None:
    with pytest.raises(InvalidInputError, match="value: got 'nobody'; accepted: x, y, z"):
        binding.read("nobody")


def test_closed_binding_cannot_be_used(session: Session, binding: Binding) -> None:
    binding.close()
    with pytest.raises(ClosedError, match="binding is closed"):
        session.run(binding)
    with pytest.raises(ClosedError):
        binding.read("x")


def test_closed_session_cannot_be_used(toys: Toys) -> None:
    session = toys.session(*CHAIN)
    binding = session.bind({"N": 3})
    session.close()
    for use in (session.run, session.capture):
        with pytest.raises(ClosedError, match="session is closed"):
            use(binding)
    with pytest.raises(ClosedError, match="session is closed"):
        session.bind({"N": 3})
    binding.close()


def test_closing_a_session_closes_kernels_newest_first_then_the_provider_session(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = toys.journal.events
    monkeypatch.setattr(CpuProviderSession, "close", lambda _: events.append("close backend"))
    with toys.session(*CHAIN) as session:
        session.close()
    assert events[2:] == ["close Add", "close Double", "close backend"]


def test_capture_is_declined_before_anything_runs(
    session: Session, binding: Binding, toys: Toys
) -> None:
    with pytest.raises(CaptureDeclinedError) as caught:
        session.capture(binding)
    ((who, why),) = caught.value.offenders
    assert (who, "no graphs" in why) == ("cpu", True)
    assert toys.journal.events == ["create Double", "create Add"]
    assert (session.num_captures, session.num_replays) == (0, 0)


def test_error_of_a_kernel_names_the_node_and_the_session_goes_on(toys: Toys) -> None:
    failing = toys.factory(lambda _: raising(ZeroDivisionError("x"))())
    node = toy_node("Fail", "x", output="y", name="third")
    with toys.session(node, Fail=failing) as session, session.bind({"N": 1}) as binding:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) as caught:
                session.run(binding)
            assert caught.value.__notes__ == ["while running node 'third'"]


@pytest.mark.parametrize("limit", [0, 12, 35])
def test_budget_that_is_too_small_refuses_the_binding_and_keeps_nothing(limit: int) -> None:
    governor = MemoryGovernor(MemoryBudget.of(host=limit))
    provider = toy_provider({"Double": ToyFactory(double), "Add": ToyFactory(add)})
    with Session(graph_of(*CHAIN), [provider], governor) as session:
        with pytest.raises(LeaseRefusedError):
            session.bind({"N": 3})
        assert governor.usage(HOST).used == 0


def test_nothing_is_charged_after_everything_is_closed(toys: Toys) -> None:
    with toys.session(*CHAIN) as session, session.bind({"N": 3}) as binding:
        session.run(binding)
        assert toys.used == 2 * KERNEL_NBYTES + 3 * 12
    assert toys.used == 0
