"""How the certified filter splits a problem over blocks, and what it needs: pure arithmetic.

certified_filter.cu lays out its memory by the same numbers.
"""

from dataclasses import dataclass

from nxrt.kernels.dsa_index_select.spec import Shape
from nxrt.tensor import DType, checked_product

DTYPES = (DType.F16, DType.BF16)
DEPTHS = (64, 128)
NUM_THREADS = 256
TILE = NUM_THREADS
"""Keys of a block at once."""

_NUM_WARPS = 8
_WARP_SIZE = 32
_NUM_STAGES = 2
_EXACT_KEYS = 4
_CHUNK = 8
_HEAD_TILE = 16
_HEAD_STEP = 8
_NUM_BINS = 2048
_NUM_HISTOGRAMS = 3
_MAX_GROUP = 256
_WORD = 4
_SELECT_STATE_NBYTES = _WORD * (_NUM_BINS + 3 * _NUM_WARPS + 5) + _WORD + 8 * _NUM_WARPS
_CONTROL_NBYTES = _WORD * (4 + 2 * _MAX_GROUP + _NUM_HISTOGRAMS * _NUM_BINS)
_CANDIDATE_NBYTES = 3 * _WORD
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
        keys_per_block: whole tiles of a row.
        capacity: candidates that a block's shared memory holds.
        shared_nbytes: of a block.
        list_length: candidates that the blocks of a row hand over together.
        lists_nbytes: of all rows; 0 where each has one block.
        control_nbytes: what the blocks of a row share, zero before and after a launch.
    """

    blocks_per_row: int
    num_row_blocks: int
    keys_per_block: int
    capacity: int
    shared_nbytes: int
    list_length: int
    lists_nbytes: int
    control_nbytes: int

    @classmethod
    def of(cls, shape: Shape, limits: FilterLimits) -> "FilterLayout":
        """Return the layout of a shape that `serves` accepts."""
        num_tiles = -(-shape.T // TILE)
        wanted = max(1, limits.num_multiprocessors // shape.num_rows)
        tiles_per_block = -(-num_tiles // min(wanted, num_tiles, _MAX_GROUP))
        blocks_per_row = -(-num_tiles // tiles_per_block)
        keys_per_block = tiles_per_block * TILE
        capacity = _capacity(shape, limits)
        list_length = min(num_tiles * TILE, capacity)
        num_lists = shape.num_rows if blocks_per_row > 1 else 0
        return cls(
            blocks_per_row=blocks_per_row,
            num_row_blocks=min(shape.num_rows, limits.num_multiprocessors),
            keys_per_block=keys_per_block,
            capacity=capacity,
            shared_nbytes=_fixed_nbytes(shape) + 3 * _segment(capacity * _WORD),
            list_length=list_length,
            lists_nbytes=checked_product("lists", num_lists, list_length, _CANDIDATE_NBYTES),
            control_nbytes=num_lists * _CONTROL_NBYTES,
        )


def serves(shape: Shape, dtype: DType, limits: FilterLimits) -> bool:
    """Say whether the certified filter can take a shape with at least one row and one key."""
    if dtype not in DTYPES or shape.D not in DEPTHS or shape.H % _HEAD_STEP or shape.H == 0:
        return False
    if shape.T >= 2**32 or shape.num_cells == 0:
        return False
    # What is left of the row when its blocks have met, a tile to come, and room for the doubtful.
    needed = shape.K + shape.K // 8 + 2 * TILE
    return _capacity(shape, limits) >= needed


def _capacity(shape: Shape, limits: FilterLimits) -> int:
    left = limits.max_shared_nbytes - _fixed_nbytes(shape)
    in_stages = _NUM_STAGES * TILE * shape.D * 2 // (2 * _WORD)  # where two lists are kept
    return max(0, min(left // _CANDIDATE_NBYTES, in_stages) // _SEGMENT * _SEGMENT)


def _fixed_nbytes(shape: Shape) -> int:
    heads = -(-shape.H // _HEAD_TILE) * _HEAD_TILE
    segments = (
        heads * shape.D * 2,
        heads * shape.D * 2,
        _NUM_WARPS * _EXACT_KEYS * shape.D * 2,
        heads * _WORD,
        heads * _WORD,
        NUM_THREADS * _CHUNK * _WORD,
        _NUM_WARPS * _EXACT_KEYS * _WARP_SIZE * _WORD,
        _SELECT_STATE_NBYTES,
        _NUM_STAGES * TILE * shape.D * 2,
    )
    return sum(map(_segment, segments))


def _segment(nbytes: int) -> int:
    return -(-nbytes // _SEGMENT) * _SEGMENT
