"""A CUDA kernel of your own as a plug-in: compiled, claimed, run, captured and replayed."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from nxrt import (
    CaptureSupport,
    CudaProvider,
    DriverUnavailableError,
    DType,
    Graph,
    Kernel,
    KernelFactory,
    KernelMatch,
    KernelPlugin,
    MemoryGovernor,
    Node,
    OpKey,
    Session,
    TensorSpec,
)
from nxrt.runtime.module import LaunchConfig, launch

SOURCE = Path(__file__).with_name("double.cu")


class DoubleFactory(KernelFactory):
    def claim(self, node, inputs):
        if len(inputs) != 1 or inputs[0] is None or inputs[0].dtype is not DType.F32:
            return KernelMatch.declined(f"got {inputs}; accepted: one f32 tensor")
        if len(node.outputs) != 1 or node.attributes:
            return KernelMatch.declined("accepted: one output and no attributes")
        return KernelMatch.supported([inputs[0]])

    def create(self, node, inputs, context):
        return Double(context)


class Double(Kernel):
    def __init__(self, context):
        self._has_run = False
        with ExitStack() as undo:  # what is raised here leaves nothing behind
            self._module = context.load(SOURCE)  # compiled once, then from the cache
            undo.callback(self._module.close)
            self._function = self._module.function("double_elements")
            self._arguments = self._function.arguments(["pointer", "pointer", "u64"])
            undo.pop_all()

    def execute(self, inputs, outputs, *, stream):
        count = inputs[0].num_elements
        self._arguments.set(inputs[0].pointer, outputs[0].pointer, count)
        config = LaunchConfig(grid=(max(1, -(-count // 256)), 1, 1), block=(256, 1, 1))
        launch(self._function, config, self._arguments, stream=stream)
        self._has_run = True

    def capture_support(self, inputs):
        return CaptureSupport(self._has_run, "" if self._has_run else "run it once first")

    def close(self):
        self._module.close()


def main():
    try:
        provider = CudaProvider()
    except DriverUnavailableError as error:
        print(error)
        return
    with provider:
        key = OpKey("com.acme", "Double", 1)
        provider.registry.register(KernelPlugin("acme", ((key, DoubleFactory()),), "acme 1.0"))
        node = Node("Double", ("x",), ("y",), "com.acme")
        graph = Graph((node,), {"x": TensorSpec(DType.F32, ("N",))}, ("y",))
        with Session(graph, [provider], MemoryGovernor()) as session:
            binding = session.bind({"N": 3})
            binding.write("x", np.arange(3, dtype=np.float32))
            for first in (0, 3, 6):  # eager, captured and replayed, replayed
                binding.write("x", np.arange(first, first + 3, dtype=np.float32))
                session.step(binding)
            print(binding.read("y").tolist(), session.step_stats)


main()
