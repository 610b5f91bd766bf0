"""DsaIndexSelect on CUDA: check, choose a route, size the workspace, launch.

The rules are in spec.py, the ways to run it in routes.py.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from nxrt.kernels.dsa_index_select.filter_layout import DEPTHS, DTYPES, HALF_DTYPES, FilterLimits
from nxrt.kernels.dsa_index_select.prefill_route import PrefillRoute, all_prefill_units
from nxrt.kernels.dsa_index_select.routes import (
    ExactRoute,
    FilterRoute,
    Route,
    RouteLaunch,
    exact_unit,
    filter_units,
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
from nxrt.runtime.module import BoundLaunch
from nxrt.runtime.stream import Stream
from nxrt.runtime.workspace import Workspace
from nxrt.tensor import DType, TensorSpec, TensorView

VECTOR_NBYTES = 16
"""What the filters load at once."""


@dataclass(frozen=True)
class LaunchStats:
    """Count real launches; a replay of a captured graph is none."""

    executions: int = 0
    score_launches: int = 0
    select_launches: int = 0
    filter_launches: int = 0
    prefill_launches: int = 0
    last_score_grid: int = 0
    last_select_grid: int = 0
    last_filter_grid: int = 0


@dataclass(frozen=True)
class _Checked:
    """One set of tensors that passed every check."""

    inputs: Sequence[TensorView | None]
    outputs: Sequence[TensorView]
    views: Sequence[TensorView]
    shape: Shape
    route: Route
    workspace_nbytes: int

    def are(self, inputs: Sequence[TensorView | None], outputs: Sequence[TensorView]) -> bool:
        """Say whether these are the very same tensors, and their memory is still there."""
        if self.inputs is not inputs or self.outputs is not outputs:
            return False
        for view in (*self.views, *outputs):
            view.storage.pointer  # noqa: B018  (raises once the memory is given back)
        return True


@dataclass(frozen=True)
class _Prepared:
    """What one set of tensors needs launched with one workspace block and these control words."""

    checked: _Checked
    block: GraphAllocation
    control: GraphAllocation | None
    launches: tuple[RouteLaunch, ...]

    def is_for(
        self, checked: _Checked, block: GraphAllocation, control: GraphAllocation | None
    ) -> bool:
        """Say whether it is for exactly these."""
        return self.checked is checked and self.block is block and self.control is control


class DsaIndexSelect(Kernel[Stream]):
    """Select by the route that a shape takes; nothing is launched where there are no rows.

    Safe to call from several threads, which take turns. Called again with the very same tuples of
    tensors, it launches what it prepared the first time.

    Args:
        attributes: checked.
        dtype: of query, key and weights.
        depth: D, None where the graph leaves it open.
        context: where the code is loaded and the workspace allocated.
        options: what the factory was told.
    """

    def __init__(
        self,
        attributes: Attributes,
        dtype: DType,
        depth: int | None,
        context: KernelContext,
        options: "RouteOptions",
    ) -> None:
        self._attributes = attributes
        self._dtype = dtype
        self._device = context.device
        self._lock = new_lock()
        self._num_executions = 0
        self._num_launches: Counter[str] = Counter()
        self._last_grids: dict[str, int] = {}
        self._last: _Prepared | None = None
        self._last_stream: Stream | None = None
        limit = min(options.grid_limit, context.device.capabilities.max_grid_x)
        has_filter = options.has_filter and dtype in DTYPES and depth in DEPTHS
        with ExitStack() as undo:
            self._exact = ExactRoute(attributes, dtype, context, grid_limit=limit)
            undo.callback(self._exact.close)
            self._filters: tuple[PrefillRoute | FilterRoute, ...] = ()
            if has_filter and depth is not None:
                decode = FilterRoute(attributes, dtype, depth, context, options.limits)
                undo.callback(decode.close)
                self._filters = (decode,)
                if dtype in HALF_DTYPES:
                    prefill = PrefillRoute(attributes, dtype, depth, context, options.limits)
                    self._filters = (prefill, decode)
            undo.pop_all()
        self.workspace = Workspace(context.allocator, holder="DsaIndexSelect")

    @property
    def stats(self) -> LaunchStats:
        """Return the launch counts so far."""
        with self._lock:
            kinds = ["score", "select", "filter"]
            grids = {f"last_{kind}_grid": self._last_grids.get(kind, 0) for kind in kinds}
            counts = {f"{kind}_launches": self._num_launches[kind] for kind in [*kinds, "prefill"]}
            return LaunchStats(self._num_executions, **counts, **grids)

    @property
    def last_launches(self) -> tuple[BoundLaunch, ...]:
        """Return what the last execution launched, for inspection."""
        last = self._last
        return () if last is None else tuple(launch.launch for launch in last.launches)

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
            lent = self.workspace.lend(checked.workspace_nbytes, stream=stream)
            with lent as block, checked.route.lend_control(checked.shape, stream=stream) as control:
                if last is None or not last.is_for(checked, block, control):
                    last = self._prepared(checked, block, control)
                self._launch(last, stream)
            self._last = last
            self._last_stream = stream

    def outcomes(self) -> list[tuple[int, bool]]:
        """Return for each row of the last execution how many keys were scored exactly, and whether
        its bounds left so much in doubt that all had to be.

        The execution's stream must have been synchronised. Empty before the first one.

        Raises:
            DriverError: the device's memory cannot be read.
        """
        with self._lock:
            last, stream = self._last, self._last_stream
            if last is None or stream is None:
                return []
            checked = last.checked
            return checked.route.outcomes(checked.shape, last.block.pointer, stream=stream)

    def forget(self) -> None:
        """Drop the tensors of the last execution."""
        with self._lock:
            self._last = self._last_stream = None

    def _checked(
        self, inputs: Sequence[TensorView | None], outputs: Sequence[TensorView]
    ) -> _Checked:
        shape, views = check_execution(self._attributes, inputs, outputs, must_be_contiguous=True)
        self._check_compiled(views[0].dtype)
        self._check_device((*views, *outputs))
        # Vectors are loaded whole: what does not begin at a multiple of one is summed key by key.
        is_aligned = all(view.pointer % VECTOR_NBYTES == 0 for view in views[:2])
        route = self._route(shape) if is_aligned else self._exact
        return _Checked(inputs, outputs, views, shape, route, route.workspace_nbytes(shape))

    def _route(self, shape: Shape) -> Route:
        return next((route for route in self._filters if route.serves(shape)), self._exact)

    def _launch(self, prepared: _Prepared, stream: Stream) -> None:
        for launch in prepared.launches:
            launch.launch.enqueue(stream)
            self._num_launches[launch.kind] += 1
            self._last_grids[launch.kind] = launch.num_blocks
        self._num_executions += 1

    def _prepared(
        self, checked: _Checked, block: GraphAllocation, control: GraphAllocation | None
    ) -> _Prepared:
        pointers = [view.pointer for view in (*checked.views, checked.outputs[0])]
        address = 0 if control is None else control.pointer
        launches = checked.route.prepare(checked.shape, pointers, block.pointer, address)
        return _Prepared(checked, block, control, launches)

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
        nbytes = self._route(shape).workspace_nbytes(shape)
        return WorkspaceRequirement(nbytes if shape.num_rows else 0)

    def capture_support(self, inputs: Sequence[TensorSpec | None]) -> CaptureSupport:
        """Say yes once an execution was launched and its workspace is large enough for these."""
        # A kernel's first launch may load code, which would break a recording.
        shape = self._shape(inputs)
        route = self._route(shape)
        if not all(self._num_launches[kind] for kind in route.kinds(shape)):
            return CaptureSupport(
                False,
                "it has not been launched yet; run once, with at least one row and one key, first",
            )
        needed = self.workspace_requirement(inputs).nbytes
        held = self.workspace.recordable_nbytes
        if needed > held or not route.is_recordable(shape):
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
        own = () if block is None else (block,)
        return (*own, *(resource for route in self._routes for resource in route.graph_resources()))

    @property
    def _routes(self) -> tuple[Route, ...]:
        return (self._exact, *self._filters)

    def close(self) -> None:
        """Give up the workspace and unload the code; graphs keep the memory they hold."""
        with ExitStack() as closing:
            for route in self._routes:
                closing.callback(route.close)
            closing.callback(self.workspace.close)


@dataclass(frozen=True)
class RouteOptions:
    """Say what routes a kernel may take.

    Args:
        grid_limit: the most blocks that a launch of the exact route may have. A test's way to make
            every loop over the grid turn more than once.
        has_filter: whether shapes that the certified filter serves take it.
        limits: what the filter may take of a device, None for all of it. A test's way to make its
            buffers overflow and its blocks take several rows.
    """

    grid_limit: int = 2**31 - 1
    has_filter: bool = True
    limits: FilterLimits | None = None


class DsaIndexSelectFactory(KernelFactory[KernelContext]):
    """Claim what the contract accepts.

    Args:
        grid_limit: see RouteOptions.
        has_filter: see RouteOptions.
        limits: see RouteOptions.
    """

    def __init__(
        self,
        *,
        grid_limit: int = 2**31 - 1,
        has_filter: bool = True,
        limits: FilterLimits | None = None,
    ) -> None:
        if not isinstance(grid_limit, int) or isinstance(grid_limit, bool) or grid_limit < 1:
            raise InvalidInputError("grid_limit", found=repr(grid_limit), accepted="from 1")
        self._options = RouteOptions(grid_limit, has_filter, limits)

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
        dtype, dim = inputs[0].dtype, inputs[0].shape[3]
        depth = dim if isinstance(dim, int) else None
        return DsaIndexSelect(attributes, dtype, depth, context, self._options)

    def compile_units(self) -> Sequence[CompileUnit]:
        """Return one unit for each input dtype, and what the certified filter needs."""
        return [*map(exact_unit, FLOAT_DTYPES), *filter_units(), *all_prefill_units()]
