"""DsaIndexSelect on CUDA: check, size the workspace, launch score and select.

The arithmetic is in dsa_index_select.cu, the rules are in spec.py.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nxrt.errors import InvalidInputError, InvalidNodeError
from nxrt.graph import Node
from nxrt.kernels.api import (
    CaptureSupport,
    CompileUnit,
    GraphResource,
    Kernel,
    KernelFactory,
    KernelMatch,
    WorkspaceRequirement,
)
from nxrt.kernels.dsa_index_select.spec import (
    FLOAT_DTYPES,
    Attributes,
    Shape,
    check_execution,
    check_node,
)
from nxrt.runtime.kernel_context import KernelContext
from nxrt.runtime.module import KernelArguments, LaunchConfig, launch
from nxrt.runtime.stream import Stream
from nxrt.runtime.workspace import Workspace
from nxrt.tensor import DType, TensorSpec, TensorView, checked_product

SOURCE = Path(__file__).with_name("dsa_index_select.cu")
BLOCK_T = 32
"""Keys of one row that a block of the score kernel takes; as in the .cu."""

_SCORE_THREADS = 256
_SELECT_THREADS = 1024
_ALIGNMENT = 256
_DTYPE_STRUCTS = {DType.F32: "F32", DType.F16: "F16", DType.BF16: "BF16"}


def compile_unit(dtype: DType) -> CompileUnit:
    """Return what is compiled for one input dtype."""
    # The contract is un-fused. The kernel says so at every step; the flag guards what is added.
    return CompileUnit(SOURCE, (("NXRT_DTYPE", _DTYPE_STRUCTS[dtype]),), ("--fmad=false",))


@dataclass(frozen=True)
class WorkspaceLayout:
    """Place the scores, float32 [B, S, T], and the allowed flags, u8 [B, S, T].

    Every segment is at least one byte and starts at a multiple of 256.
    """

    allowed_offset: int
    nbytes: int

    @classmethod
    def of(cls, shape: Shape) -> "WorkspaceLayout":
        """Return the layout for one shape. Raises SizeOverflowError."""
        scores = _aligned(checked_product("score byte count", shape.num_cells, 4))
        allowed = _aligned(shape.num_cells)
        return cls(scores, checked_product("workspace byte count", scores + allowed))


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class LaunchStats:
    """Count real launches; a replay of a captured graph is none."""

    executions: int = 0
    score_launches: int = 0
    select_launches: int = 0
    last_score_grid: int = 0
    last_select_grid: int = 0


class DsaIndexSelect(Kernel[Stream]):
    """Score every allowed key, then select; two launches, none where there are no rows.

    Safe to call from several threads, which take turns.

    Args:
        attributes: checked.
        dtype: of query, key and weights.
        context: where the code is loaded and the workspace allocated.
        grid_limit: the most blocks a launch may have, from 1.
    """

    def __init__(
        self, attributes: Attributes, dtype: DType, context: KernelContext, *, grid_limit: int
    ) -> None:
        self._attributes = attributes
        self._dtype = dtype
        self._device = context.device
        self._grid_limit = min(grid_limit, context.device.capabilities.max_grid_x)
        self._lock = threading.Lock()
        self._stats = LaunchStats()
        unit = compile_unit(dtype)
        with ExitStack() as undo:
            self._module = context.load(unit.path, defines=unit.defines, flags=unit.flags)
            undo.callback(self._module.close)
            self._score = self._module.function("dsa_index_select_score")
            self._select = self._module.function("dsa_index_select_select")
            undo.pop_all()
        self._score_arguments = KernelArguments(["pointer"] * 6 + ["u64"] * 5 + ["f32"] * 2)
        self._select_arguments = KernelArguments(["pointer"] * 3 + ["u64"] * 3)
        self.workspace = Workspace(context.allocator, holder="DsaIndexSelect")

    @property
    def stats(self) -> LaunchStats:
        """Return the launch counts so far."""
        return self._stats

    def execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorView],
        *,
        stream: Stream,
    ) -> None:
        """Enqueue the selection; see the base class.

        Raises:
            InvalidNodeError, SizeOverflowError: the tensors are not what the contract accepts.
            CaptureError: recording, and the workspace would have to grow.
            LeaseRefusedError, AllocationFailedError: the workspace cannot grow; the old one stays.
        """
        with self._lock:
            shape, views = check_execution(
                self._attributes, inputs, outputs, must_be_contiguous=True
            )
            self._check_compiled(views[0].dtype)
            self._check_device((*views, *outputs))
            if shape.num_rows == 0:
                return
            layout = WorkspaceLayout.of(shape)
            with (
                self._device.current(),
                self.workspace.lend(layout.nbytes, stream=stream) as block,
            ):
                self._launch(shape, layout, block.pointer, views, outputs[0], stream)

    def _launch(
        self,
        shape: Shape,
        layout: WorkspaceLayout,
        workspace: int,
        inputs: Sequence[TensorView],
        selected: TensorView,
        stream: Stream,
    ) -> None:
        scores, allowed = workspace, workspace + layout.allowed_offset
        sizes = (shape.num_rows, shape.S, shape.T, shape.H, shape.D)
        stats = self._stats
        if shape.num_cells:
            scales = (self._attributes.scale, self._attributes.weights_scale)
            pointers = (view.pointer for view in inputs)
            self._score_arguments.set(*pointers, scores, allowed, *sizes, *scales)
            grid = self._grid(shape.num_rows * -(-shape.T // BLOCK_T))
            config = LaunchConfig((grid, 1, 1), (_SCORE_THREADS, 1, 1))
            launch(self._score, config, self._score_arguments, stream=stream)
            stats = replace(
                stats, score_launches=stats.score_launches + 1, last_score_grid=grid
            )  # fmt: skip
        self._select_arguments.set(
            scores, allowed, selected.pointer, shape.num_rows, shape.T, shape.K
        )  # fmt: skip
        grid = self._grid(shape.num_rows)
        config = LaunchConfig((grid, 1, 1), (_SELECT_THREADS, 1, 1))
        launch(self._select, config, self._select_arguments, stream=stream)
        self._stats = replace(
            stats,
            executions=stats.executions + 1,
            select_launches=stats.select_launches + 1,
            last_select_grid=grid,
        )

    def _grid(self, num_blocks: int) -> int:
        return min(num_blocks, self._grid_limit)

    def _check_compiled(self, dtype: DType) -> None:
        if dtype is not self._dtype:
            found, accepted = str(dtype), f"{self._dtype}, which this kernel was created for"
            raise InvalidNodeError("query dtype", found=found, accepted=accepted)

    def _check_device(self, views: Sequence[TensorView]) -> None:
        for view in views:
            if view.device != self._device.id:
                raise InvalidInputError(
                    "tensor device", found=str(view.device), accepted=str(self._device.id)
                )

    def workspace_requirement(self, inputs: Sequence[TensorSpec | None]) -> WorkspaceRequirement:
        """Return the bytes for these inputs. Raises SizeOverflowError."""
        shape = self._shape(inputs)
        return WorkspaceRequirement(WorkspaceLayout.of(shape).nbytes if shape.num_rows else 0)

    def capture_support(self, inputs: Sequence[TensorSpec | None]) -> CaptureSupport:
        """Say yes once an execution was launched and its workspace is large enough for these."""
        # A kernel's first launch may load code, which would break a recording.
        shape, stats = self._shape(inputs), self._stats
        if stats.select_launches == 0 or (shape.num_cells and stats.score_launches == 0):
            return CaptureSupport(
                False,
                "it has not been launched yet; run once, with at least one row and one key, first",
            )
        needed = self.workspace_requirement(inputs).nbytes
        held = self.workspace.block.nbytes if self.workspace.block else 0
        if needed > held:
            return CaptureSupport(
                False,
                f"its workspace has {held:,} B and this shape needs {needed:,} B;"
                " run this shape once first",
            )
        return CaptureSupport(True)

    def _shape(self, inputs: Sequence[TensorSpec | None]) -> Shape:
        query, key = inputs[:2]
        assert query is not None  # the claim refuses omitted inputs
        assert key is not None
        batch, num_queries, num_heads, depth = query.sizes
        num_keys = key.sizes[1]
        return Shape(batch, num_queries, num_keys, num_heads, depth, self._attributes.top_k)

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return the workspace, whose address a recording bakes in."""
        return () if self.workspace.block is None else (self.workspace.block,)

    def close(self) -> None:
        """Give up the workspace and unload the code; graphs keep the memory they hold."""
        with ExitStack() as closing:
            closing.callback(self._module.close)
            closing.callback(self.workspace.close)


