"""What an operator may say about the compile cache, read from an environment that is handed in."""

import re
from collections.abc import Mapping
from pathlib import Path

from nxrt.errors import InvalidInputError

DEFAULT_MAX_NBYTES = 256 * 1024**2

_SIZE = re.compile(r"\s*(\d+)\s*(|B|KiB|MiB|GiB)\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3}


def default_cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Return where compiled kernels are kept: NXRT_CACHE_DIR, XDG_CACHE_HOME or ~/.cache.

    An empty NXRT_CACHE_DIR, or a user without a home, means memory only.
    """
    if "NXRT_CACHE_DIR" in environ:
        return Path(environ["NXRT_CACHE_DIR"]) if environ["NXRT_CACHE_DIR"] else None
    xdg = environ.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():
        return Path(xdg) / "nxrt"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "nxrt" if Path(home).is_absolute() else None


def default_cache_nbytes(environ: Mapping[str, str]) -> int:
    """Return the most bytes the folder may hold: NXRT_CACHE_MAX_BYTES, or 256 MiB.

    Raises:
        InvalidInputError: it is not a size.
    """
    value = environ.get("NXRT_CACHE_MAX_BYTES", "")
    if not value.strip():
        return DEFAULT_MAX_NBYTES
    match = _SIZE.fullmatch(value)
    if match is None:
        accepted = 'bytes as an integer, or a size such as "256 MiB"; 0 keeps nothing on disk'
        raise InvalidInputError("NXRT_CACHE_MAX_BYTES", found=repr(value), accepted=accepted)
    return int(match[1]) * _UNITS[match[2].lower()]
