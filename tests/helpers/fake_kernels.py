"""Stand-ins for nxrt's kernels on the fake driver: the reference's arithmetic on host memory.

They check no launch shape beyond the grid; how work is split over threads is the device's affair.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from nxrt.kernels.dsa_index_select import reference
from nxrt.kernels.dsa_index_select.cuda import compile_unit
from nxrt.kernels.dsa_index_select.spec import FLOAT_DTYPES, MASK_THRESHOLD, Attributes
from nxrt.kernels.numerics import widen
from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from nxrt.tensor import DType
from tests.helpers.fake_driver import FakeDriver, Shape3

FAKE_ARCH = "sm_90a"
SCORE = "dsa_index_select_score"
SELECT = "dsa_index_select_select"
LATCH_ADVANCE = "nxrt_latch_advance"
LATCH_TAKE = "nxrt_latch_take"


@cache
def _cubins() -> dict[bytes, DType]:
    """Return the dtype of each cubin of DsaIndexSelect; the compiler is deterministic."""
    found = {}
    for dtype in FLOAT_DTYPES:
        unit = compile_unit(dtype)
        options = CompileOptions(FAKE_ARCH, unit.defines, unit.flags)
        found[Compiler().compile(KernelSource.load(unit.path), options).cubin] = dtype
    return found


class DsaIndexSelectStandIn:
    """Compute scores and selection of DsaIndexSelect.

    A launch does not say the dtype of its query, key and weights: the code does, which is compiled
    once for each.
    """

    def __init__(self, fake: FakeDriver) -> None:
        self._fake = fake

    def register(self) -> None:
        """Register both entry points."""
        self._fake.register(SCORE, "Q" * 11 + "ff", self.score)
        self._fake.register(SELECT, "Q" * 6, self.select)

    def score(
        self,
        query: int,
        key: int,
        weights: int,
        bias: int,
        scores: int,
        allowed: int,
        num_rows: int,
        S: int,
        T: int,
        H: int,
        D: int,
        scale: float,
        weights_scale: float,
        *_shape: Shape3,
    ) -> None:
        """Write the scores [num_rows, T], -inf where not allowed in a whole tile, and the flags."""
        dtype = _cubins()[self._fake.running_image()]
        batch = num_rows // S
        queries = self._widened(dtype, query, (batch, S, H, D))
        keys = self._widened(dtype, key, (batch, T, D))
        head_weights = self._widened(dtype, weights, (batch, S, H))
        biases = self._fake.array(bias, np.float32, (batch, S, T))
        written = self._fake.array(scores, np.float32, (batch, S, T))
        flags = self._fake.array(allowed, np.uint8, (batch, S, T))
        attributes = Attributes(top_k=1, scale=scale, weights_scale=weights_scale)
        for b in range(batch):
            depth_major = np.ascontiguousarray(keys[b].T)
            written[b] = reference._scores(
                queries[b], depth_major, head_weights[b], biases[b], attributes
            )
        flags[...] = biases > MASK_THRESHOLD
        written[flags == 0] = -np.inf

    def select(
        self,
        scores: int,
        allowed: int,
        selected: int,
        num_rows: int,
        T: int,
        top_k: int,
        *_shape: Shape3,
    ) -> None:
        """Write the positions [num_rows, top_k], ascending, padded with -1."""
        values = self._fake.array(scores, np.float32, (num_rows, T))
        flags = self._fake.array(allowed, np.uint8, (num_rows, T))
        positions = self._fake.array(selected, np.int64, (num_rows, top_k))
        positions[...] = -1
        for row in range(num_rows):
            chosen = reference._select_row(values[row], flags[row] != 0, top_k)
            positions[row, : chosen.size] = chosen

    def _widened(self, dtype: DType, pointer: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return widen(self._fake.array(pointer, dtype.storage, shape), dtype)


class ErrorLatchStandIn:
    """Count steps and take latched faults, as nxrt/runtime/error_latch.cu does."""

    def __init__(self, fake: FakeDriver) -> None:
        self._fake = fake

    def register(self) -> None:
        """Register both entry points."""
        self._fake.register(LATCH_ADVANCE, "Q", self.advance)
        self._fake.register(LATCH_TAKE, "QQI", self.take)

    def advance(self, words: int, *_shape: Shape3) -> None:
        """Add 1 to the running step, which wraps."""
        self._fake.array(words, np.uint32, (1,))[...] += np.uint32(1)

    def take(self, words: int, taken: int, num_slots: int, *_shape: Shape3) -> None:
        """Add the slots, uint32 [num_slots, 2] after the step, to `taken` and clear them."""
        slots = self._fake.array(words + 4, np.uint32, (num_slots, 2))
        kept = self._fake.array(taken, np.uint32, (num_slots, 2))
        is_first = (kept[:, 0] == 0) & (slots[:, 0] != 0)
        kept[is_first, 1] = slots[is_first, 1]
        kept[:, 0] |= slots[:, 0]
        slots[...] = 0


def register_all(fake: FakeDriver) -> None:
    """Register a stand-in for every kernel of nxrt."""
    Compiler().version  # noqa: B018  (loads NVRTC, which calls the driver: not inside a stand-in)
    DsaIndexSelectStandIn(fake).register()
    ErrorLatchStandIn(fake).register()
