"""Sizes as people read them."""

_UNITS = ("KiB", "MiB", "GiB")


def size_text(nbytes: int, *, digits: int = 2) -> str:
    """Return a size in the largest binary unit, up to GiB, that leaves at least 1."""
    if nbytes < 1024:
        return f"{nbytes} B"
    power = min(len(_UNITS), (nbytes.bit_length() - 1) // 10)
    return f"{nbytes / 1024**power:,.{digits}f} {_UNITS[power - 1]}"
