"""The route of many rows over the same keys: every key is read once for several rows.

Norms of the keys, then in pieces of as many rows as lists are allowed: the filter, which collects
candidates, and the settling, which scores what is in doubt and writes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from nxrt.kernels.api import CompileUnit, GraphResource
from nxrt.kernels.dsa_index_select.filter_layout import DEPTHS, HALF_DTYPES, FilterLimits, serves
from nxrt.kernels.dsa_index_select.prefill.prefill_layout import (
    RECORD_FIELDS,
    RECORD_WORDS,
    ROWS_OF_HEADS,
    SETTLE_WARPS,
    WARPGROUP_WARPS,
    PrefillPlan,
    PrefillShape,
    plan_prefill,
    plan_warpgroups,
    rows_of_block,
)
from nxrt.kernels.dsa_index_select.routes import (
    DTYPE_STRUCTS,
    FLAGS,
    FOLDER,
    RouteLaunch,
    aligned,
    read_words,
)
from nxrt.kernels.dsa_index_select.spec import Attributes, Shape
from nxrt.runtime.device import Capabilities
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.kernel_context import KernelContext
from nxrt.runtime.module import BoundLaunch, Function, KernelArguments, LaunchConfig, Module
from nxrt.runtime.stream import Stream
from nxrt.tensor import DType

NORMS_SOURCE = FOLDER / "prefill" / "prefill_norms.cu"
FILTER_SOURCE = FOLDER / "prefill" / "prefill_filter.cu"
WARPGROUP_SOURCE = FOLDER / "prefill" / "warpgroup_filter.cu"
SETTLE_SOURCE = FOLDER / "prefill" / "prefill_settle.cu"
NORMS_WARPS = 4
FILTER_WARPS = 8
MIN_ROWS_PER_BATCH = 16
"""Fewer rows of the same keys are left to the decode route."""

LEAST_SHARE_OF_A_WAVE = 3 / 8
"""So many of the rows that fill a device once must come; to fewer the decode route is faster.

