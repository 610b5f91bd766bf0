"""NVRTC as a library: where it is, exactly which one, and its calls with their status checked.

Nothing is compiled here; `compiler` does that. Needs no driver and no device.
"""

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from cuda import pathfinder

from nxrt.errors import CompileError
from nxrt.runtime import driver
from nxrt.runtime.driver import Handle

INSTALL_COMMAND = 'pip install "nvidia-cuda-nvrtc==13.0.*" "nvidia-cuda-runtime==13.0.*"'

_APPENDED_FLAGS = "NVRTC_APPEND_FLAGS"
"""NVRTC asks the environment for it at every compilation: seen in 13.0.88."""

_ELF_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, little endian: what every platform of CUDA 13 has."""

_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
_MAX_NOTES_NBYTES = 64 * 1024


def call(function: Any, *args: Any) -> Any:
    """Make one NVRTC call; return its outputs: one value or a tuple.

    Raises:
        CompileError: NVRTC answered with an error.
    """
    status, *outputs = function(*args)
    if int(status) != 0:
        raise CompileError(
            "NVRTC", arch="any", log=f"{function.__name__} failed with {status.name}"
        )
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def read_output(get_size: Any, get: Any, program: Handle) -> bytes:
    """Return what one of NVRTC's pairs of size and content gives."""
    buffer = bytes(call(get_size, program))
    call(get, program, buffer)
    return buffer


def nvrtc_location() -> tuple[str, str]:
    """Return the path of NVRTC's library and how it was found. Raises RuntimeError."""
    found = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    return str(found.abs_path), str(found.found_via)


@cache
def nvrtc_version() -> str:
    """Return major and minor version, such as "13.0".

    Raises:
        CompileError: NVRTC is not installed.
    """
    try:
        major, minor = call(driver.nvrtc.nvrtcVersion)
    except RuntimeError as error:
        raise CompileError(
            "NVRTC",
            arch="any",
            log=str(error).splitlines()[0],
            remedy=f"install it: {INSTALL_COMMAND}",
        ) from error
    return f"{major}.{minor}"


def nvrtc_identity() -> str:
    """Return what tells this NVRTC from every other, patch releases included.

    The version has no patch number; the build ids of the library and of its built-in functions
    tell two builds apart. So does what the environment appends to every compilation.

    Raises:
        CompileError: NVRTC is not installed.
    """
    return "\n".join((*_libraries_identity(), os.environ.get(_APPENDED_FLAGS, "")))


def supported_archs() -> tuple[int, ...]:
    """Return the architectures that NVRTC compiles for, such as 90, in ascending order."""
    return tuple(call(driver.nvrtc.nvrtcGetSupportedArchs))


@cache
def _libraries_identity() -> tuple[str, ...]:
    version = nvrtc_version()  # raises the clear error where there is no library
    library = Path(nvrtc_location()[0]).resolve()
    builtins = sorted(library.parent.glob("libnvrtc-builtins.so*"))
    return (version, *(f"{path.name} {build_id(path)}" for path in (library, *builtins)))


def build_id(path: Path) -> str:
    """Return a library's ELF build id in hex, or where it has none the digest of its bytes.

    Raises:
        CompileError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = next(_build_ids(file), None)
            if found is None:  # a few tenths of a second, once in a process
                file.seek(0)
                return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            return found.hex()
    except OSError as error:
        raise CompileError("NVRTC", arch="any", log=f"{path}: {error.strerror}") from error


def _build_ids(file: BinaryIO) -> Iterator[bytes]:
    """Yield the build ids in the notes of an ELF file; nothing for any other file."""
    header = file.read(64)
    if len(header) < 64 or not header.startswith(_ELF_MAGIC):
        return
    table, entry_nbytes, num_entries = _u(header, 32, 8), _u(header, 54, 2), _u(header, 56, 2)
    for index in range(num_entries):
        file.seek(table + index * entry_nbytes)
        entry = file.read(56)
        if _u(entry, 0, 4) == _PT_NOTE:
            file.seek(_u(entry, 8, 8))
            yield from _build_ids_in(file.read(min(_u(entry, 32, 8), _MAX_NOTES_NBYTES)))


def _build_ids_in(notes: bytes) -> Iterator[bytes]:
    start = 0
    while start + 12 <= len(notes):
        name_nbytes, nbytes, kind = (_u(notes, start + offset, 4) for offset in (0, 4, 8))
        name = notes[start + 12 : start + 12 + name_nbytes]
        begin = start + 12 + _padded(name_nbytes)
        if name == b"GNU\0" and kind == _NT_GNU_BUILD_ID and nbytes:
            yield notes[begin : begin + nbytes]
        start = begin + _padded(nbytes)


def _padded(nbytes: int) -> int:
    return (nbytes + 3) & ~3


def _u(data: bytes, offset: int, nbytes: int) -> int:
    return int.from_bytes(data[offset : offset + nbytes], "little")
