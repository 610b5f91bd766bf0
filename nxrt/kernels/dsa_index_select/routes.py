"""The ways to run DsaIndexSelect on CUDA. Each gives the same bytes; they differ in time and space.

What a route launches is prepared once for one set of tensors and enqueued often.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nxrt.kernels.api import CompileUnit, GraphResource
from nxrt.kernels.dsa_index_select.filter_layout import (
    DEPTHS,
    DTYPES,
    H200,
    OUTCOME_NBYTES,
    FilterLayout,
    FilterLimits,
    serves,
)
from nxrt.kernels.dsa_index_select.spec import Attributes, Shape
from nxrt.runtime.device_memory import copy_to_host, fill_bytes
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.kernel_context import KernelContext
from nxrt.runtime.module import BoundLaunch, KernelArguments, LaunchConfig
from nxrt.runtime.stream import Stream
from nxrt.runtime.workspace import Workspace
from nxrt.tensor import DType, checked_product

FOLDER = Path(__file__).parent
EXACT_SOURCE = FOLDER / "dsa_index_select.cu"
FILTER_SOURCE = FOLDER / "certified_filter.cu"
BLOCK_T = 32
"""Keys of one row that a block of the score kernel takes; as in the .cu."""

_SCORE_THREADS = 256
_SELECT_THREADS = 1024
_FILTER_THREADS = 256
_ALIGNMENT = 256
_SCORE_ARGUMENTS = ("pointer",) * 6 + ("u64",) * 5 + ("f32",) * 2
_SELECT_ARGUMENTS = ("pointer",) * 3 + ("u64",) * 3
_FILTER_ARGUMENTS = ("pointer",) * 7 + ("u64",) * 7 + ("f32",) * 2
DTYPE_STRUCTS = {DType.F32: "F32", DType.F16: "F16", DType.BF16: "BF16"}
# The contract is un-fused. The kernels say so at every step; the flag guards what is added.
FLAGS = ("--fmad=false",)


def exact_unit(dtype: DType) -> CompileUnit:
    """Return what the exact route compiles for one input dtype."""
    return CompileUnit(EXACT_SOURCE, (("NXRT_DTYPE", DTYPE_STRUCTS[dtype]),), FLAGS)


def filter_unit(dtype: DType, depth: int) -> CompileUnit:
    """Return what the certified filter compiles for one input dtype and head width."""
    defines = (("NXRT_DTYPE", DTYPE_STRUCTS[dtype]), ("NXRT_DEPTH", str(depth)))
    return CompileUnit(FILTER_SOURCE, defines, FLAGS)


@dataclass(frozen=True)
class WorkspaceLayout:
    """Place the exact route's scores, float32 [B, S, T], and its allowed flags, u8 [B, S, T].

    Every segment is at least one byte and starts at a multiple of 256.
    """

    allowed_offset: int
    nbytes: int

    @classmethod
    def of(cls, shape: Shape) -> "WorkspaceLayout":
        """Return the layout for one shape. Raises SizeOverflowError."""
        scores = aligned(checked_product("score byte count", shape.num_cells, 4))
        allowed = aligned(shape.num_cells)
        return cls(scores, checked_product("workspace byte count", scores + allowed))


def aligned(nbytes: int) -> int:
    """Return the bytes of a segment: at least one, and a multiple of 256."""
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class RouteLaunch:
    """Hold a launch with its name in the statistics and the number of its blocks."""

    kind: str
    launch: BoundLaunch
    num_blocks: int


class Route(Protocol):
    """One way to run the operator, with its code loaded."""

    def kinds(self, shape: Shape) -> Sequence[str]:
        """Return the names of what a shape launches."""

    def workspace_nbytes(self, shape: Shape) -> int:
        """Return the scratch memory that a shape takes. Raises SizeOverflowError."""

    def lend_control(
        self, shape: Shape, *, stream: Stream
    ) -> AbstractContextManager[GraphAllocation | None]:
        """Lend what is zero before its first launch and the route's own from then on, if a shape
        needs any.

        Raises: as `Workspace.lend`.
        """

    def prepare(
        self, shape: Shape, pointers: Sequence[int], workspace: int, control: int
    ) -> tuple[RouteLaunch, ...]:
        """Return what a shape with at least one row launches.

        Args:
            shape: checked.
            pointers: of query, key, weights, attention_bias and selected_indices.
            workspace: the address of at least `workspace_nbytes`.
            control: the address of what `lend_control` lends, 0 where that is nothing.
        """

    def is_recordable(self, shape: Shape) -> bool:
        """Say whether a recording of this shape finds its control words allocated."""

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return memory of the route's own that recordings bake in."""

    def outcomes(self, shape: Shape, workspace: int, *, stream: Stream) -> list[tuple[int, bool]]:
        """Return how many keys of each row were scored exactly, and whether all had to be.

        Args:
            shape: of the last run, whose stream was synchronised.
            workspace: the address that it was prepared with.
            stream: to copy on.
        """

    def close(self) -> None:
        """Unload the code and give up memory; may be repeated."""


