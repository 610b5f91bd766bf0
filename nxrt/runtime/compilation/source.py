"""Kernel sources: the text of a .cu file together with every header of ours that it includes.

Nothing is compiled here. Headers travel in memory, so that what is hashed is what is compiled.
"""

import errno
import os
import posixpath
import stat
from dataclasses import dataclass, field
from pathlib import Path

from nxrt.errors import CompileError, InvalidInputError
from nxrt.runtime.compilation.includes import scan

INCLUDE_ROOT = Path(__file__).parents[2] / "kernels" / "include"
"""Where the shared headers of nxrt are; included as "nxrt/NAME.cuh"."""


@dataclass(frozen=True)
class KernelSource:
    """Hold one translation unit. Two of equal content are equal, wherever they were read.

    Args:
        name: shown in logs and reports, such as "dsa_index_select.cu".
        text: the .cu text.
        headers: texts of quoted includes, by the name they are included by.
        system_headers: names of angle-bracket includes, which the toolkit's headers serve.
        paths: the real files, by the name of the source or of a header; for error messages alone.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()
    system_headers: tuple[str, ...] = ()
    paths: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, text in ((self.name, self.text), *self.headers):
            if "\0" in text:  # the compiler would take what stands before it
                raise InvalidInputError(
                    f"kernel source {name}", found="a NUL character", accepted="text without one"
                )

    @classmethod
    def load(cls, path: Path, *, include_root: Path = INCLUDE_ROOT) -> "KernelSource":
        """Read a .cu file and, recursively, the headers it includes in quotes.

        A quoted name is looked for beside the .cu, below the root, and beside the file that
        includes it, and nowhere outside these two folders.

        Args:
            path: the .cu file.
            include_root: the folder of the shared headers.

        Raises:
            CompileError: a file is missing or cannot be read, a name leads out of the folders, or
                it stands for two files.
            InvalidInputError: a text contains a NUL character.
        """
        loader = _Loader(path, include_root)
        text = loader.read(path)
        headers = tuple(sorted((name, content) for name, (_, content) in loader.headers.items()))
        paths = {name: str(found) for name, (found, _) in loader.headers.items()}
        paths[path.name] = os.path.realpath(path)
        return cls(path.name, text, headers, tuple(sorted(loader.system)), tuple(paths.items()))


def load_source(path: Path) -> KernelSource:
    """Return a source as its files are now.

    It is read each time: an edited file must not meet an old text, and a session pays about 0.25
    ms for it when it is created (x86-64 server, 2026-12-01).
    """
    return KernelSource.load(path)


class _Loader:
    """Collect the headers of one .cu file."""

    def __init__(self, path: Path, include_root: Path) -> None:
        self._name = path.name
        self._folders = (os.path.abspath(path.parent), os.path.abspath(include_root))  # noqa: PTH100
        self.headers: dict[str, tuple[Path, str]] = {}
        self.system: set[str] = set()

    def read(self, path: Path) -> str:
        """Return a file's text; read what it includes into `headers` and `system`."""
        text = self._text(path)
        pending = [(path, text)]
        while pending:
            includer, content = pending.pop()
            scanned = scan(content)
            if scanned.macro:
                raise self._error(
                    f"{includer}: includes whatever the macro {scanned.macro} names, which the"
                    " cache key cannot follow; write the header's name"
                )
            for include in scanned.includes:
                if not include.is_quoted:
                    self.system.add(include.name)
                    continue
                added = self._add(include.name, includer, may_miss=not include.is_certain)
                pending += [] if added is None else [added]
        return text

    def _add(self, name: str, includer: Path, *, may_miss: bool) -> tuple[Path, str] | None:
        """Read a header and return it, None where it is known already or may be missing."""
        path = self._found(name, includer)
        known = self.headers.get(name)
        if path is None:
            if may_miss or known is not None:
                return None
            raise self._error(f'{includer}: includes "{name}": {os.strerror(errno.ENOENT)}')
        if known is None:
            self.headers[name] = (path, self._text(path))
            return self.headers[name]
        if known[0] != path:
            raise self._error(
                f'"{name}" is {known[0]} for one file and {path} for another; give them two names'
            )
        return None

    def _found(self, name: str, includer: Path) -> Path | None:
        is_inside = False
        for folder in (*self._folders, os.path.abspath(includer.parent)):  # noqa: PTH100
            path = posixpath.normpath(posixpath.join(folder, name))
            if not any(path.startswith(f"{allowed}{os.sep}") for allowed in self._folders):
                continue
            is_inside = True
            if self._is_file(path):
                return Path(path).resolve()
        if not is_inside:
            raise self._error(
                f'{includer}: includes "{name}", which leads out of {" and ".join(self._folders)};'
                " move the header into one of them"
            )
        return None

    def _is_file(self, path: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, ValueError) as error:
            raise self._error(f"{path}: {_reason(error)}") from error

    def _text(self, path: Path) -> str:
        try:
            # Reading a pipe or a device would never end.
            if not stat.S_ISREG(path.stat().st_mode):
                raise self._error(f"{path}: not a regular file")
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise self._error(f"{path}: {_reason(error)}") from error

    def _error(self, problem: str) -> CompileError:
        return CompileError(self._name, arch="any", log=problem)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
