"""What counts as a number of bytes: an exact integer from 0 to 2**63 - 1.

It checks and converts; sizes that people write are in `budget`.
"""

import numpy as np

from nxrt.errors import InvalidInputError, SizeOverflowError
from nxrt.tensor import MAX_SIZE


def checked_nbytes(nbytes: int) -> int:
    """Return a byte size as a plain int.

    Raises:
        InvalidInputError: it is negative or not an integer.
        SizeOverflowError: it is past 2**63 - 1.
    """
    accepted = f"an integer from 0 to {MAX_SIZE}"
    if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)) or nbytes < 0:
        raise InvalidInputError("nbytes", found=repr(nbytes), accepted=accepted)
    if nbytes > MAX_SIZE:
        raise SizeOverflowError("nbytes", found=repr(nbytes), accepted=accepted)
    return int(nbytes)


def require_held(nbytes: int, held: int) -> None:
    """Raise InvalidInputError if a lease holds less than what is taken from it."""
    if nbytes > held:
        accepted = f"up to {held:,}, what the lease holds"
        raise InvalidInputError("nbytes", found=f"{nbytes:,}", accepted=accepted)


def require_countable(nbytes: int, used: int) -> None:
    """Raise SizeOverflowError if memory that is only recorded would pass 2**63 - 1 in all."""
    if used + nbytes > MAX_SIZE:
        found = f"{nbytes:,} beside {used:,} in use"
        raise SizeOverflowError("nbytes", found=found, accepted=f"{MAX_SIZE:,} in all")
