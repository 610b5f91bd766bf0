"""Kernels' own sources, compiled for the host and run there, block by block.

tests/emulator has CUDA C++ for a C++ compiler; the test double of the driver runs what this builds.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nxrt.kernels

EMULATOR = Path(__file__).parents[1] / "emulator"
_KERNELS = Path(next(iter(nxrt.kernels.__path__)))
_INCLUDE = _KERNELS / "include"
_FLAGS = [
    *("-std=c++20", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
    *("-Wl,-Bsymbolic", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Wextra"),
    *("-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-missing-field-initializers"),
]
_HALF_TO_FLOAT = (
    'asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));',
    "value = emulated_half(bits);",
)
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(')


NUM_ORDERS = 3
"""Of threads taking turns: ascending, descending, shuffled; a kernel's launches go round them."""


class EmulationError(AssertionError):
    """A kernel did on the host what would hang or be undefined on a device."""


class EmulatedModule:
    """Run the kernels of one source.

    Args:
        source: the .cu file.
        defines: as the compiler of the device is given them.
        folder: where built libraries are kept.
    """

    def __init__(self, source: Path, defines: Sequence[tuple[str, str]], folder: Path) -> None:
        self.names = tuple(_ENTRY.findall(source.read_text()))
        self._num_launches: Counter[str] = Counter()
        self._library = ctypes.CDLL(str(_built(source, self.names, defines, folder)))
        self._library.emulated_failure.restype = ctypes.c_char_p

    def letters(self, name: str) -> str:
        """Return one of `struct`'s letters for each parameter of a kernel, P for a pointer."""
        function = getattr(self._library, f"emulated_letters_{name}")
        function.restype = ctypes.c_char_p
        return str(function().decode())

    def launch(self, name: str, params: Any, grid: Any, block: Any, shared_nbytes: int) -> None:
        """Run one launch to its end. Raises EmulationError, with the thread that was at fault."""
        function = getattr(self._library, f"emulated_{name}")
        order = self._num_launches[name] % NUM_ORDERS
        self._num_launches[name] += 1
        if function(params, grid, block, shared_nbytes, order) != 0:
            failure = self._library.emulated_failure().decode()
            raise EmulationError(f"{name}, in order {order}: {failure}")


def host_compiler() -> str:
    """Return the C++ compiler. Raises RuntimeError where there is none."""
    compiler = shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the kernels' emulation needs a C++ compiler called c++; install one")
    return compiler


def _built(
    source: Path, names: Sequence[str], defines: Sequence[tuple[str, str]], folder: Path
) -> Path:
    wrapper = _wrapper(source, names)
    flags = [*_FLAGS, *(f"-D{name}={value}" for name, value in defines)]
    digest = hashlib.sha256(" ".join([*flags, wrapper]).encode())
    for path in sorted([*EMULATOR.rglob("*.h"), *EMULATOR.rglob("*.c*"), *_INCLUDE.rglob("*.cuh")]):
        digest.update(path.read_bytes())
    for path in sorted(source.parent.glob("*.cu*")):
        digest.update(path.read_bytes())
    library = folder / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if not library.is_file():
        with TemporaryDirectory(dir=_made(folder)) as scratch:
            _build(wrapper, flags, Path(scratch)).replace(library)
    return library


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _build(wrapper: str, flags: Sequence[str], scratch: Path) -> Path:
    """Compile into a folder of this process's own; another may build the same beside it."""
    unit, library = scratch / "unit.cpp", scratch / "unit.so"
    unit.write_text(wrapper)
    for header in _INCLUDE.rglob("*.cuh"):
        copy = scratch / header.relative_to(_INCLUDE)
        _made(copy.parent)
        copy.write_text(_readable(header.read_text()))
    includes = [f"-I{EMULATOR / 'include'}", f"-I{EMULATOR}", f"-I{scratch}"]
    sources = [str(unit), str(EMULATOR / "scheduler.cpp")]
    command = [host_compiler(), *flags, *includes, "-o", str(library), *sources]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"a kernel does not compile for the host:\n{finished.stderr}")
    return library


def _wrapper(source: Path, names: Sequence[str]) -> str:
    entries = "".join(f"EMULATED_ENTRY({name})\n" for name in names)
    return f'#include "device.h"\n#include "{source}"\n#include "entry.h"\n{entries}'


def _readable(text: str) -> str:
    """Return a header without what a C++ compiler cannot read."""
    return text.replace(*_HALF_TO_FLOAT)
