"""The radius against the truth: float64 sums of the same operands, and the contract's own sums.

Run from the kernel's source on the host, whose matrix instruction cuts off what it adds as tensor
cores do, and on a device where there is one.
"""

import ctypes
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nxrt import CudaProvider, MemoryGovernor, Role
from nxrt.kernels.dsa_index_select import reference
from nxrt.kernels.dsa_index_select.routes import DTYPE_STRUCTS, FLAGS, FOLDER
from nxrt.kernels.dsa_index_select.spec import Attributes, Shape
from nxrt.kernels.numerics import total_order_key, widen
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.device_memory import copy_to_device, copy_to_host
from nxrt.runtime.module import BoundLaunch, LaunchConfig, Module
from nxrt.tensor import DType
from tests.helpers.cases import IndexSelectCase
from tests.helpers.emulated import EmulatedModule
from tests.kernels.dsa_index_select.test_filter import drawn

Arrays = Sequence[NDArray[Any]]
Run = Callable[[Path, DType, Arrays, Sequence[float]], None]

PROBE = Path(__file__).with_name("bounds_probe.cu")
SHAPE = Shape(1, 1, 700, 32, 128, 1)
FINITE = (
    "gauss", "near", "relu", "whole numbers", "large halves", "tiny halves", "outliers",
    "negative weights", "bias -1e9", "bias 1000", "duplicates",
)  # fmt: skip
SHARED_NBYTES = 232_448
THREADS = 256
NUM_INPUTS = 4


def defines_of(dtype: DType) -> tuple[tuple[str, str], ...]:
    return (("NXRT_DTYPE", DTYPE_STRUCTS[dtype]), ("NXRT_DEPTH", str(SHAPE.D)))


def on_the_host(source: Path, dtype: DType, arrays: Arrays, scales: Sequence[float]) -> None:
    values: list[Any] = [ctypes.c_uint64(array.ctypes.data) for array in arrays]
    values += [ctypes.c_uint64(SHAPE.T), ctypes.c_uint64(SHAPE.H), *map(ctypes.c_float, scales)]
    params = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    grid, block = (ctypes.c_uint * 3)(1, 1, 1), (ctypes.c_uint * 3)(THREADS, 1, 1)
    module = EmulatedModule(source, defines_of(dtype), source.parent)
    module.launch("bounds_probe", params, grid, block, SHARED_NBYTES)


def on_a_device(
    provider: CudaProvider, source: Path, dtype: DType, arrays: Arrays, scales: Sequence[float]
) -> None:
    with ExitStack() as stack:
        backend = stack.enter_context(closing(provider.open(MemoryGovernor())))
        stream = backend.stream
        blocks = [
            backend.allocate(array.nbytes, role=Role.WORKSPACE, holder="probe") for array in arrays
        ]
        for block, array in zip(blocks, arrays, strict=True):
            stack.callback(block.close)
            copy_to_device(block.pointer, array, stream=stream)
        options = CompileOptions(provider.capabilities.arch, defines_of(dtype), FLAGS)
        code = CompileCache(Compiler(), None).fetch(KernelSource.load(source), options).code
        module = stack.enter_context(closing(Module(stream.device, code)))
        function = module.function("bounds_probe")
        function.allow_shared(SHARED_NBYTES)
        kinds = ("pointer",) * len(arrays) + ("u64",) * 2 + ("f32",) * 2
        arguments = function.arguments(kinds)
        arguments.set(*(block.pointer for block in blocks), SHAPE.T, SHAPE.H, *scales)
        config = LaunchConfig((1, 1, 1), (THREADS, 1, 1), SHARED_NBYTES)
        BoundLaunch(function, config, arguments).enqueue(stream)
        for block, array in list(zip(blocks, arrays, strict=True))[NUM_INPUTS:]:
            copy_to_host(array, block.pointer, stream=stream)
        stream.synchronize()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    for header in FOLDER.glob("*.cuh"):
        shutil.copy(header, folder)
    return Path(shutil.copy(PROBE, folder))


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    if request.param == "host":
        yield on_the_host
        return
    provider = request.getfixturevalue("cuda_provider")
    yield lambda *arguments: on_a_device(provider, *arguments)


class Probe:
    """Run the probe on one case; hold what it found, each [T], and what is true."""

    def __init__(self, run: Run, source: Path, case: IndexSelectCase) -> None:
        self.totals, self.widths = (np.zeros(SHAPE.T, np.float32) for _ in range(2))
        self.is_zero = np.zeros(SHAPE.T, np.uint32)
        self.keys = np.zeros((SHAPE.T, 2), np.uint32)
        found = [self.totals, self.widths, self.is_zero, self.keys]
        inputs = [np.ascontiguousarray(array) for array in case.inputs.values()]
        run(source, case.dtype, [*inputs, *found], (case.scale, case.weights_scale))
        self.query, key, self.weights = (widen(array, case.dtype) for array in inputs[:3])
        self.depth_major = np.ascontiguousarray(key[0].T)
        scales = (float(np.float32(case.scale)), float(np.float32(case.weights_scale)))
        self.attributes = Attributes(1, *scales)

    def sums(self, bias: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the contract's scores."""
        operands = (self.query[0], self.depth_major, self.weights[0], bias, self.attributes)
        return np.asarray(reference._scores(*operands)[0], np.float32)

    def truth(self) -> NDArray[np.float64]:
        """Return the scores without bias in float64."""
        dots = self.query[0, 0].astype(np.float64) @ self.depth_major.astype(np.float64)
        scale = np.float32(self.attributes.weights_scale)
        weights = (self.weights[0, 0] * scale).astype(np.float64)
        scored = np.maximum(np.float64(self.attributes.scale) * dots, 0)
        return np.asarray((scored * weights[:, None]).sum(0))


@pytest.mark.parametrize("dtype", DTYPE_STRUCTS, ids=str)
@pytest.mark.parametrize("kind", FINITE)
def test_the_truth_and_the_contract_are_within_half_the_radius(
    run: Run, source: Path, kind: str, dtype: DType
) -> None:
    probe = Probe(run, source, drawn(kind, SHAPE, dtype))
    truth = probe.truth()
    of_totals = np.abs(probe.totals - truth) / probe.widths
    of_sums = np.abs(probe.sums(np.zeros((1, SHAPE.T), np.float32)) - truth) / probe.widths
    largest = max(of_totals.max(), of_sums.max())
    print(f"largest error / radius of {kind} in {dtype}: {largest:.4f}")
    assert largest <= 0.5


@pytest.mark.parametrize("dtype", DTYPE_STRUCTS, ids=str)
@pytest.mark.parametrize("kind", FINITE)
def test_the_contracts_scores_are_within_their_bounds(
    run: Run, source: Path, kind: str, dtype: DType
) -> None:
    case = drawn(kind, SHAPE, dtype)
    probe = Probe(run, source, case)
    exact = total_order_key(probe.sums(case.bias[0, 0]))
    assert (probe.keys[:, 0] <= exact).all()
    assert (exact <= probe.keys[:, 1]).all()
    known = probe.sums(np.zeros((1, SHAPE.T), np.float32))[probe.is_zero != 0]
    assert known.tobytes() == bytes(known.nbytes), "a score that is said to be 0 is not"


def test_most_keys_that_no_head_likes_are_known_to_score_zero(run: Run, source: Path) -> None:
    probe = Probe(run, source, drawn("relu", SHAPE, DType.BF16))
    assert (probe.is_zero != 0).sum() > SHAPE.T // 2