Measured on one H200, 2026-12-01, bf16, D = 128, top_k = 2048: a wave of 1,056 rows takes 413 us at
16,384 keys and 32 heads whatever is left empty of it; the decode route takes what reading each
row's keys does, 1 us a row. The wave of 64 heads has half the rows, and the share is the same.
"""

_HEAD_STEP = 8
_NORM_BLOCKS_PER_MULTIPROCESSOR = 4
_SETTLE_BLOCKS_PER_MULTIPROCESSOR = 2
_WARP_SIZE = 32
_NORMS_ARGUMENTS = ("pointer",) * 2 + ("u64",)
_FILTER_ARGUMENTS = ("pointer",) * 7 + ("u64",) * 10 + ("f32",) * 2
_WARPGROUP_ARGUMENTS = ("pointer",) * 7 + ("u64",) * 12 + ("f32",) * 2
_SETTLE_ARGUMENTS = ("pointer",) * 8 + ("u64",) * 8 + ("f32",) * 2
_NORMS = "dsa_index_select_norms"
_FILTER = "dsa_index_select_prefill"
_WARPGROUP_FILTERS = [f"{_FILTER}_{rows}" for rows in ROWS_OF_HEADS.values()]
_SETTLE = "dsa_index_select_settle"
_NUM_WARPS = {
    NORMS_SOURCE: NORMS_WARPS,
    FILTER_SOURCE: FILTER_WARPS,
    WARPGROUP_SOURCE: WARPGROUP_WARPS,
    SETTLE_SOURCE: SETTLE_WARPS,
}


def has_warpgroups(capabilities: Capabilities) -> bool:
    """Say whether a device has the instructions of warpgroup_filter.cu."""
    return capabilities.arch == "sm_90a"


def prefill_unit(source: Path, dtype: DType, depth: int) -> CompileUnit:
    """Return what the route compiles of one source for one input dtype and head width."""
    common = (("NXRT_DTYPE", DTYPE_STRUCTS[dtype]), ("NXRT_DEPTH", str(depth)))
    return CompileUnit(source, (*common, ("NXRT_WARPS", str(_NUM_WARPS[source]))), FLAGS)


def all_prefill_units() -> list[CompileUnit]:
    """Return everything the route may compile."""
    return [
        prefill_unit(source, dtype, depth)
        for dtype in HALF_DTYPES
        for depth in DEPTHS
        for source in _NUM_WARPS
    ]


def planned_prefill(
    shape: Shape, dtype: DType, limits: FilterLimits, *, warpgroups: bool
) -> PrefillPlan | None:
    """Return how a shape would be run, or None where it cannot be or need not.

    Args:
        shape: checked.
        dtype: of query, key and weights.
        limits: what to take of the device.
        warpgroups: whether it has the instructions of warpgroup_filter.cu, which is preferred.
    """
    if dtype not in HALF_DTYPES or shape.D not in DEPTHS or shape.H == 0 or shape.H % _HEAD_STEP:
        return None
    if shape.num_cells == 0 or shape.T >= 2**32 or shape.S < MIN_ROWS_PER_BATCH:
        return None
    problem = PrefillShape(shape.T, shape.H, shape.D, shape.K, FILTER_WARPS)
    sizes = (problem, shape.num_rows, limits.num_multiprocessors, limits.max_shared_nbytes)
    plan = plan_warpgroups(*sizes) if warpgroups else None
    if plan is not None and serves(shape, dtype, limits):
        rows_of_wave = rows_of_block(shape.H) * limits.num_multiprocessors
        if shape.num_rows < LEAST_SHARE_OF_A_WAVE * rows_of_wave:
            return None
    return plan or plan_prefill(*sizes)


class PrefillRoute:
    """Filter and settle, piece by piece.

    Args:
        attributes: checked.
        dtype: of query, key and weights: a half type.
        depth: D, one of DEPTHS.
        context: where the code is loaded.
        limits: what to take of the device; None for all of it.

    Raises:
        CompileError, DriverError: the code cannot be had. Nothing is kept.
    """

    def __init__(
        self,
        attributes: Attributes,
        dtype: DType,
        depth: int,
        context: KernelContext,
        limits: FilterLimits | None = None,
    ) -> None:
        self._attributes = attributes
        self._dtype = dtype
        has = context.device.capabilities
        self._limits = limits or FilterLimits(has.num_multiprocessors, has.max_shared_nbytes)
        self._has_warpgroups = has_warpgroups(has)
        self._functions: dict[str, Function] = {}
        parts: list[tuple[Path, Sequence[str], Sequence[str]]] = [
            (NORMS_SOURCE, [_NORMS], _NORMS_ARGUMENTS),
            (FILTER_SOURCE, [_FILTER], _FILTER_ARGUMENTS),
            (SETTLE_SOURCE, [_SETTLE], _SETTLE_ARGUMENTS),
        ]
        if self._has_warpgroups:
            parts.append((WARPGROUP_SOURCE, _WARPGROUP_FILTERS, _WARPGROUP_ARGUMENTS))
        with ExitStack() as undo:
            self._modules: list[Module] = []
            for source, names, arguments in parts:
                unit = prefill_unit(source, dtype, depth)
                module = context.load(unit.path, defines=unit.defines, flags=unit.flags)
                undo.callback(module.close)
                self._modules.append(module)
                for name in names:
                    function = module.function(name)
                    function.arguments(arguments)  # fails here where they do not fit the code
                    function.allow_shared(has.max_shared_nbytes)
                    self._functions[name] = function
            undo.pop_all()

    def serves(self, shape: Shape) -> bool:
        """Say whether a shape can take this route."""
        return self._planned(shape) is not None

    def kinds(self, shape: Shape) -> Sequence[str]:  # noqa: ARG002
        """Return the names of the three launches."""
        return ("norms", "prefill", "settle")

    def workspace_nbytes(self, shape: Shape) -> int:
        """Return the bytes of norms, records and lists."""
        norms, records = records_segment(shape)
        return norms + records + aligned(self._plan(shape).lists_nbytes)

    def lend_control(
        self,
        shape: Shape,  # noqa: ARG002
        *,
        stream: Stream,  # noqa: ARG002
    ) -> AbstractContextManager[GraphAllocation | None]:
        """Lend nothing."""
        return nullcontext()

    def is_recordable(self, shape: Shape) -> bool:  # noqa: ARG002
        """Say yes."""
        return True

    def prepare(
        self,
        shape: Shape,
        pointers: Sequence[int],
        workspace: int,
        control: int,  # noqa: ARG002
    ) -> tuple[RouteLaunch, ...]:
        """Return one launch, and two for each piece of the rows."""
        plan = self._plan(shape)
        norms, records = records_segment(shape)
        scratch = (workspace, workspace + norms + records, workspace + norms)
        launches = [self._norms_launch(shape, pointers[1], workspace)]
        for first in range(0, shape.num_rows, plan.rows_per_launch):
            rows = (first, min(plan.rows_per_launch, shape.num_rows - first))
            launches.append(self._filter_launch(shape, plan, pointers, scratch, rows))
            launches.append(self._settle_launch(shape, plan, pointers, scratch, rows))
        return tuple(launches)

    def _norms_launch(self, shape: Shape, key: int, norms: int) -> RouteLaunch:
        num_keys = shape.B * shape.T
        num_threads = NORMS_WARPS * _WARP_SIZE
        most = _NORM_BLOCKS_PER_MULTIPROCESSOR * self._limits.num_multiprocessors
        num_blocks = min(-(-num_keys // num_threads), most)
        arguments = KernelArguments(_NORMS_ARGUMENTS)
        arguments.set(key, norms, num_keys)
        config = LaunchConfig((num_blocks, 1, 1), (num_threads, 1, 1))
        return RouteLaunch(
            "norms", BoundLaunch(self._functions[_NORMS], config, arguments), num_blocks
        )

    def _filter_launch(
        self,
        shape: Shape,
        plan: PrefillPlan,
        pointers: Sequence[int],
        scratch: tuple[int, int, int],
        rows: tuple[int, int],
    ) -> RouteLaunch:
        has_totals = plan.has_warpgroups
        name = f"{_FILTER}_{plan.most_rows}" if has_totals else _FILTER
        num_warps = WARPGROUP_WARPS if has_totals else FILTER_WARPS
        sizes = (plan.rows_per_block, shape.S, shape.T, shape.H, shape.K, plan.capacity)
        samples = [number for sample in plan.samples for number in (sample.stride, sample.rank)]
        arguments = KernelArguments(_WARPGROUP_ARGUMENTS if has_totals else _FILTER_ARGUMENTS)
        arguments.set(*pointers[:-1], *scratch, *rows, *sizes, *samples, *self._scales)
        num_blocks = -(-rows[1] // plan.rows_per_block)
        threads = (num_warps * _WARP_SIZE, 1, 1)
        config = LaunchConfig((num_blocks, 1, 1), threads, plan.filter_shared_nbytes)
        launch = BoundLaunch(self._functions[name], config, arguments)
        return RouteLaunch("prefill", launch, num_blocks)

    def _settle_launch(
        self,
        shape: Shape,
        plan: PrefillPlan,
        pointers: Sequence[int],
        scratch: tuple[int, int, int],
        rows: tuple[int, int],
    ) -> RouteLaunch:
        sizes = (shape.S, shape.T, shape.H, shape.K, plan.capacity, plan.list_words)
        arguments = KernelArguments(_SETTLE_ARGUMENTS)
        arguments.set(*pointers, *scratch, *rows, *sizes, *self._scales)
        most = _SETTLE_BLOCKS_PER_MULTIPROCESSOR * self._limits.num_multiprocessors
        num_blocks = min(rows[1], most)
        threads = (SETTLE_WARPS * _WARP_SIZE, 1, 1)
        config = LaunchConfig((num_blocks, 1, 1), threads, plan.settle_shared_nbytes)
        launch = BoundLaunch(self._functions[_SETTLE], config, arguments)
        return RouteLaunch("settle", launch, num_blocks)

    @property
    def _scales(self) -> tuple[float, float]:
        return self._attributes.scale, self._attributes.weights_scale

    def _planned(self, shape: Shape) -> PrefillPlan | None:
        return planned_prefill(shape, self._dtype, self._limits, warpgroups=self._has_warpgroups)

    def _plan(self, shape: Shape) -> PrefillPlan:
        plan = self._planned(shape)
        assert plan is not None  # the route serves the shape
        return plan

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return nothing: all it uses is the workspace."""
        return ()

    def outcomes(self, shape: Shape, workspace: int, *, stream: Stream) -> list[tuple[int, bool]]:
        """Return what the kernels have noted; see the protocol."""
        norms, _ = records_segment(shape)
        words = read_words(workspace + norms, RECORD_WORDS * shape.num_rows, stream=stream)
        scored, exact = map(RECORD_FIELDS.index, ("num_scored", "is_exact"))
        rows = words.reshape(-1, RECORD_WORDS)
        return [(int(row[scored]), bool(row[exact])) for row in rows]

    def close(self) -> None:
        """Unload the code."""
        with ExitStack() as closing:
            for module in self._modules:
                closing.callback(module.close)


def records_segment(shape: Shape) -> tuple[int, int]:
    """Return where in the workspace the rows' records are, and their bytes.

    They are [B * S][RECORD_WORDS] u32, and stay readable until the next run: RECORD_FIELDS tell how
    many candidates each row had, how many of them were scored exactly, and whether all keys were.
    """
    return aligned(4 * shape.B * shape.T), aligned(4 * RECORD_WORDS * shape.num_rows)
