"""What PyTorch takes for the same inputs, where it is installed: einsum, ReLU, weighted sum, top-k.

Its scores are rounded otherwise and its ties come in any order, so it is a yardstick and no oracle.
"""

import statistics
from importlib.util import find_spec
from typing import Any

from benchmarks.cases import IndexSelectShape

FLUSH_NBYTES = 512 * 2**20
MAX_SCORES_NBYTES = 40 * 2**30
"""Of the float32 scores of every head, which PyTorch materialises."""


def has_torch() -> bool:
    """Say whether PyTorch is installed and sees a device."""
    if find_spec("torch") is None:
        return False
    import torch  # noqa: PLC0415  (it may be missing)

    return bool(torch.cuda.is_available())


def torch_us(shape: IndexSelectShape, *, repeats: int = 21) -> float | None:
    """Return the median of captured, cold runs in microseconds; None where memory would not do."""
    if 4 * shape.B * shape.S * shape.T * shape.H > MAX_SCORES_NBYTES:
        return None
    import torch  # noqa: PLC0415  (it may be missing)

    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    query = torch.randn(shape.B, shape.S, shape.H, shape.D, **options)
    key = torch.randn(shape.B, shape.T, shape.D, **options)
    weights = torch.randn(shape.B, shape.S, shape.H, **options)

    def select() -> Any:
        dots = torch.einsum("bshd,btd->bsht", query, key)
        scores = (dots.relu() * weights[..., None]).sum(2, dtype=torch.float32)
        return scores.topk(min(shape.K, shape.T), sorted=False).indices

    for _ in range(3):
        select()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select()
    flush = torch.empty(FLUSH_NBYTES, dtype=torch.uint8, device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    elapsed = []
    for index in range(repeats):
        flush.fill_(index)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        elapsed.append(first.elapsed_time(last) * 1e3)
    return float(statistics.median(elapsed))
