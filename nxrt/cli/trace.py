"""Indexer traces: recorded queries, keys and weights of real text, with the text itself.

Loading and checking only.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import JobError

_ARRAYS = {
    "query": (np.dtype(np.uint16), 3, "[S, H, D], the bits of bf16"),
    "key": (np.dtype(np.uint16), 2, "[T, D], the bits of bf16"),
    "weights": (np.dtype(np.uint16), 2, "[S, H], the bits of bf16"),
    "tokens": (None, 1, "[T], text"),
}


@dataclass(frozen=True)
class Trace:
    """Hold the last S positions of a text of T word pieces, as the indexer sees them.

    Args:
        query: [S, H, D] uint16, the bits of bf16.
        key: [T, D] likewise.
        weights: [S, H] likewise.
        tokens: [T] the word pieces.
    """

    query: NDArray[np.uint16]
    key: NDArray[np.uint16]
    weights: NDArray[np.uint16]
    tokens: NDArray[np.str_]

    @property
    def num_steps(self) -> int:
        """Return S, how many positions are decoded."""
        return int(self.query.shape[0])

    @property
    def capacity(self) -> int:
        """Return T, how many keys there are in the end."""
        return int(self.key.shape[0])

    def position(self, step: int) -> int:
        """Return the position that a step decodes; it sees the keys up to its own."""
        return self.capacity - self.num_steps + step


def load_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        JobError: the file cannot be read, or an array is missing or of another type or shape.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise JobError(f"trace {path}", found="a single array", accepted="a .npz file")
        with archive:
            arrays = {name: _checked(path, archive, name) for name in _ARRAYS}
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        if isinstance(error, JobError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError(f"trace {path}", found=reason, accepted="a readable .npz file") from error
    trace = Trace(**arrays)
    _check_shapes(path, trace)
    return trace


def _checked(path: Path, archive: Any, name: str) -> NDArray[Any]:
    dtype, rank, accepted = _ARRAYS[name]
    if name not in archive:
        raise JobError(f"trace {path.name}: {name}", found="no such array", accepted=accepted)
    array = archive[name]
    if not isinstance(array, np.ndarray):
        raise JobError(f"trace {path.name}: {name}", found="no array", accepted=accepted)
    is_right = array.dtype.kind == "U" if dtype is None else array.dtype == dtype
    if array.ndim != rank or not is_right:
        found = f"{array.dtype} {list(array.shape)}"
        raise JobError(f"trace {path.name}: {name}", found=found, accepted=accepted)
    return array


def _check_shapes(path: Path, trace: Trace) -> None:
    num_steps, num_heads, depth = trace.query.shape
    expected = {
        "key": (trace.key.shape, (trace.capacity, depth)),
        "weights": (trace.weights.shape, (num_steps, num_heads)),
        "tokens": (trace.tokens.shape, (trace.capacity,)),
    }
    for name, (found, accepted) in expected.items():
        if found != accepted:
            subject = f"trace {path.name}: {name} shape"
            raise JobError(subject, found=str(list(found)), accepted=str(list(accepted)))
    if not 0 < num_steps <= trace.capacity:
        raise JobError(
            f"trace {path.name}: number of queries",
            found=str(num_steps),
            accepted=f"1 to the number of keys, {trace.capacity}",
        )
