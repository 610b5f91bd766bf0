"""DsaIndexSelect on CUDA: check, size the workspace, launch score and select.

The arithmetic is in dsa_index_select.cu, the rules are in spec.py.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from nxrt.locks import new_lock
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.kernel_context import KernelContext
from nxrt.runtime.module import BoundLaunch, KernelArguments, LaunchConfig
from nxrt.runtime.stream import Stream
from nxrt.runtime.workspace import Workspace
from nxrt.tensor import DType, TensorSpec, TensorView, checked_product

SOURCE = Path(__file__).with_name("dsa_index_select.cu")
BLOCK_T = 32
"""Keys of one row that a block of the score kernel takes; as in the .cu."""

_SCORE_THREADS = 256
_SELECT_THREADS = 1024
_ALIGNMENT = 256
_SCORE_ARGUMENTS = ("pointer",) * 6 + ("u64",) * 5 + ("f32",) * 2
_SELECT_ARGUMENTS = ("pointer",) * 3 + ("u64",) * 3
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


@dataclass(frozen=True)
class _Checked:
    """One set of tensors that passed every check."""

    inputs: Sequence[TensorView | None]
    outputs: Sequence[TensorView]
    views: Sequence[TensorView]
    shape: Shape
    layout: WorkspaceLayout

    def are(self, inputs: Sequence[TensorView | None], outputs: Sequence[TensorView]) -> bool:
        """Say whether these are the very same tensors, and their memory is still there."""
        if self.inputs is not inputs or self.outputs is not outputs:
            return False
        for view in (*self.views, *outputs):
            view.storage.pointer  # noqa: B018  (raises once the memory is given back)
        return True


@dataclass(frozen=True)
class _Launches:
    """What one set of tensors needs launched with one workspace block."""

    checked: _Checked
    block: GraphAllocation
    score: BoundLaunch | None
    select: BoundLaunch
    score_grid: int
    select_grid: int


class DsaIndexSelect(Kernel[Stream]):
    """Score every allowed key, then select; two launches, none where there are no rows.

    Safe to call from several threads, which take turns. Called again with the very same tuples of
    tensors, it launches what it prepared the first time.

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
        self._lock = new_lock()
        self._num_executions = self._num_score_launches = self._num_select_launches = 0
        self._last_score_grid = self._last_select_grid = 0
        self._last: _Launches | None = None
        unit = compile_unit(dtype)
        with ExitStack() as undo:
            self._module = context.load(
                unit.path, defines=unit.defines, flags=unit.flags, artefact=unit.artefact
            )
            undo.callback(self._module.close)
            self._score = self._module.function("dsa_index_select_score")
            self._select = self._module.function("dsa_index_select_select")
            self._score.arguments(_SCORE_ARGUMENTS)  # fails here where they do not fit the code
            self._select.arguments(_SELECT_ARGUMENTS)
            undo.pop_all()
        self.workspace = Workspace(context.allocator, holder="DsaIndexSelect")

    @property
    def stats(self) -> LaunchStats:
        """Return the launch counts so far."""
        with self._lock:
            return LaunchStats(
                self._num_executions,
                self._num_score_launches,
                self._num_select_launches,
                self._last_score_grid,
                self._last_select_grid,
            )

    @property
    def last_launches(self) -> tuple[BoundLaunch, ...]:
        """Return what the last execution launched, for inspection."""
        last = self._last
        return () if last is None else tuple(x for x in (last.score, last.select) if x is not None)

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
            last = self._last
            if last is not None and last.checked.are(inputs, outputs):
                checked = last.checked
            else:
                checked = self._checked(inputs, outputs)
            if checked.shape.num_rows == 0:
                return
            with self.workspace.lend(checked.layout.nbytes, stream=stream) as block:
                if last is None or last.checked is not checked or last.block is not block:
                    last = self._prepared(checked, block)
                self._launch(last, stream)
            self._last = last

    def forget(self) -> None:
        """Drop the tensors of the last execution."""
        with self._lock:
            self._last = None

    def _checked(
        self, inputs: Sequence[TensorView | None], outputs: Sequence[TensorView]
    ) -> _Checked:
        shape, views = check_execution(self._attributes, inputs, outputs, must_be_contiguous=True)
        self._check_compiled(views[0].dtype)
        self._check_device((*views, *outputs))
        return _Checked(inputs, outputs, views, shape, WorkspaceLayout.of(shape))

    def _launch(self, launches: _Launches, stream: Stream) -> None:
        if launches.score is not None:
            launches.score.enqueue(stream)
            self._num_score_launches += 1
            self._last_score_grid = launches.score_grid
        launches.select.enqueue(stream)
        self._num_select_launches += 1
        self._last_select_grid = launches.select_grid
        self._num_executions += 1

    def _prepared(self, checked: _Checked, block: GraphAllocation) -> _Launches:
        shape = checked.shape
        scores, allowed = block.pointer, block.pointer + checked.layout.allowed_offset
        score, score_grid = None, 0
        if shape.num_cells:
            pointers = (view.pointer for view in checked.views)
            sizes = (shape.num_rows, shape.S, shape.T, shape.H, shape.D)
            scales = (self._attributes.scale, self._attributes.weights_scale)
            arguments = KernelArguments(_SCORE_ARGUMENTS)
            arguments.set(*pointers, scores, allowed, *sizes, *scales)
            score_grid = self._grid(shape.num_rows * -(-shape.T // BLOCK_T))
            config = LaunchConfig((score_grid, 1, 1), (_SCORE_THREADS, 1, 1))
            score = BoundLaunch(self._score, config, arguments)
        arguments = KernelArguments(_SELECT_ARGUMENTS)
        selected = checked.outputs[0].pointer
        arguments.set(scores, allowed, selected, shape.num_rows, shape.T, shape.K)
        select_grid = self._grid(shape.num_rows)
        config = LaunchConfig((select_grid, 1, 1), (_SELECT_THREADS, 1, 1))
        select = BoundLaunch(self._select, config, arguments)
        return _Launches(checked, block, score, select, score_grid, select_grid)

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
        shape = self._shape(inputs)
        is_scored = shape.num_cells == 0 or self._num_score_launches > 0
        if self._num_select_launches == 0 or not is_scored:
            return CaptureSupport(
                False,
                "it has not been launched yet; run once, with at least one row and one key, first",
            )
        needed = self.workspace_requirement(inputs).nbytes
        held = self.workspace.recordable_nbytes
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
        """Return the workspace of recordings, whose address they bake in."""
        block = self.workspace.graph_block
        return () if block is None else (block,)

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
