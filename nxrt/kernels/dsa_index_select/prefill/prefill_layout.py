"""Sizes for the prefill kernels of DsaIndexSelect: lists, shared memory, samples, rows of a launch.

Pure arithmetic, in step with prefill_filter.cu and prefill_settle.cu; nothing here launches.
"""

import math
from dataclasses import dataclass

MAX_LISTS_NBYTES = 48 << 20
MAX_ROWS_PER_BLOCK = 8
MAX_CAPACITY = (1 << 15) - 1
"""A list's length and its count of reached thresholds share a word."""

NOT_COLLECTED = 0xFFFFFFFF
"""What counts hold for a row that prefill_settle.cu has to do alone."""

SETTLE_WARPS = 8
"""NXRT_WARPS of prefill_settle.cu: two of its blocks then fit a multiprocessor."""

_WARP_SIZE = 32
_ENTRY_NBYTES = 12
_NUM_BINS = 2048
_ROW_STATE_NBYTES = 40
_EXACT_KEYS = 4
_MAX_STRIDE = 64
_SIGMAS = 4


@dataclass(frozen=True)
class PrefillShape:
    """What the sizes depend on: the problem, and NXRT_WARPS of prefill_filter.cu (8 or 16)."""

    num_keys: int
    num_heads: int
    depth: int
    top_k: int
    filter_warps: int


@dataclass(frozen=True)
class PrefillPlan:
    """One launch of each kernel for `rows_per_launch` rows; more rows take more launches."""

    capacity: int
    rows_per_block: int
    rows_per_launch: int
    sample_stride: int
    sample_rank: int
    filter_shared_nbytes: int
    settle_shared_nbytes: int

    @property
    def lists_nbytes(self) -> int:
        """Return the bytes of the lists of one launch."""
        return self.rows_per_launch * self.capacity * _ENTRY_NBYTES

    @property
    def counts_nbytes(self) -> int:
        """Return the bytes of the counts of one launch."""
        return self.rows_per_launch * 4


def plan_prefill(
    shape: PrefillShape, num_rows: int, num_processors: int, max_shared_nbytes: int
) -> PrefillPlan | None:
    """Return the sizes, or None where a block's shared memory is too small for the shape.

    Args:
        shape: the problem; at least one key.
        num_rows: B * S, at least 1.
        num_processors: of the device; a block fills one.
        max_shared_nbytes: the most dynamic shared memory a block can have.
    """
    capacity = list_capacity(shape)
    settle_nbytes = settle_shared_nbytes(shape, capacity)
    most_rows = MAX_ROWS_PER_BLOCK
    while most_rows > 0 and filter_shared_nbytes(shape, most_rows) > max_shared_nbytes:
        most_rows -= 1
    if most_rows == 0 or settle_nbytes > max_shared_nbytes or capacity > MAX_CAPACITY:
        return None
    rows_per_launch = min(num_rows, max(1, MAX_LISTS_NBYTES // (capacity * _ENTRY_NBYTES)))
    num_waves = math.ceil(rows_per_launch / (most_rows * num_processors))
    rows_per_block = math.ceil(rows_per_launch / (num_waves * num_processors))
    stride, rank = sample_plan(shape, capacity)
    return PrefillPlan(
        capacity=capacity,
        rows_per_block=rows_per_block,
        rows_per_launch=rows_per_launch,
        sample_stride=stride,
        sample_rank=rank,
        filter_shared_nbytes=filter_shared_nbytes(shape, rows_per_block),
        settle_shared_nbytes=settle_nbytes,
    )


def list_capacity(shape: PrefillShape) -> int:
    """Return how many candidates a row may have: a guess's surplus, and one round's keys."""
    room = max(shape.filter_warps, SETTLE_WARPS) * _WARP_SIZE
    return max(2 * shape.top_k, shape.top_k + 3 * room)


def sample_plan(shape: PrefillShape, capacity: int) -> tuple[int, int]:
    """Return a sample's stride, in groups of 32 keys, and the rank that its threshold has in it.

    One key in `stride` is sampled. From the score of rank m on a row has stride * m keys, give or
    take stride * sqrt(m). So m - 4 sqrt(m) = top_k / stride makes fewer than top_k unlikely. The
    largest stride is taken whose surplus, with as many deviations, still fits a list. (0, 0) where
    no sample is worth it.
    """
    room = shape.filter_warps * _WARP_SIZE
    chosen = (0, 0)
    if shape.num_keys <= capacity:
        return chosen
    for stride in range(2, _MAX_STRIDE + 1):
        half = _SIGMAS / 2
        rank = math.ceil((half + math.sqrt(half**2 + shape.top_k / stride)) ** 2)
        most = stride * (rank + _SIGMAS * math.sqrt(rank))
        if most + room <= capacity and stride * rank < shape.num_keys:
            chosen = (stride, rank)
    return chosen


def filter_shared_nbytes(shape: PrefillShape, rows_per_block: int) -> int:
    """Return the dynamic shared memory of dsa_index_select_prefill."""
    num_heads = rows_per_block * _padded(shape.num_heads)
    return sum(
        map(
            _aligned,
            [
                num_heads * shape.depth * 2,
                num_heads * 4,
                _select_state_nbytes(shape.filter_warps),
                MAX_ROWS_PER_BLOCK * _ROW_STATE_NBYTES,
                shape.filter_warps * _WARP_SIZE * shape.depth * 2,
            ],
        )
    )


def settle_shared_nbytes(shape: PrefillShape, capacity: int) -> int:
    """Return the dynamic shared memory of dsa_index_select_settle."""
    num_heads = _padded(shape.num_heads)
    num_scored = SETTLE_WARPS * _EXACT_KEYS
    return sum(
        map(
            _aligned,
            [
                num_heads * shape.depth * 2,
                num_scored * shape.depth * 2,
                num_heads * 4,
                max(num_heads, shape.depth) * 4,
                num_scored * _WARP_SIZE * 4,
                _select_state_nbytes(SETTLE_WARPS),
                *[capacity * 4] * 4,
            ],
        )
    )


def _select_state_nbytes(num_warps: int) -> int:
    """Return the size of candidates.cuh's SelectState."""
    words = _NUM_BINS + 3 * num_warps + 3
    return (words + words % 2) * 4 + num_warps * 8


def _padded(num_heads: int) -> int:
    return -(-num_heads // 16) * 16


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
