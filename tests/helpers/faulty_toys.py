"""Toy kernels that break the rules of recording on purpose, each in one way.

Every one computes as Scale does, so that its result tells whether the launch was made. What it does
besides is chosen by the test and can be changed at any time.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nxrt import (
    CaptureError,
    CaptureSupport,
    DriverError,
    Kernel,
    KernelFactory,
    KernelMatch,
    Node,
    Role,
    TensorSpec,
    TensorView,
)
from nxrt.runtime import driver
from nxrt.runtime.device_memory import copy_on_device, copy_to_host, fill_bytes
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.runtime.kernel_context import KernelContext
from nxrt.runtime.stream import ForeignStream, Stream
from tests.helpers.cuda_toys import SOURCE, CudaToyFactory, Scale

SCRATCH_NBYTES = 64


class PlantedError(Exception):
    """Is raised by a kernel that was told to."""


@dataclass
class Trouble:
    """Say what the Faulty kernels of one test do; may be changed between runs.

    Args:
        fault: a key of FAULTS; empty for none.
        is_honest: whether they say in `capture_support` that they cannot be captured.
        num_launches: how often they launch.
        closes: closed at the next execution.
    """

    fault: str = ""
    is_honest: bool = False
    num_launches: int = 1
    closes: list[GraphAllocation] = field(default_factory=list)


class Faulty(Scale):
    """Scale, and whatever `trouble` says."""

    def __init__(self, node: Node, context: KernelContext, trouble: Trouble) -> None:
        super().__init__(node, context)
        self.trouble = trouble
        self.usual_stream: Stream | None = None
        """The one of the runs that are not recorded."""
        role = Role.WORKSPACE
        self.scratch = context.allocator.allocate(SCRATCH_NBYTES, role=role, holder=node.name)

    def execute(
        self,
        inputs: Sequence[TensorView | None],
        outputs: Sequence[TensorView],
        *,
        stream: Stream,
    ) -> None:
        """Scale, misbehave."""
        if not stream.is_capturing:
            self.usual_stream = stream
        for _ in range(self.trouble.num_launches):
            super().execute(inputs, outputs, stream=stream)
        if self.trouble.fault:
            FAULTS[self.trouble.fault](self, outputs[0], stream)

    def capture_support(self, inputs: Sequence[TensorSpec | None]) -> CaptureSupport:
        """Tell the truth, or not."""
        if self.trouble.is_honest and self.trouble.fault:
            return CaptureSupport(False, f"it {self.trouble.fault}")
        return super().capture_support(inputs)

    def close(self) -> None:
        """Give up the scratch memory too."""
        self.scratch.close()
        super().close()


Fault = Callable[[Faulty, TensorView, Stream], None]


def _raises(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    raise PlantedError("planted")


def _allocates(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    role = Role.WORKSPACE
    kernel.context.allocator.allocate(256, role=role, holder=kernel.node.name).close()


def _allocates_past_nxrt(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    device = kernel.context.device
    pointer = device.create(driver.api.cuMemAlloc, 256)
    device.create(driver.api.cuMemFree, pointer)


def _copies_on_the_default_stream(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    default = ForeignStream(kernel.context.device, 0)
    half = SCRATCH_NBYTES // 2
    copy_on_device(kernel.scratch.pointer, kernel.scratch.pointer + half, half, stream=default)


def _fills_on_the_default_stream(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    default = ForeignStream(kernel.context.device, 0)
    fill_bytes(kernel.scratch.pointer, 0, SCRATCH_NBYTES, stream=default)


def _fills_on_the_usual_stream(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    assert kernel.usual_stream is not None
    fill_bytes(kernel.scratch.pointer, 0, SCRATCH_NBYTES, stream=kernel.usual_stream)


def _synchronizes(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    stream.synchronize()


def _synchronizes_the_usual_stream(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    assert kernel.usual_stream is not None
    kernel.usual_stream.synchronize()


def _reads_a_scalar_back(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    scalar = np.zeros(1, np.float32)
    copy_to_host(scalar, y.pointer, stream=stream)
    stream.synchronize()


def _queries_an_event(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    event = stream.fence()
    try:
        event.is_reached()
    finally:
        event.close()


def _loads_code(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    kernel.context.load(SOURCE).close()


def _hides_a_refused_wait(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    with suppress(CaptureError):
        stream.synchronize()


def _hides_a_refused_fill(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    """Run eagerly, this makes y zero; a recording that goes on without it computes something else.

    The stream is the one of eager runs, so that the order there is right.
    """
    assert kernel.usual_stream is not None
    with suppress(CaptureError):
        fill_bytes(y.pointer, 0, y.spec.nbytes(), stream=kernel.usual_stream)


def _hides_an_illegal_wait(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    with suppress(DriverError):
        driver.call(driver.api.cuStreamSynchronize, stream.handle)


def _hides_an_illegal_allocation(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    with suppress(DriverError):
        _allocates_past_nxrt(kernel, y, stream)


def _closes_memory(kernel: Faulty, y: TensorView, stream: Stream) -> None:
    while kernel.trouble.closes:
        kernel.trouble.closes.pop().close()


FAULTS: dict[str, Fault] = {
    function.__name__.removeprefix("_").replace("_", " "): function
    for function in (
        _raises,
        _allocates,
        _allocates_past_nxrt,
        _copies_on_the_default_stream,
        _fills_on_the_default_stream,
        _fills_on_the_usual_stream,
        _synchronizes,
        _synchronizes_the_usual_stream,
        _reads_a_scalar_back,
        _queries_an_event,
        _loads_code,
        _hides_a_refused_wait,
        _hides_a_refused_fill,
        _hides_an_illegal_wait,
        _hides_an_illegal_allocation,
        _closes_memory,
    )
}
"""By what the kernel does; only "closes memory" may be recorded."""

BREAKING_FAULTS = [name for name in FAULTS if name != "closes memory"]


class FaultyFactory(KernelFactory[KernelContext]):
    """Create kernels that do what `trouble` says."""

    def __init__(self, trouble: Trouble) -> None:
        self._trouble = trouble

    def claim(self, node: Node, inputs: Sequence[TensorSpec | None]) -> KernelMatch:
        """Take the node."""
        return CudaToyFactory(Scale).claim(node, inputs)

    def create(
        self,
        node: Node,
        inputs: Sequence[TensorSpec | None],  # noqa: ARG002
        context: KernelContext,
    ) -> Kernel[Any]:
        """Create the kernel."""
        return Faulty(node, context, self._trouble)
