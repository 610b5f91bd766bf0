"""Kernel sources: the text of a .cu file together with every header of ours that it includes.

Nothing is compiled here. Headers travel in memory, so that what is hashed is what is compiled.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nxrt.errors import InvalidInputError

INCLUDE_ROOT = Path(__file__).parent.parent / "kernels" / "include"
"""Where the shared headers of nxrt are; included as "nxrt/NAME.cuh"."""

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
"""Find the bracket and the name of every include in a text."""


@dataclass(frozen=True)
class KernelSource:
    """Hold one translation unit.

    Args:
        name: shown in logs and reports, such as "dsa_index_select.cu".
        text: the .cu text.
        headers: texts of quoted includes, by the name they are included by.
        system_headers: names of angle-bracket includes, which the toolkit's headers serve.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()
    system_headers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, text in ((self.name, self.text), *self.headers):
            if "\0" in text:  # the compiler would take what stands before it
                raise InvalidInputError(
                    f"kernel source {name}", found="a NUL character", accepted="text without one"
                )

    @classmethod
    def load(cls, path: Path, *, include_root: Path = INCLUDE_ROOT) -> "KernelSource":
        """Read a .cu file and, recursively, the headers it includes in quotes.

        Args:
            path: the .cu file.
            include_root: the folder that quoted includes are relative to, where the file is not
                beside the .cu.

        Raises:
            InvalidInputError: a file is missing.
        """
        text = _read(path)
        headers: dict[str, str] = {}
        system: set[str] = set()
        pending = [text]
        while pending:
            for bracket, name in INCLUDE.findall(pending.pop()):
                if bracket == "<":
                    system.add(name)
                elif name not in headers:
                    headers[name] = _read(_found(name, path.parent, include_root))
                    pending.append(headers[name])
        return cls(path.name, text, tuple(sorted(headers.items())), tuple(sorted(system)))


@lru_cache(maxsize=64)
def load_source(path: Path) -> KernelSource:
    """Return a source that ships with the package; read once in a process."""
    return KernelSource.load(path)


def _found(name: str, beside: Path, include_root: Path) -> Path:
    return beside / name if (beside / name).is_file() else include_root / name


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(
            "kernel source", found=f"{path}: {error.strerror}", accepted="a readable file"
        ) from error
