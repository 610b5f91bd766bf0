"""DsaIndexSelect past 32-bit indices: it takes tens of gigabytes of a real device."""

import numpy as np
import pytest

from nxrt import CudaProvider, Graph, MemoryGovernor, Session
from nxrt.kernels.dsa_index_select.spec import input_specs
from nxrt.runtime.device_memory import fill_bytes
from nxrt.tensor import DType
from tests.helpers.cases import OUTPUT, score_is_key

pytestmark = pytest.mark.gpu


@pytest.mark.slow
def test_cells_past_32_bits_are_addressed(cuda_provider: CudaProvider) -> None:
    """More cells than a 32-bit index reaches; rows round the crossing and the last are checked."""
    num_keys, top_k = 262_144, 16
    num_rows = 2**32 // num_keys + 8
    keys = np.random.default_rng(3).permutation(num_keys).astype(np.float32)
    small = score_is_key("template", keys, top_k, num_rows=1)
    specs = input_specs(DType.F32, B=1, S=num_rows, T=num_keys, H=1, D=1)
    graph = Graph((small.node,), specs, (OUTPUT,))
    with Session(graph, [cuda_provider], MemoryGovernor()) as session, session.bind() as binding:
        sign = np.where(np.arange(num_rows) % 2, -1, 1).astype(np.float32)
        binding.write("query", sign)
        binding.write("key", keys)
        binding.write("weights", np.ones(num_rows, np.float32))
        bias = binding.view("attention_bias")
        fill_bytes(bias.pointer, 0, bias.spec.nbytes(), stream=session._backend.stream)
        session.run(binding)
        selected = binding.read(OUTPUT)[0, 0]
    largest = np.sort(np.argsort(keys)[-top_k:])
    crossing = 2**32 // num_keys
    for row in (0, 1, crossing - 1, crossing, crossing + 1, num_rows - 2, num_rows - 1):
        expected = np.arange(top_k) if row % 2 else largest
        assert selected[row].tolist() == expected.tolist(), row
