"""The route of many rows over the same keys: every key is read once for several rows.

Norms of the keys, then in pieces of as many rows as lists are allowed: the filter, which collects
candidates, and the settling, which scores what is in doubt and writes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from nxrt.kernels.api import CompileUnit, GraphResource
from nxrt.kernels.dsa_index_select.filter_layout import DEPTHS, HALF_DTYPES, FilterLimits
from nxrt.kernels.dsa_index_select.prefill.prefill_layout import (
    SETTLE_WARPS,
    PrefillPlan,
    PrefillShape,
    plan_prefill,
)
from nxrt.kernels.dsa_index_select.routes import DTYPE_STRUCTS, FLAGS, FOLDER, RouteLaunch, aligned
from nxrt.kernels.dsa_index_select.spec import Attributes, Shape
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.kernel_context import KernelContext
from nxrt.runtime.module import BoundLaunch, KernelArguments, LaunchConfig
from nxrt.runtime.stream import Stream
from nxrt.tensor import DType

FILTER_SOURCE = FOLDER / "prefill" / "prefill_filter.cu"
SETTLE_SOURCE = FOLDER / "prefill" / "prefill_settle.cu"
FILTER_WARPS = 16
MIN_ROWS_PER_BATCH = 16
"""Fewer rows of the same keys are left to the decode route; to be measured."""

_HEAD_STEP = 8
_NORM_BLOCKS_PER_MULTIPROCESSOR = 4
_SETTLE_BLOCKS_PER_MULTIPROCESSOR = 2
_WARP_SIZE = 32
_NORMS_ARGUMENTS = ("pointer",) * 2 + ("u64",)
_FILTER_ARGUMENTS = ("pointer",) * 7 + ("u64",) * 10 + ("f32",) * 2
_SETTLE_ARGUMENTS = ("pointer",) * 7 + ("u64",) * 7 + ("f32",) * 2


def prefill_units(dtype: DType, depth: int) -> tuple[CompileUnit, CompileUnit]:
    """Return what the route compiles for one input dtype and head width."""
    common = (("NXRT_DTYPE", DTYPE_STRUCTS[dtype]), ("NXRT_DEPTH", str(depth)))
    return (
        CompileUnit(FILTER_SOURCE, (*common, ("NXRT_WARPS", str(FILTER_WARPS))), FLAGS),
        CompileUnit(SETTLE_SOURCE, (*common, ("NXRT_WARPS", str(SETTLE_WARPS))), FLAGS),
    )


def all_prefill_units() -> list[CompileUnit]:
    """Return everything the route may compile."""
    return [unit for dtype in HALF_DTYPES for depth in DEPTHS for unit in prefill_units(dtype, depth)]


def planned_prefill(shape: Shape, dtype: DType, limits: FilterLimits) -> PrefillPlan | None:
    """Return how a shape would be run, or None where it cannot be or need not."""
    if dtype not in HALF_DTYPES or shape.D not in DEPTHS or shape.H == 0 or shape.H % _HEAD_STEP:
        return None
    if shape.num_cells == 0 or shape.T >= 2**32 or shape.S < MIN_ROWS_PER_BATCH:
        return None
    problem = PrefillShape(shape.T, shape.H, shape.D, shape.K, FILTER_WARPS)
    return plan_prefill(
        problem, shape.num_rows, limits.num_multiprocessors, limits.max_shared_nbytes
    )


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
        with ExitStack() as undo:
            modules = []
            for unit in prefill_units(dtype, depth):
                module = context.load(unit.path, defines=unit.defines, flags=unit.flags)
                undo.callback(module.close)
                modules.append(module)
            self._norms = modules[0].function("dsa_index_select_norms")
            self._filter = modules[0].function("dsa_index_select_prefill")
            self._settle = modules[1].function("dsa_index_select_settle")
            self._norms.arguments(_NORMS_ARGUMENTS)  # fails here where they do not fit the code
            self._filter.arguments(_FILTER_ARGUMENTS)
            self._settle.arguments(_SETTLE_ARGUMENTS)
            for function in (self._filter, self._settle):
                function.allow_shared(has.max_shared_nbytes)
            undo.pop_all()
        self._modules = modules

    def serves(self, shape: Shape) -> bool:
        """Say whether a shape can take this route."""
        return planned_prefill(shape, self._dtype, self._limits) is not None

    def kinds(self, shape: Shape) -> Sequence[str]:  # noqa: ARG002
        """Return the names of the three launches."""
        return ("norms", "prefill", "settle")

    def workspace_nbytes(self, shape: Shape) -> int:
        """Return the bytes of norms, lists and counts."""
        plan = self._plan(shape)
        norms, counts = aligned(4 * shape.B * shape.T), aligned(plan.counts_nbytes)
        return norms + counts + aligned(plan.lists_nbytes)

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
        counts = workspace + aligned(4 * shape.B * shape.T)
        lists = counts + aligned(plan.counts_nbytes)
        launches = [self._norms_launch(shape, pointers[1], workspace)]
        for first in range(0, shape.num_rows, plan.rows_per_launch):
            count = min(plan.rows_per_launch, shape.num_rows - first)
            scratch = (workspace, lists, counts)
            launches += self._piece(shape, plan, pointers, scratch, (first, count))
        return tuple(launches)

    def _norms_launch(self, shape: Shape, key: int, norms: int) -> RouteLaunch:
        num_keys = shape.B * shape.T
        num_threads = FILTER_WARPS * _WARP_SIZE
        most = _NORM_BLOCKS_PER_MULTIPROCESSOR * self._limits.num_multiprocessors
        num_blocks = min(-(-num_keys // num_threads), most)
        arguments = KernelArguments(_NORMS_ARGUMENTS)
        arguments.set(key, norms, num_keys)
        config = LaunchConfig((num_blocks, 1, 1), (num_threads, 1, 1))
        return RouteLaunch("norms", BoundLaunch(self._norms, config, arguments), num_blocks)

    def _piece(
        self,
        shape: Shape,
        plan: PrefillPlan,
        pointers: Sequence[int],
        scratch: tuple[int, int, int],
        rows: tuple[int, int],
    ) -> Iterator[RouteLaunch]:
        *inputs, selected = pointers
        norms, lists, counts = scratch
        sizes = (shape.S, shape.T, shape.H, shape.K, plan.capacity)
        scales = (self._attributes.scale, self._attributes.weights_scale)
        sample = (plan.sample_stride, plan.sample_rank)
        arguments = KernelArguments(_FILTER_ARGUMENTS)
        arguments.set(
            *inputs, norms, lists, counts, *rows, plan.rows_per_block, *sizes, *sample, *scales
        )
        num_blocks = -(-rows[1] // plan.rows_per_block)
        threads = (FILTER_WARPS * _WARP_SIZE, 1, 1)
        config = LaunchConfig((num_blocks, 1, 1), threads, plan.filter_shared_nbytes)
        yield RouteLaunch("prefill", BoundLaunch(self._filter, config, arguments), num_blocks)
        arguments = KernelArguments(_SETTLE_ARGUMENTS)
        arguments.set(*inputs, selected, lists, counts, *rows, *sizes, *scales)
        most = _SETTLE_BLOCKS_PER_MULTIPROCESSOR * self._limits.num_multiprocessors
        num_blocks = min(rows[1], most)
        threads = (SETTLE_WARPS * _WARP_SIZE, 1, 1)
        config = LaunchConfig((num_blocks, 1, 1), threads, plan.settle_shared_nbytes)
        yield RouteLaunch("settle", BoundLaunch(self._settle, config, arguments), num_blocks)

    def _plan(self, shape: Shape) -> PrefillPlan:
        plan = planned_prefill(shape, self._dtype, self._limits)
        assert plan is not None  # the route serves the shape
        return plan

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return nothing: all it uses is the workspace."""
        return ()

    def close(self) -> None:
        """Unload the code."""
        with ExitStack() as closing:
            for module in self._modules:
                closing.callback(module.close)
