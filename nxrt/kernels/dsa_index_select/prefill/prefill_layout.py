"""Sizes for the prefill kernels of DsaIndexSelect: lists, shared memory, samples, rows of a launch.

Pure arithmetic, in step with prefill_filter.cu, warpgroup_filter.cu and prefill_settle.cu; nothing
here launches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

MAX_LISTS_NBYTES = 48 << 20
MAX_ROWS_PER_BLOCK = 8
MAX_CAPACITY = (1 << 15) - 1
"""A list's length and its count of reached thresholds share a word."""

NOT_COLLECTED = 0xFFFFFFFF
"""A record's length for a row that prefill_settle.cu has to do alone."""

RECORD_FIELDS = ("length", "has_totals", "has_bias", "num_scored", "is_exact")
"""The first words of row_record.cuh's RowRecord; the row's radius follows."""

RECORD_WORDS = len(RECORD_FIELDS) + 6

SETTLE_WARPS = 8
"""NXRT_WARPS of prefill_settle.cu: two of its blocks then fit a multiprocessor."""

WARPGROUP_WARPS = 8
"""NXRT_WARPS of warpgroup_filter.cu."""

ROWS_OF_HEADS = {32: 8, 64: 4}
"""Up to so many heads, warpgroup_filter.cu has a kernel for so many rows of a block."""

_WARP_SIZE = 32
_BOUNDS_WORDS = 3
_TOTALS_WORDS = 2
_NUM_BINS = 2048
_ROW_STATE_NBYTES = 40
_EXACT_KEYS = 4
_MAX_STRIDE = 64
_SIGMAS = 4

_TILE_KEYS = 64
_COLUMNS = 256
_GUESS_BINS = 256
_SAMPLE_CAPACITY = 3072
_MIN_CAPACITY = 2048
_WARPGROUP_SIGMAS = 5
_WARPGROUP_ROW_STATE_NBYTES = 96
_OPERAND_ALIGNMENT = 1024
_MAX_WARPGROUP_KEYS = 2**31


@dataclass(frozen=True)
class PrefillShape:
    """What the sizes depend on: the problem, and NXRT_WARPS of prefill_filter.cu (8 or 16)."""

    num_keys: int
    num_heads: int
    depth: int
    top_k: int
    filter_warps: int


@dataclass(frozen=True)
class Sample:
    """Look at every stride-th group of keys for a score that a little more than `rank` reach."""

    stride: int = 0
    rank: int = 0


@dataclass(frozen=True)
class PrefillPlan:
    """One launch of each kernel for `rows_per_launch` rows; more rows take more launches.

    Args:
        entry_words: of a list: 3 for bounds, 2 for totals, which only warpgroup_filter.cu gives.
        most_rows: of a block, as the kernel is compiled.
        samples: in the order they are taken; without a stride where there is none.
    """

    capacity: int
    entry_words: int
    most_rows: int
    rows_per_block: int
    rows_per_launch: int
    samples: tuple[Sample, ...]
    filter_shared_nbytes: int
    settle_shared_nbytes: int

    @property
    def has_warpgroups(self) -> bool:
        """Say whether warpgroup_filter.cu runs it."""
        return self.entry_words == _TOTALS_WORDS

    @property
    def lists_nbytes(self) -> int:
        """Return the bytes of the lists of one launch."""
        return self.rows_per_launch * self.list_words * 4

    @property
    def list_words(self) -> int:
        """Return the words of one row's list."""
        return self.capacity * self.entry_words


