"""Whose memory a binding uses, who may write it, and when it ends."""

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
