"""The radius against the truth: float64 sums of the same operands, and the contract's own sums.

Run on the host from the kernel's source: the emulated matrix instruction cuts off what it adds, as
tensor cores do.
"""

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nxrt.kernels.dsa_index_select import reference
from nxrt.kernels.dsa_index_select.routes import FOLDER
from nxrt.kernels.dsa_index_select.spec import Attributes, Shape
from nxrt.kernels.numerics import total_order_key, widen
from nxrt.tensor import DType
from tests.helpers.cases import IndexSelectCase
from tests.helpers.emulated import EmulatedModule
from tests.kernels.dsa_index_select.test_filter import drawn

PROBE = Path(__file__).with_name("bounds_probe.cu")
SHAPE = Shape(1, 1, 700, 32, 128, 1)
FINITE = (
    "gauss", "near", "relu", "whole numbers", "large halves", "tiny halves", "outliers",
    "negative weights", "bias -1e9", "bias 1000", "duplicates",
)  # fmt: skip
SHARED_NBYTES = 232_448


class Probe:
    """Run the probe on one case; hold what it found, each [T]."""

    def __init__(self, module: EmulatedModule, case: IndexSelectCase) -> None:
        num_keys, num_heads = case.key.shape[1], case.query.shape[2]
        found = [np.zeros(num_keys, np.float32) for _ in range(4)]
        self.totals, self.widths, self.dots, self.dot_widths = found
        self.keys = np.zeros((num_keys, 2), np.uint32)
        arrays: list[NDArray[Any]] = [*case.inputs.values(), *found, self.keys]
        values: list[Any] = [ctypes.c_uint64(array.ctypes.data) for array in arrays]
        values += [ctypes.c_uint64(num_keys), ctypes.c_uint64(num_heads)]
        values += [ctypes.c_float(case.scale), ctypes.c_float(case.weights_scale)]
        params = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        grid, block = (ctypes.c_uint * 3)(1, 1, 1), (ctypes.c_uint * 3)(256, 1, 1)
        module.launch("bounds_probe", params, grid, block, SHARED_NBYTES)


@pytest.fixture(scope="module", params=[DType.BF16, DType.F16], ids=str)
def probe(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DType, EmulatedModule]:
    folder = tmp_path_factory.mktemp("probe")
    for header in FOLDER.glob("*.cuh"):
        shutil.copy(header, folder)
    source = Path(shutil.copy(PROBE, folder))
    name = {DType.BF16: "BF16", DType.F16: "F16"}[request.param]
    defines = [("NXRT_DTYPE", name), ("NXRT_DEPTH", str(SHAPE.D))]
    return request.param, EmulatedModule(source, defines, folder)


@pytest.mark.parametrize("kind", FINITE)
def test_the_truth_and_the_contract_are_within_half_the_radius(
    probe: tuple[DType, EmulatedModule], kind: str, record_property: Any
) -> None:
    dtype, module = probe
    case = drawn(kind, SHAPE, dtype)
    found = Probe(module, case)
    stored = [widen(array, dtype).astype(np.float64) for array in list(case.inputs.values())[:3]]
    query, key, weights = stored[0][0, 0], stored[1][0], stored[2][0, 0]
    scaled = (weights.astype(np.float32) * np.float32(case.weights_scale)).astype(np.float64)
    dots = query @ key.T
    truth = (np.maximum(np.float64(np.float32(case.scale)) * dots, 0) * scaled[:, None]).sum(0)
    ratio = np.abs(found.totals - truth) / found.widths
    of_dots = np.abs(found.dots - dots.max(0)) / found.dot_widths
    attributes = Attributes(1, float(np.float32(case.scale)), float(np.float32(case.weights_scale)))
    floats = [widen(array, dtype) for array in list(case.inputs.values())[:3]]
    depth_major = np.ascontiguousarray(floats[1][0].T)
    no_bias = np.zeros((1, SHAPE.T), np.float32)
    sums = reference._scores(floats[0][0], depth_major, floats[2][0], no_bias, attributes)[0]
    of_sums = np.abs(sums - truth) / found.widths
    record_property("largest", (ratio.max(), of_dots.max(), of_sums.max()))
    assert max(ratio.max(), of_dots.max(), of_sums.max()) <= 0.5


@pytest.mark.parametrize("kind", FINITE)
def test_the_contracts_scores_are_within_their_bounds(
    probe: tuple[DType, EmulatedModule], kind: str
) -> None:
    dtype, module = probe
    case = drawn(kind, SHAPE, dtype)
    found = Probe(module, case)
    floats = [widen(array, dtype) for array in list(case.inputs.values())[:3]]
    attributes = Attributes(1, float(np.float32(case.scale)), float(np.float32(case.weights_scale)))
    depth_major = np.ascontiguousarray(floats[1][0].T)
    bias = case.bias[0, 0]
    exact = total_order_key(
        reference._scores(floats[0][0], depth_major, floats[2][0], bias, attributes)[0]
    )
    assert (found.keys[:, 0] <= exact).all()
    assert (exact <= found.keys[:, 1]).all()
