"""What PyTorch takes for the same inputs, where it is installed, and the rate of its products.

Its scores are rounded otherwise and its ties come in any order, so it is a yardstick and no oracle.
"""

import statistics
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import cycle, pairwise
from typing import Any

from benchmarks.cases import IndexSelectShape
from benchmarks.inputs import num_sets
from nxrt.tensor import DType

BUSY_NBYTES = 512 * 2**20
MAX_SCORES_NBYTES = 40 * 2**30
"""Of the float32 scores of every head, which PyTorch materialises."""

MATRIX_SIZE = 8192
_WARM_UP = 4
_REPEATS = 21
_NAMES = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}


def has_torch() -> bool:
    """Say whether PyTorch is installed and sees a device."""
    if find_spec("torch") is None:
        return False
    import torch  # noqa: PLC0415  (it may be missing)

    return bool(torch.cuda.is_available())


def torch_version() -> str | None:
    """Return the version of PyTorch, None where it is not installed."""
    if find_spec("torch") is None:
        return None
    import torch  # noqa: PLC0415  (it may be missing)

    return str(torch.__version__)


def matrix_flops_per_s() -> float:
    """Return what a bf16 product of two matrices of 8,192 x 8,192 reaches; the median of 21."""
    import torch  # noqa: PLC0415  (it may be missing)

    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    left, right = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, **options) for _ in range(2))
    product = torch.empty_like(left)
    elapsed = _timed([lambda: torch.matmul(left, right, out=product)])
    return 2 * MATRIX_SIZE**3 / statistics.median(elapsed) * 1e6


def torch_us(shape: IndexSelectShape, l2_nbytes: int) -> float | None:
    """Return the median of captured, cold runs in microseconds; None where memory would not do.

    As ours: several sets of inputs take turns, each with a graph of its own.

    Args:
        shape: what to compute, in its own dtype; PyTorch knows no bias.
        l2_nbytes: of the device's cache.
    """
    if 4 * shape.num_rows * shape.T * shape.H > MAX_SCORES_NBYTES:
        return None
    import torch  # noqa: PLC0415  (it may be missing)

    count = num_sets(shape.input_nbytes, l2_nbytes, _WARM_UP + _REPEATS)
    try:
        replays = _captured(shape, count)
        return statistics.median(_timed(replays))
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        replays = []
        torch.cuda.empty_cache()


def _captured(shape: IndexSelectShape, count: int) -> list[Callable[[], object]]:
    """Return as many replays, each of a graph over inputs of its own."""
    import torch  # noqa: PLC0415  (it may be missing)

    # The graphs share the memory of their scores: they run one after another, and nobody reads it.
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()
    replays: list[Callable[[], object]] = []
    for _ in range(count):
        select = _selection(shape)
        side.wait_stream(torch.cuda.current_stream())
        if (
            not replays
        ):  # libraries set themselves up at their first call, which may not be captured
            with torch.cuda.stream(side):
                for _ in range(2):
                    select()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            select()
        graph.replay()  # the first launch of a graph costs more
        replays.append(_replay_of(graph, select))
    return replays


def _replay_of(graph: Any, kept: object) -> Callable[[], object]:
    """Return a graph's replay, which keeps its inputs alive."""

    def replay(_kept: object = kept) -> None:
        graph.replay()

    return replay


def _selection(shape: IndexSelectShape) -> Callable[[], object]:
    """Return the operator on inputs drawn on the device."""
    import torch  # noqa: PLC0415  (it may be missing)

    options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, _NAMES[shape.dtype])}
    query = torch.randn(shape.B, shape.S, shape.H, shape.D, **options)
    key = torch.randn(shape.B, shape.T, shape.D, **options)
    weights = torch.randn(shape.B, shape.S, shape.H, **options)

    def select() -> object:
        dots = torch.einsum("bshd,btd->bsht", query, key)
        scores = (dots.relu() * weights[..., None]).sum(2, dtype=torch.float32)
        return scores.topk(min(shape.K, shape.T), sorted=False).indices

    return select


def _timed(actions: Sequence[Callable[[], object]]) -> list[float]:
    """Return the microseconds of each of many runs, the actions taking turns.

    The device is kept busy at first, so that it never waits for the host.
    """
    import torch  # noqa: PLC0415  (it may be missing)

    busy = torch.empty(BUSY_NBYTES, dtype=torch.uint8, device="cuda")
    count = _WARM_UP + _REPEATS
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    for index in range(8):
        busy.fill_(index)
    for event, action in zip(events[:-1], cycle(actions), strict=False):
        event.record()
        action()
    events[-1].record()
    events[-1].synchronize()
    return [float(first.elapsed_time(last)) * 1e3 for first, last in pairwise(events)][_WARM_UP:]
