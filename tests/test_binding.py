"""Whose memory a binding uses, who may write it, and when it ends."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

from nxrt import (
    HOST,
    ClosedError,
    CpuProvider,
    ForeignStorage,
    InvalidInputError,
    MemoryGovernor,
    Session,
    TensorView,
)
from nxrt.storage import CPU_DEVICE
from nxrt.tensor import DType
from tests.helpers.cases import OUTPUT, drawn_case

CASE = drawn_case("binding", num_queries=1, num_keys=5, top_k=2)


def read_only(array: Any) -> TensorView:
    array.setflags(write=False)
    return TensorView.of_array(array)


def test_read_only_inputs_are_computed_from() -> None:
    views = {name: read_only(array.copy()) for name, array in CASE.inputs.items()}
    with (
        Session(CASE.graph, [CpuProvider()], MemoryGovernor()) as session,
        session.bind(views=views) as binding,
    ):
        session.run(binding)
        assert binding.read(OUTPUT).tobytes() == CASE.expected().tobytes()


def test_read_only_inputs_cannot_be_written() -> None:
    key = CASE.inputs["key"].copy()
    with (
        Session(CASE.graph, [CpuProvider()], MemoryGovernor()) as session,
        session.bind(views={"key": read_only(key)}) as binding,
        pytest.raises(InvalidInputError, match="key: got read-only memory"),
    ):
        binding.write("key", np.zeros_like(key))


def test_read_only_outputs_are_refused() -> None:
    output = read_only(np.zeros(CASE.output_shape, np.int64))
    with (
        Session(CASE.graph, [CpuProvider()], MemoryGovernor()) as session,
        pytest.raises(InvalidInputError, match=f"{OUTPUT}: got read-only memory"),
    ):
        session.bind(views={OUTPUT: output})


def test_foreign_memory_says_itself_that_it_is_read_only() -> None:
    array = np.arange(4, dtype=np.float32)
    address = array.__array_interface__["data"][0]
    storage = ForeignStorage(address, array.nbytes, CPU_DEVICE, array, is_read_only=True)
    view = TensorView(storage, DType.F32, (4,))
    assert view.is_read_only
    assert not view.to_array().flags.writeable


def test_a_binding_of_another_session_is_refused() -> None:
    governor = MemoryGovernor()
    half = drawn_case("half", num_queries=1, num_keys=5, top_k=2, dtype=DType.F16)
    with (
        Session(CASE.graph, [CpuProvider()], governor) as session,
        Session(half.graph, [CpuProvider()], governor) as other,
        other.bind() as binding,
    ):
        for action in (session.run, session.capture):
            with pytest.raises(InvalidInputError, match="binding: got one of another session"):
                action(binding)


def test_closing_a_session_closes_its_bindings() -> None:
    governor = MemoryGovernor()
    session = Session(CASE.graph, [CpuProvider()], governor)
    binding = session.bind()
    session.close()
    assert governor.usage(HOST).used == 0
    with pytest.raises(ClosedError, match="binding"):
        binding.read(OUTPUT)


@pytest.mark.parametrize(
    ("pointer", "nbytes"), [(-8, 8), (0, 8), (8, -1), (1.0, 8), (True, 8), (8, 1e3), (2**64, 8)]
)
def test_an_address_that_cannot_be_is_refused(pointer: Any, nbytes: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"pointer|nbytes"):
        ForeignStorage(pointer, nbytes, CPU_DEVICE)


def test_a_view_at_an_odd_address_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="a multiple of 4"):
        TensorView(ForeignStorage(4097, 64, CPU_DEVICE), DType.F32, (4,))


def test_an_array_over_a_value_outlives_its_binding() -> None:
    with Session(CASE.graph, [CpuProvider()], MemoryGovernor()) as session:
        binding = session.bind()
        binding.write("key", CASE.inputs["key"])
        array = binding.view("key").to_array()
        binding.close()
        gc.collect()
        other = session.bind()
        other.write("key", np.zeros_like(CASE.inputs["key"]))
        assert array.tobytes() == CASE.inputs["key"].tobytes()


def test_closing_a_binding_waits_for_the_run_that_uses_it() -> None:
    session = Session(CASE.graph, [CpuProvider()], MemoryGovernor())
    binding = session.bind()
    for name, array in CASE.inputs.items():
        binding.write(name, array)
    kernel = session.kernels[0]
    started, closed = threading.Event(), threading.Event()
    real = kernel.execute

    def slow(*args: Any, **kwargs: Any) -> None:
        started.set()
        assert not closed.wait(0.2)
        real(*args, **kwargs)

    def close() -> None:
        started.wait()
        binding.close()
        closed.set()

    kernel.execute = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=close)
    thread.start()
    session.run(binding)
    thread.join()
    assert closed.is_set()
    session.close()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda binding, _: binding.write("key", [1.0]), "key: got list; accepted: a NumPy array"),
        (lambda binding, _: binding.write("key", np.zeros(1, ">f4")), "got >f4"),
        (lambda _, session: session.bind(views={"key": np.zeros(3)}), "got ndarray; accepted: a T"),
    ],
    ids=["list", "byte order", "array as view"],
)
def test_common_misuse_is_one_typed_error(action: Any, message: str) -> None:
    with (
        Session(CASE.graph, [CpuProvider()], MemoryGovernor()) as session,
        session.bind() as binding,
        pytest.raises(InvalidInputError, match=message),
    ):
        action(binding, session)
