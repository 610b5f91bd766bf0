"""Select the best 4 of 64 keys: a whole use of nxrt in ten lines. Run it with `python`."""

import numpy as np

from nxrt import DType, Graph, MemoryBudget, MemoryGovernor, Node, Session, select_provider
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES, input_specs

node = Node("DsaIndexSelect", INPUT_NAMES, ("selected",), "pkg.nxrt", {"top_k": 4, "scale": 0.177})
specs = input_specs(DType.F32, B=1, S=1, T="T", H=8, D=32)
graph = Graph((node,), specs, ("selected",))
governor = MemoryGovernor(MemoryBudget.of(device="64 MiB", pinned="4 MiB", host="64 MiB"))
with select_provider("auto").provider as provider, Session(graph, [provider], governor) as session:
    with session.bind({"T": 64}) as binding:
        for name in INPUT_NAMES:
            binding.write(name, np.sin(np.arange(binding.specs[name].num_elements(), dtype="f4")))
        session.run(binding)
        print(binding.read("selected").ravel(), "on", provider.name)