def read_words(pointer: int, count: int, *, stream: Stream) -> NDArray[np.uint32]:
    """Return u32 of device memory, read on a stream and waited for."""
    words = np.empty(count, np.uint32)
    copy_to_host(words, pointer, stream=stream)
    stream.synchronize()
    return words


class ExactRoute:
    """Score every allowed key as the contract says, then select; serves every shape.

    Args:
        attributes: checked.
        dtype: of query, key and weights.
        context: where the code is loaded.
        grid_limit: the most blocks of a launch.

    Raises:
        CompileError, DriverError: the code cannot be had. Nothing is kept.
    """

    def __init__(
        self, attributes: Attributes, dtype: DType, context: KernelContext, *, grid_limit: int
    ) -> None:
        self._attributes = attributes
        self._grid_limit = grid_limit
        unit = exact_unit(dtype)
        with ExitStack() as undo:
            self._module = context.load(unit.path, defines=unit.defines, flags=unit.flags)
            undo.callback(self._module.close)
            self._score = self._module.function("dsa_index_select_score")
            self._select = self._module.function("dsa_index_select_select")
            self._score.arguments(_SCORE_ARGUMENTS)  # fails here where they do not fit the code
            self._select.arguments(_SELECT_ARGUMENTS)
            undo.pop_all()

    def kinds(self, shape: Shape) -> Sequence[str]:
        """Return "score", unless there are no keys, and "select"."""
        return ("score", "select") if shape.num_cells else ("select",)

    def workspace_nbytes(self, shape: Shape) -> int:
        """Return the bytes of scores and flags."""
        return WorkspaceLayout.of(shape).nbytes

    def lend_control(
        self,
        shape: Shape,  # noqa: ARG002
        *,
        stream: Stream,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
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
        """Return two launches, one where there are no keys; see the protocol."""
        *inputs, selected = pointers
        scratch = (workspace, workspace + WorkspaceLayout.of(shape).allowed_offset)
        arguments = KernelArguments(_SELECT_ARGUMENTS)
        arguments.set(*scratch, selected, shape.num_rows, shape.T, shape.K)
        grid = min(shape.num_rows, self._grid_limit)
        config = LaunchConfig((grid, 1, 1), (_SELECT_THREADS, 1, 1))
        select = RouteLaunch("select", BoundLaunch(self._select, config, arguments), grid)
        if shape.num_cells == 0:
            return (select,)
        arguments = KernelArguments(_SCORE_ARGUMENTS)
        sizes = (shape.num_rows, shape.S, shape.T, shape.H, shape.D)
        scales = (self._attributes.scale, self._attributes.weights_scale)
        arguments.set(*inputs, *scratch, *sizes, *scales)
        grid = min(shape.num_rows * -(-shape.T // BLOCK_T), self._grid_limit)
        config = LaunchConfig((grid, 1, 1), (_SCORE_THREADS, 1, 1))
        return (RouteLaunch("score", BoundLaunch(self._score, config, arguments), grid), select)

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return nothing: all it uses is the workspace."""
        return ()

    def outcomes(
        self,
        shape: Shape,
        workspace: int,  # noqa: ARG002
        *,
        stream: Stream,  # noqa: ARG002
    ) -> list[tuple[int, bool]]:
        """Say of each row that all its keys were scored, allowed or not."""
        return [(shape.T, True)] * shape.num_rows

    def close(self) -> None:
        """Unload the code."""
        self._module.close()


class FilterRoute:
    """Bound every score by tensor cores, and score exactly what that leaves open.

    Args:
        attributes: checked.
        dtype: of query, key and weights.
        depth: D, one of DEPTHS.
        context: where the code is loaded and the control words are allocated.
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
        whole = FilterLimits(has.num_multiprocessors, has.max_shared_nbytes)
        self._limits = limits or whole
        self._has_bulk_copies = has.compute_capability >= (9, 0)
        unit = filter_unit(dtype, depth)
        with ExitStack() as undo:
            self._module = context.load(unit.path, defines=unit.defines, flags=unit.flags)
            undo.callback(self._module.close)
            self._filter = self._module.function("dsa_index_select_filter")
            self._filter.arguments(_FILTER_ARGUMENTS)  # fails here where they do not fit the code
            self._filter.allow_shared(has.max_shared_nbytes)
            undo.pop_all()
        self._control = Workspace(context.allocator, holder="DsaIndexSelect control")
        self._cleared: GraphAllocation | None = None

    def serves(self, shape: Shape) -> bool:
        """Say whether a shape can take this route: from 9.0 on there are bulk copies."""
        return self._has_bulk_copies and serves(shape, self._dtype, self._limits)

    def layout(self, shape: Shape) -> FilterLayout:
        """Return how a shape is split over this device."""
        return FilterLayout.of(shape, self._dtype, self._limits)

    def kinds(self, shape: Shape) -> Sequence[str]:  # noqa: ARG002
        """Return "filter"."""
        return ("filter",)

    def workspace_nbytes(self, shape: Shape) -> int:
        """Return the bytes of the rows' outcomes."""
        return aligned(shape.num_rows * OUTCOME_NBYTES)

    @contextmanager
    def lend_control(self, shape: Shape, *, stream: Stream) -> Iterator[GraphAllocation | None]:
        """Lend the words by which the blocks of a row meet; nothing where a row has one block."""
        nbytes = self.layout(shape).control_nbytes
        if nbytes == 0:
            yield None
            return
        with self._control.lend(nbytes, stream=stream) as block:
            if block is not self._cleared and not stream.is_capturing:
                fill_bytes(block.pointer, 0, block.nbytes, stream=stream)
                self._cleared = block
            yield block

    def is_recordable(self, shape: Shape) -> bool:
        """Say whether there are control words enough."""
        return self.layout(shape).control_nbytes <= self._control.recordable_nbytes

    def prepare(
        self, shape: Shape, pointers: Sequence[int], workspace: int, control: int
    ) -> tuple[RouteLaunch, ...]:
        """Return one launch; see the protocol."""
        layout = self.layout(shape)
        is_group = layout.blocks_per_row > 1
        arguments = KernelArguments(_FILTER_ARGUMENTS)
        sizes = (shape.num_rows, shape.S, shape.T, shape.H, shape.K)
        parts = (layout.keys_per_block, layout.capacity)
        scales = (self._attributes.scale, self._attributes.weights_scale)
        arguments.set(*pointers, control, workspace, *sizes, *parts, *scales)
        config = LaunchConfig(
            (layout.blocks_per_row, layout.num_row_blocks, 1),
            (_FILTER_THREADS, 1, 1),
            layout.shared_nbytes,
            is_cooperative=is_group,
        )
        num_blocks = layout.blocks_per_row * layout.num_row_blocks
        launch = BoundLaunch(self._filter, config, arguments)
        return (RouteLaunch("filter", launch, num_blocks),)

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return the control words of recordings."""
        block = self._control.graph_block
        return () if block is None else (block,)

    def outcomes(self, shape: Shape, workspace: int, *, stream: Stream) -> list[tuple[int, bool]]:
        """Return what the kernel has noted; see the protocol."""
        words = read_words(workspace, 2 * shape.num_rows, stream=stream).reshape(-1, 2)
        return [(int(scored), bool(exact)) for scored, exact in words]

    def close(self) -> None:
        """Give up the control words and unload the code."""
        with ExitStack() as closing:
            closing.callback(self._module.close)
            closing.callback(self._control.close)


def planned_nbytes(shape: Shape, dtype: DType, limits: FilterLimits = H200) -> tuple[int, int]:
    """Return the bytes of workspace and of control words. Raises SizeOverflowError."""
    if not serves(shape, dtype, limits):
        return WorkspaceLayout.of(shape).nbytes, 0
    control_nbytes = FilterLayout.of(shape, dtype, limits).control_nbytes
    return aligned(shape.num_rows * OUTCOME_NBYTES), control_nbytes


def filter_units() -> list[CompileUnit]:
    """Return everything the certified filter may compile."""
    return [filter_unit(dtype, depth) for dtype in DTYPES for depth in DEPTHS]