class DsaIndexSelectFactory(KernelFactory[KernelContext]):
    """Claim what the contract accepts.

    Args:
        grid_limit: the most blocks a launch may have; the device's limit when left out. A test's
            way to make every loop over the grid turn more than once.
    """

    def __init__(self, *, grid_limit: int = 2**31 - 1) -> None:
        if not isinstance(grid_limit, int) or isinstance(grid_limit, bool) or grid_limit < 1:
            raise InvalidInputError("grid_limit", found=repr(grid_limit), accepted="from 1")
        self._grid_limit = grid_limit

    def claim(self, node: Node, inputs: Sequence[TensorSpec | None]) -> KernelMatch:
        """Answer by the rules of spec.py."""
        try:
            return KernelMatch.supported(check_node(node, inputs)[1])
        except InvalidInputError as refusal:
            return KernelMatch.declined(str(refusal))

    def create(
        self, node: Node, inputs: Sequence[TensorSpec | None], context: KernelContext
    ) -> Kernel[Any]:
        """Compile or fetch the kernel and load it. Raises as the base class says."""
        attributes = check_node(node, inputs)[0]
        assert inputs[0] is not None  # check_node refuses an omitted query
        dtype = inputs[0].dtype
        return DsaIndexSelect(attributes, dtype, context, grid_limit=self._grid_limit)

    def compile_units(self) -> Sequence[CompileUnit]:
        """Return one unit for each input dtype."""
        return [compile_unit(dtype) for dtype in FLOAT_DTYPES]
