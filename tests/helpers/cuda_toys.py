"""Toy operators on CUDA, as a plug-in: compiled and launched on a card, imitated on its double.

They serve the tests of graphs and streams; what misbehaves on purpose is in faulty_toys.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nxrt import (
    CaptureSupport,
    DType,
    Kernel,
    KernelFactory,
    KernelMatch,
    Node,
    TensorSpec,
    TensorView,
)
from nxrt.kernels.api import GraphResource
from nxrt.runtime.kernel_context import KernelContext
from nxrt.runtime.module import LaunchConfig, launch
from nxrt.runtime.stream import Stream
from nxrt.runtime.workspace import Workspace
from tests.helpers.fake_driver import FakeDriver, Shape3

SOURCE = Path(__file__).with_name("cuda_toys.cu")
DOMAIN = "test.cuda"

NEGATIVE, PAST = "an index below 0", "an index past the end"
"""What Gather reports, as bits 1 and 2."""

_THREADS = 64
_MUCH_SHARED = 48 * 1024 + 512


def toy_node(op: str, *inputs: str, output: str, name: str, **attributes: float) -> Node:
    """Return a node of a toy operator with one output."""
    return Node(op, inputs, (output,), DOMAIN, attributes, name)


class Scale(Kernel[Stream]):
    """y = factor * x; one launch.

    Args:
        node: named in errors; `factor` is an attribute, 2 when left out.
        context: where the code is loaded.
    """

    entry: ClassVar[str] = "toy_scale"
    kinds: ClassVar[tuple[str, ...]] = ("pointer", "pointer", "f32", "u64")

    def __init__(self, node: Node, context: KernelContext) -> None:
        self.node = node
        self.context = context
        self.has_run = False
        with ExitStack() as undo:
            self._module = context.load(SOURCE)
            undo.callback(self._module.close)
            self._function = self._module.function(self.entry)
            self._arguments = self._function.arguments(self.kinds)
            undo.pop_all()

    def execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorView],
        *,
        stream: Stream,
    ) -> None:
        """Launch over the elements of the output; nothing where there are none."""
        (x, *_), (y,) = inputs, outputs
        assert x is not None
        factor = self.node.attributes.get("factor", 2.0)
        self.launch(stream, y.num_elements, x.pointer, y.pointer, factor, y.num_elements)

    def launch(self, stream: Stream, count: int, *values: Any) -> None:
        """Launch the kernel's own entry point over `count` elements."""
        if count:
            self._arguments.set(*values)
            config = LaunchConfig((-(-count // _THREADS), 1, 1), (_THREADS, 1, 1))
            launch(self._function, config, self._arguments, stream=stream)
        self.has_run = True

    def capture_support(
        self,
        inputs: Sequence[TensorSpec | None],  # noqa: ARG002
    ) -> CaptureSupport:
        """Say yes once it was launched: the first launch may load code."""
        return CaptureSupport(self.has_run, "" if self.has_run else "run it once first")

    def close(self) -> None:
        """Unload the code."""
        self._module.close()


class Append(Scale):
    """total += x: reads what it has written before, so that every missing or second run shows."""

    entry = "toy_append"
    kinds = ("pointer", "pointer", "u64")

    def execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorView],
        *,
        stream: Stream,
    ) -> None:
        """Add the input to the output."""
        (x,), (total,) = inputs, outputs
        assert x is not None
        self.launch(stream, total.num_elements, x.pointer, total.pointer, total.num_elements)


def _together(count: int) -> LaunchConfig:
    grid, block = (-(-count // _THREADS), 1, 1), (_THREADS, 1, 1)
    return LaunchConfig(grid, block, _MUCH_SHARED, is_cooperative=True)


class Accumulate(Scale):
    """y[i] = factor * (x[0] + ... + x[i]): two launches, with a workspace as large as x.

    The second asks for all blocks at once, and for more shared memory than a launch may by itself.
    """

    def __init__(self, node: Node, context: KernelContext) -> None:
        super().__init__(node, context)
        with ExitStack() as undo:
            undo.callback(self._module.close)
            self._sum = self._module.function("toy_sum")
            self._sum_arguments = self._sum.arguments(["pointer", "pointer", "u64"])
            self._sum.allow_shared(_MUCH_SHARED)
            undo.pop_all()
        self.workspace = Workspace(context.allocator, holder=node.name)

    def execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorView],
        *,
        stream: Stream,
    ) -> None:
        """Scale into the workspace, then sum from there."""
        (x,), (y,) = inputs, outputs
        assert x is not None
        count, factor = y.num_elements, self.node.attributes.get("factor", 1.0)
        with self.workspace.lend(y.spec.nbytes(), stream=stream) as block:
            self.launch(stream, count, x.pointer, block.pointer, factor, count)
            self.launch_sum(block.pointer, y.pointer, count, stream=stream)

    def launch_sum(self, *values: int, stream: Stream) -> None:
        """Launch the second kernel; its last value is the count."""
        if values[-1]:
            self._sum_arguments.set(*values)
            launch(self._sum, _together(values[-1]), self._sum_arguments, stream=stream)

    def capture_support(self, inputs: Sequence[TensorSpec | None]) -> CaptureSupport:
        """Say yes once it was launched with as many elements."""
        (x,) = inputs
        assert x is not None
        if self.workspace.recordable_nbytes < x.nbytes():
            return CaptureSupport(False, "its workspace is too small; run this shape once first")
        return super().capture_support(inputs)

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return the workspace of recordings."""
        block = self.workspace.graph_block
        return () if block is None else (block,)

    def close(self) -> None:
        """Give up the workspace too."""
        self.workspace.close()
        super().close()


class Gather(Scale):
    """y[i] = x[index[i]]; an index that is out of range is reported, and -1 written."""

    entry = "toy_gather"
    kinds = ("pointer",) * 3 + ("u64",) * 2 + ("pointer",) * 2

    def __init__(self, node: Node, context: KernelContext) -> None:
        super().__init__(node, context)
        with ExitStack() as undo:
            undo.callback(self._module.close)
            self.slot = context.fault_slot(node.name, {1: NEGATIVE, 2: PAST})
            undo.pop_all()

    def execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorView],
        *,
        stream: Stream,
    ) -> None:
        """Launch over the elements of the index."""
        (x, index), (y,) = inputs, outputs
        assert x is not None
        assert index is not None
        pointers = (x.pointer, index.pointer, y.pointer)
        sizes = (x.num_elements, y.num_elements)
        self.launch(stream, y.num_elements, *pointers, *sizes, self.slot.slot, self.slot.step)


class CudaToyFactory(KernelFactory[KernelContext]):
    """Take every node; the output is described as the last input is, but as float32."""

    def __init__(self, kernel: type[Scale]) -> None:
        self._kernel = kernel

    def claim(
        self,
        node: Node,  # noqa: ARG002
        inputs: Sequence[TensorSpec | None],
    ) -> KernelMatch:
        """Take the node."""
        last = inputs[-1]
        assert last is not None
        return KernelMatch.supported([TensorSpec(DType.F32, last.shape)])

    def create(
        self,
        node: Node,
        inputs: Sequence[TensorSpec | None],  # noqa: ARG002
        context: KernelContext,
    ) -> Kernel[Any]:
        """Compile or fetch, load, create."""
        return self._kernel(node, context)


HONEST_TOYS: dict[str, KernelFactory[Any]] = {
    kernel.__name__: CudaToyFactory(kernel) for kernel in (Scale, Append, Accumulate, Gather)
}


class ToyStandIns:
    """Do on the double what cuda_toys.cu does on a card."""

    def __init__(self, fake: FakeDriver) -> None:
        self._fake = fake

    def register(self) -> None:
        """Register every entry point."""
        self._fake.register("toy_scale", "QQfQ", self.scale)
        self._fake.register("toy_append", "QQQ", self.append)
        self._fake.register("toy_sum", "QQQ", self.sum)
        self._fake.register("toy_gather", "QQQQQQQ", self.gather)

    def scale(self, x: int, y: int, factor: float, count: int, *_shape: Shape3) -> None:
        """y = factor * x."""
        self._floats(y, count)[...] = np.float32(factor) * self._floats(x, count)

    def append(self, x: int, total: int, count: int, *_shape: Shape3) -> None:
        """Add x to total."""
        self._floats(total, count)[...] += self._floats(x, count)

    def sum(self, staged: int, y: int, count: int, *_shape: Shape3) -> None:
        """Write the sums of all first elements, in order."""
        self._floats(y, count)[...] = np.cumsum(self._floats(staged, count), dtype=np.float32)

    def gather(
        self,
        x: int,
        index: int,
        y: int,
        num_x: int,
        count: int,
        slot: int,
        step: int,
        *_shape: Shape3,
    ) -> None:
        """Gather, and report what is out of range."""
        values, places = self._floats(x, num_x), self._fake.array(index, np.int64, (count,))
        is_inside = (places >= 0) & (places < num_x)
        gathered = self._floats(y, count)
        gathered[...] = -1
        gathered[is_inside] = values[places[is_inside]]
        bits = (1 if (places < 0).any() else 0) | (2 if (places >= num_x).any() else 0)
        latched = self._fake.array(slot, np.uint32, (2,))
        if bits and latched[0] == 0:
            latched[1] = self._fake.array(step, np.uint32, (1,))[0]
        latched[0] |= np.uint32(bits)

    def _floats(self, pointer: int, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self._fake.array(pointer, np.float32, (count,))