def plan_prefill(
    shape: PrefillShape, num_rows: int, num_processors: int, max_shared_nbytes: int
) -> PrefillPlan | None:
    """Return the sizes for prefill_filter.cu, or None where shared memory is too small.

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
    rows_per_launch = min(num_rows, max(1, MAX_LISTS_NBYTES // (capacity * _BOUNDS_WORDS * 4)))
    rows_per_block = _rows_per_block(rows_per_launch, most_rows, num_processors)
    return PrefillPlan(
        capacity=capacity,
        entry_words=_BOUNDS_WORDS,
        most_rows=most_rows,
        rows_per_block=rows_per_block,
        rows_per_launch=rows_per_launch,
        samples=(sample_plan(shape, capacity),),
        filter_shared_nbytes=filter_shared_nbytes(shape, rows_per_block),
        settle_shared_nbytes=settle_nbytes,
    )


def rows_of_block(num_heads: int) -> int:
    """Return the most rows of a block of warpgroup_filter.cu, 0 where it has no kernel."""
    return next((rows for most, rows in ROWS_OF_HEADS.items() if num_heads <= most), 0)


def plan_warpgroups(
    shape: PrefillShape, num_rows: int, num_processors: int, max_shared_nbytes: int
) -> PrefillPlan | None:
    """Return the sizes for warpgroup_filter.cu, or None where it does not serve the shape.

    It serves up to 64 heads, and as many keys as a sample of a sample can tell of; the device is
    the caller's matter. For the arguments see `plan_prefill`.
    """
    most_rows = rows_of_block(shape.num_heads)
    capacity = warpgroup_list_capacity(shape.top_k)
    if most_rows == 0 or capacity > MAX_CAPACITY or shape.num_keys >= _MAX_WARPGROUP_KEYS:
        return None
    samples = warpgroup_samples(shape.num_keys, shape.top_k, capacity)
    filter_nbytes = warpgroup_shared_nbytes(shape, most_rows)
    settle_nbytes = settle_shared_nbytes(shape, capacity)
    if samples is None or max(filter_nbytes, settle_nbytes) > max_shared_nbytes:
        return None
    # A wave that is not full costs as much as one that is.
    wave = most_rows * num_processors
    most = max(1, MAX_LISTS_NBYTES // (capacity * _TOTALS_WORDS * 4))
    rows_per_launch = min(num_rows, most // wave * wave or most)
    return PrefillPlan(
        capacity=capacity,
        entry_words=_TOTALS_WORDS,
        most_rows=most_rows,
        rows_per_block=_rows_per_block(rows_per_launch, most_rows, num_processors),
        rows_per_launch=rows_per_launch,
        samples=samples,
        filter_shared_nbytes=filter_nbytes,
        settle_shared_nbytes=settle_nbytes,
    )


def _rows_per_block(num_rows: int, most_rows: int, num_processors: int) -> int:
    num_waves = math.ceil(num_rows / (most_rows * num_processors))
    return math.ceil(num_rows / (num_waves * num_processors))


def list_capacity(shape: PrefillShape) -> int:
    """Return how many candidates a row may have: a guess's surplus, and one round's keys."""
    room = max(shape.filter_warps, SETTLE_WARPS) * _WARP_SIZE
    return max(2 * shape.top_k, shape.top_k + 3 * room)


def warpgroup_list_capacity(top_k: int) -> int:
    """Return how many candidates a row may have: as much as a sparse sample's surplus needs.

    prefill_settle.cu, where it does a row alone, must have room for a round of its keys as well.
    """
    room = 3 * SETTLE_WARPS * _WARP_SIZE
    return _padded(max(top_k * 5 // 2, top_k + room, _MIN_CAPACITY))


def sample_plan(shape: PrefillShape, capacity: int) -> Sample:
    """Return a sample's stride, in groups of 32 keys, and the rank that its threshold has in it.

    One key in `stride` is sampled. From the score of rank m on a row has stride * m keys, give or
    take stride * sqrt(m). So m - 4 sqrt(m) = top_k / stride makes fewer than top_k unlikely. The
    largest stride is taken whose surplus, with as many deviations, still fits a list. None where
    no sample is worth it.
    """
    room = shape.filter_warps * _WARP_SIZE
    chosen = Sample()
    if shape.num_keys <= capacity:
        return chosen
    for stride in range(2, _MAX_STRIDE + 1):
        rank, most = _surplus(shape.top_k, stride, _SIGMAS)
        if most + room <= capacity and stride * rank < shape.num_keys:
            chosen = Sample(stride, rank)
    return chosen


def warpgroup_samples(num_keys: int, top_k: int, capacity: int) -> tuple[Sample, Sample] | None:
    """Return two samples, in tiles of 64 keys, by the rule of `sample_plan` with 5 deviations.

    Where a sample has more keys than shared memory holds, another goes before it, so that only the
    best of its keys have to be held. None where that is not enough.
    """
    if num_keys <= capacity:
        return Sample(), Sample()
    num_tiles = -(-num_keys // _TILE_KEYS)
    chosen = _largest_stride(num_tiles, 1, top_k, lambda most, _: most <= capacity)
    if chosen is None:
        return None
    if _num_sampled(num_tiles, chosen.stride) <= _SAMPLE_CAPACITY:
        return Sample(), chosen

    def is_held(most: float, stride: int) -> bool:
        return max(most, _num_sampled(num_tiles, stride)) <= _SAMPLE_CAPACITY

    first = _largest_stride(num_tiles, chosen.stride, chosen.rank, is_held)
    return None if first is None else (first, chosen)


def _largest_stride(
    num_tiles: int, base: int, wanted: int, is_good: Callable[[float, int], bool]
) -> Sample | None:
    """Return the sparsest sample of every base-th tile that has `wanted` or more, and not too many.

    Args:
        num_tiles: of the row.
        base: the stride of the tiles that are sampled.
        wanted: how many keys of theirs must reach the threshold.
        is_good: asked for the most that will and the stride.
    """
    chosen = None
    for factor in range(2, _MAX_STRIDE + 1):
        stride = base * factor
        # A sample of few tiles has a larger share of them than one in `factor`.
        ratio = -(-num_tiles // base) / -(-num_tiles // stride)
        rank, most = _surplus(wanted, ratio, _WARPGROUP_SIGMAS)
        if is_good(most, stride):
            chosen = Sample(stride, rank)
    return chosen


def _num_sampled(num_tiles: int, stride: int) -> int:
    return -(-num_tiles // stride) * _TILE_KEYS


def _surplus(wanted: int, ratio: float, sigmas: int) -> tuple[int, float]:
    """Return a rank in a sample of one key in `ratio`, and the most keys that reach its score."""
    half = sigmas / 2
    rank = math.ceil((half + math.sqrt(half**2 + wanted / ratio)) ** 2)
    return rank, ratio * (rank + sigmas * math.sqrt(rank))


def filter_shared_nbytes(shape: PrefillShape, rows_per_block: int) -> int:
    """Return the dynamic shared memory of dsa_index_select_prefill."""
    num_heads = rows_per_block * _padded(shape.num_heads)
    return _total(
        num_heads * shape.depth * 2,
        num_heads * 4,
        _select_state_nbytes(shape.filter_warps),
        MAX_ROWS_PER_BLOCK * _ROW_STATE_NBYTES,
        shape.filter_warps * _WARP_SIZE * shape.depth * 2,
    )


def warpgroup_shared_nbytes(shape: PrefillShape, most_rows: int) -> int:
    """Return the dynamic shared memory of dsa_index_select_prefill_8 and _4."""
    return _total(
        _OPERAND_ALIGNMENT,
        _COLUMNS * shape.depth * 2,
        _COLUMNS * 4,
        WARPGROUP_WARPS * _GUESS_BINS * 4,
        MAX_ROWS_PER_BLOCK * _WARPGROUP_ROW_STATE_NBYTES,
        most_rows * _SAMPLE_CAPACITY * 4,
    )


def settle_shared_nbytes(shape: PrefillShape, capacity: int) -> int:
    """Return the dynamic shared memory of dsa_index_select_settle."""
    num_heads = _padded(shape.num_heads)
    num_scored = SETTLE_WARPS * _EXACT_KEYS
    return _total(
        num_heads * shape.depth * 2,
        num_scored * shape.depth * 2,
        num_heads * 4,
        max(num_heads, shape.depth) * 4,
        num_scored * _WARP_SIZE * 4,
        _select_state_nbytes(SETTLE_WARPS),
        *[capacity * 4] * 3,
        capacity * 2,
    )


def _select_state_nbytes(num_warps: int) -> int:
    """Return the size of candidates.cuh's SelectState."""
    words = _NUM_BINS + 3 * num_warps + 5
    return (words + words % 2) * 4 + num_warps * 8


def _padded(count: int) -> int:
    return -(-count // 16) * 16


def _total(*segments: int) -> int:
    return sum(-(-nbytes // 16) * 16 for nbytes in segments)
