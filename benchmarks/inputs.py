"""Inputs of the benchmarks: Gaussian, from one seed, in as many sets as defeat the L2 cache.

Keys are drawn once and every shape takes stretches of them: drawing costs more than measuring.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import IndexSelectShape
from nxrt import Binding, Graph, MemoryGovernor, Node, Session
from nxrt.kernels.dsa_index_select.spec import INPUT_NAMES, input_specs
from nxrt.kernels.numerics import narrow
from nxrt.providers.base import ExecutionProvider
from nxrt.tensor import DType

OUTPUT = "selected_indices"
L2_TIMES = 4
_SEED = 20
_MOST_SPARE = 2**17
"""Keys drawn beyond those of one stretch, so that stretches differ."""


class KeyPool:
    """Lend stretches of keys that were drawn once.

    Args:
        shapes: the largest decides how many are drawn; all have the same D.
    """

    def __init__(self, shapes: Iterable[IndexSelectShape]) -> None:
        sizes = [(shape.T + min(shape.T, _MOST_SPARE), shape.D) for shape in shapes]
        num_keys, depth = max(sizes)
        assert {depth} == {size[1] for size in sizes}, "one pool has keys of one width"
        rng = np.random.default_rng(_SEED)
        self._drawn = rng.standard_normal((num_keys, depth), np.float32)
        self._narrowed: dict[DType, NDArray[Any]] = {}

    def stretches(
        self, shape: IndexSelectShape, rng: np.random.Generator
    ) -> Iterator[NDArray[Any]]:
        """Yield for each batch its keys [T, D], as `shape.dtype` stores them; nothing is copied."""
        if shape.dtype not in self._narrowed:
            self._narrowed[shape.dtype] = narrow(self._drawn, shape.dtype)
        pool = self._narrowed[shape.dtype]
        for start in rng.integers(0, len(pool) - shape.T + 1, shape.B):
            yield pool[start : start + shape.T]


def num_sets(nbytes: int, l2_nbytes: int, num_runs: int) -> int:
    """Return how many sets of inputs take turns.

    Together they are more than four times the L2 cache, so that none is found there. More sets
    than runs are never needed: then each is read once, after everything else was pushed out.

    Args:
        nbytes: of one set.
        l2_nbytes: of the cache.
        num_runs: how often one of them is read.
    """
    return max(2, min(1 + L2_TIMES * l2_nbytes // nbytes, num_runs))


def graph_of(shape: IndexSelectShape) -> Graph:
    """Return a graph of one DsaIndexSelect."""
    attributes = {"top_k": shape.K, "scale": shape.D**-0.5, "weights_scale": shape.H**-0.5}
    node = Node("DsaIndexSelect", INPUT_NAMES, (OUTPUT,), domain="pkg.nxrt", attributes=attributes)
    specs = input_specs(shape.dtype, B=shape.B, S=shape.S, T=shape.T, H=shape.H, D=shape.D)
    return Graph((node,), specs, (OUTPUT,))


@contextmanager
def opened(
    provider: ExecutionProvider,
    shape: IndexSelectShape,
    num_bindings: int = 1,
    pool: KeyPool | None = None,
) -> Iterator[tuple[Session, list[Binding]]]:
    """Open a session on one shape, with as many sets of inputs written."""
    graph = graph_of(shape)
    pool = pool or KeyPool([shape])
    rng = np.random.default_rng(_SEED + 1)
    bias = np.zeros((shape.B, 1, shape.S, shape.T), np.float32)
    with ExitStack() as stack:
        session = stack.enter_context(Session(graph, [provider], MemoryGovernor()))
        bindings = [stack.enter_context(session.bind()) for _ in range(num_bindings)]
        for binding in bindings:
            for name in ("query", "weights"):
                values = rng.standard_normal(binding.specs[name].sizes, np.float32)
                binding.write(name, narrow(values, shape.dtype))
            for index, keys in enumerate(pool.stretches(shape, rng)):
                binding.write("key", keys, offset=index * keys.size)
            binding.write("attention_bias", bias)
        yield session, bindings
