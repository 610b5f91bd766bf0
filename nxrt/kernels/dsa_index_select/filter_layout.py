"""How the certified filter splits a problem over blocks, and what it needs: pure arithmetic.

certified_filter.cu lays out its memory by the same numbers.
"""

from dataclasses import dataclass

from nxrt.kernels.dsa_index_select.spec import Shape
from nxrt.tensor import DType

HALF_DTYPES = (DType.F16, DType.BF16)
DTYPES = (DType.F32, *HALF_DTYPES)
DEPTHS = (64, 128)
MAX_DOUBTS = 512
"""Keys of a row that are scored because their bounds leave them open; more take another way."""

OUTCOME_NBYTES = 8
"""Of a row: how many keys were scored, and whether all had to be."""

_NUM_WARPS = 8
_WARP_SIZE = 32
_NUM_STAGES = 2
_EXACT_KEYS = 8
_HEAD_TILE = 16
_HEAD_STEP = 8
_NUM_BINS = 2048
_NUM_SLOTS = 4
_MAX_TEAM = 256
_WORD = 4
_SELECT_STATE_NBYTES = _WORD * 2 * _NUM_BINS + 2 * 8 + _WORD * (_NUM_WARPS + 9) + _WORD
_SLOT_NBYTES = _WORD * (_NUM_BINS + 6 + _MAX_TEAM) + 8 * MAX_DOUBTS + 8
_CONTROL_NBYTES = 16 + _NUM_SLOTS * _SLOT_NBYTES
_CANDIDATE_NBYTES = 2 * _WORD
_SEGMENT = 16


@dataclass(frozen=True)
class FilterLimits:
    """Bound what the filter may take of a device.

    Args:
        num_multiprocessors: how many blocks run at once.
        max_shared_nbytes: of a block.
    """

    num_multiprocessors: int
    max_shared_nbytes: int


H200 = FilterLimits(num_multiprocessors=132, max_shared_nbytes=232_448)


@dataclass(frozen=True)
class FilterLayout:
    """Split one shape over blocks.

    Args:
        blocks_per_row: along x; where there are several they work at the same time.
        num_row_blocks: along y.
        keys_per_block: of a row.
        capacity: candidates that a block's shared memory holds.
        shared_nbytes: of a block.
        control_nbytes: by which the blocks of rows meet that are worked on at once. It does not
            fall where more rows or keys come, though rows in numbers have a block each.
    """

    blocks_per_row: int
    num_row_blocks: int
    keys_per_block: int
    capacity: int
    shared_nbytes: int
    control_nbytes: int

    @classmethod
    def of(cls, shape: Shape, dtype: DType, limits: FilterLimits) -> "FilterLayout":
        """Return the layout of a shape that `serves` accepts."""
        tile, keys = _tile(dtype), _tile(dtype) // _NUM_WARPS
        num_groups = -(-shape.T // keys)
        wanted = max(1, limits.num_multiprocessors // shape.num_rows)
        wanted = max(wanted, -(-shape.T // _most_keys(shape, dtype)))
        # A block has a warp's keys less at first, as that has the sample.
        most = min(-(-shape.T // (tile - keys)), _MAX_TEAM, limits.num_multiprocessors)
        keys_per_block = -(-num_groups // min(wanted, most)) * keys
        blocks_per_row = -(-shape.T // keys_per_block)
        capacity = _capacity(shape, dtype, limits)
        return cls(
            blocks_per_row=blocks_per_row,
            num_row_blocks=min(shape.num_rows, limits.num_multiprocessors // blocks_per_row),
            keys_per_block=keys_per_block,
            capacity=capacity,
            shared_nbytes=_fixed_nbytes(shape, dtype) + 2 * _segment(capacity * _WORD),
            control_nbytes=_most_teams(shape, dtype, limits) * _CONTROL_NBYTES,
        )


def serves(shape: Shape, dtype: DType, limits: FilterLimits) -> bool:
    """Say whether the certified filter can take a shape with at least one row and one key."""
    if dtype not in DTYPES or shape.D not in DEPTHS or shape.H % _HEAD_STEP or shape.H == 0:
        return False
    if shape.T >= 2**30 or shape.num_cells == 0:
        return False
    most_blocks = min(_MAX_TEAM, limits.num_multiprocessors)
    if most_blocks * _most_keys(shape, dtype) < shape.T:
        return False
    # What may be chosen of the row, a tile to come, and room for the doubtful; and the sample,
    # which lies there before.
    needed = shape.K + max(shape.K // 8, MAX_DOUBTS) + 2 * _tile(dtype)
    scratch = _stages_nbytes(shape, dtype) // _NUM_STAGES // _NUM_WARPS // _CANDIDATE_NBYTES
    return _capacity(shape, dtype, limits) >= max(needed, scratch)


def _most_teams(shape: Shape, dtype: DType, limits: FilterLimits) -> int:
    """Return how many rows at once may be split over blocks, of as many rows or fewer."""
    tile = _tile(dtype)
    if tile - tile // _NUM_WARPS >= shape.T:
        return 0
    return min(shape.num_rows, max(1, limits.num_multiprocessors // 2))


def _num_parts(dtype: DType) -> int:
    return 2 if dtype is DType.F32 else 1


def _tile(dtype: DType) -> int:
    return _NUM_WARPS * 32 // _num_parts(dtype)


def _stages_nbytes(shape: Shape, dtype: DType) -> int:
    return _NUM_STAGES * _tile(dtype) * shape.D * dtype.itemsize


def _most_keys(shape: Shape, dtype: DType) -> int:
    """Return how many keys of a row a block can mark, one bit each, where the stages were."""
    scratch = (
        _NUM_WARPS * _EXACT_KEYS * shape.D * _WORD
        + _NUM_WARPS * _EXACT_KEYS * _WARP_SIZE * _WORD
        + MAX_DOUBTS * (8 + _WORD)
    )
    tile = _tile(dtype)
    return (_stages_nbytes(shape, dtype) - scratch) * 8 // tile * tile


def _capacity(shape: Shape, dtype: DType, limits: FilterLimits) -> int:
    left = limits.max_shared_nbytes - _fixed_nbytes(shape, dtype)
    return max(0, left // _CANDIDATE_NBYTES // _SEGMENT * _SEGMENT)


def _fixed_nbytes(shape: Shape, dtype: DType) -> int:
    heads = -(-shape.H // _HEAD_TILE) * _HEAD_TILE
    segments = (
        shape.H * (shape.D * dtype.itemsize + 16),
        _num_parts(dtype) * heads * shape.D * 2,
        heads * _WORD,
        heads * _WORD,
        8 * _NUM_WARPS * _NUM_STAGES,
        5 * _WORD,
        4 * _WORD,
        _SELECT_STATE_NBYTES,
        _stages_nbytes(shape, dtype),
    )
    return sum(map(_segment, segments))


def _segment(nbytes: int) -> int:
    return -(-nbytes // _SEGMENT) * _SEGMENT
