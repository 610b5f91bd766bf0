"""Check the small values of the plug-in interface, and what a kernel need not write itself."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxrt.errors import InvalidInputError
from nxrt.kernels.api import (
    CaptureSupport,
    CompileUnit,
    Kernel,
    KernelFactory,
    KernelMatch,
    OpKey,
    WorkspaceRequirement,
)
from nxrt.tensor import DType, TensorSpec
from tests.helpers.toy_kernels import Journal, ToyFactory, ToyKernel, double

X = TensorSpec(DType.F32, (4,))


@pytest.fixture
def kernel() -> ToyKernel:
    return ToyKernel("toy", double, Journal(), None)


@pytest.mark.parametrize("version", [0, -1, True, False, 1.0, "1", None, np.float32(1)])
def test_key_refuses_what_is_no_version(version: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"since_version of Add: got .* an integer from 1"):
        OpKey("", "Add", version)


@pytest.mark.parametrize("version", [1, 2**40])
def test_key_takes_versions_from_1(version: int) -> None:
    assert OpKey("p", "Op", version).since_version == version


def test_key_begins_at_version_1() -> None:
    assert OpKey("p", "Op") == OpKey("p", "Op", 1)


def test_key_of_either_onnx_spelling_is_the_same() -> None:
    assert {OpKey("ai.onnx", "Add", 7): "found"}[OpKey("", "Add", 7)] == "found"


@pytest.mark.parametrize(
    ("key", "text"),
    [(OpKey("", "Add", 7), "ai.onnx::Add v7"), (OpKey("pkg.a", "B"), "pkg.a::B v1")],
)
def test_key_is_spoken_of_with_domain_and_version(key: OpKey, text: str) -> None:
    assert str(key) == text


def test_key_cannot_be_changed() -> None:
    key = OpKey("p", "Op")
    with pytest.raises(FrozenInstanceError):
        key.op = "Other"  # type: ignore[misc]


def test_match_that_is_supported_has_outputs_and_no_reason() -> None:
    match = KernelMatch.supported([X])
    assert (match.is_supported, match.outputs, match.reason) == (True, (X,), "")


def test_match_that_is_declined_has_a_reason_and_no_outputs() -> None:
    match = KernelMatch.declined("too wide")
    assert (match.is_supported, match.outputs, match.reason) == (False, (), "too wide")


def test_match_that_is_declined_without_a_reason_is_declined_all_the_same() -> None:
    match = KernelMatch.declined("")
    assert (match.is_supported, match.reason) == (False, "declined without a reason")


@pytest.mark.parametrize("is_supported", [True, False])
def test_capture_support_needs_no_reason(is_supported: bool) -> None:
    support = CaptureSupport(is_supported)
    assert (support.is_supported, support.reason) == (is_supported, "")


def test_workspace_requirement_is_nothing_when_left_out() -> None:
    assert WorkspaceRequirement().nbytes == 0


def test_compile_unit_needs_only_a_path() -> None:
    unit = CompileUnit(Path("a.cu"))
    assert (unit.defines, unit.flags) == ((), ())


def test_kernel_needs_no_workspace_unless_it_says_so(kernel: ToyKernel) -> None:
    assert kernel.workspace_requirement([X, None]) == WorkspaceRequirement(0)


def test_kernel_cannot_be_captured_unless_it_says_so(kernel: ToyKernel) -> None:
    support = kernel.capture_support([X, None])
    assert not support.is_supported
    assert support.reason == "the kernel does not declare that it can be captured"


def test_kernel_has_no_graph_resources_unless_it_says_so(kernel: ToyKernel) -> None:
    assert tuple(kernel.graph_resources()) == ()


def test_factory_compiles_nothing_unless_it_says_so() -> None:
    assert tuple(ToyFactory().compile_units()) == ()


@pytest.mark.parametrize(
    ("base", "required"),
    [(Kernel, {"execute", "close"}), (KernelFactory, {"claim", "create"})],
    ids=["kernel", "factory"],
)
def test_plug_in_author_has_two_methods_to_write(base: type, required: set[str]) -> None:
    assert base.__dict__["__abstractmethods__"] == required
