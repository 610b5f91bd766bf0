"""The toolkit's headers: where they are, of which release, what a source reaches, who ships them.

They are read for the cache key and for messages; NVRTC reads them from the same folders.
"""

import hashlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from cuda import pathfinder

from nxrt.errors import CompileError
from nxrt.runtime.compilation.includes import scan
from nxrt.runtime.compilation.nvrtc import INSTALL_COMMAND

_CUDART_VERSION = re.compile(r"#\s*define\s+CUDART_VERSION\s+(\d+)")

_PACKAGES = (
    # The first that matches; checked against the wheels of CUDA 13.0.
    (re.compile(r"crt/|.*/crt/"), "nvidia-cuda-crt"),
    (re.compile(r"(cub|thrust|cuda|nv|libcudacxx)/"), "nvidia-cuda-cccl"),
    (re.compile(r"curand"), "nvidia-curand"),
    (re.compile(r"cublas"), "nvidia-cublas"),
    (re.compile(r"cufft"), "nvidia-cufft"),
    (re.compile(r"nvtx3/|nvToolsExt"), "nvidia-nvtx"),
    (re.compile(r"cuda|cu[A-Z]|cooperative_groups|device_|driver_|vector_|sm_\d|mma\.h|math_"), ""),
)
_HOST_HEADER = re.compile(
    r"(?:c?(?:stdint|stddef|limits|float|assert|math|string|stdio|stdlib)(?:\.h)?"
    r"|type_traits|utility|array|tuple|limits|algorithm|vector|iostream)"
)


def cuda_include_dir() -> Path | None:
    """Return the folder of the toolkit's headers, None where there is none."""
    found = pathfinder.locate_nvidia_header_directory("cudart")
    return None if found is None or found.abs_path is None else Path(found.abs_path)


def with_cccl(root: Path) -> tuple[Path, ...]:
    """Return the folders to search: the toolkit's, and within it that of CUB, Thrust, cuda/std."""
    cccl = root / "cccl"
    return (root, cccl) if cccl.is_dir() else (root,)


def headers_release(root: Path) -> str:
    """Return the release a folder of headers is of, such as "13.0"; empty where it does not say."""
    header = root / "cuda_runtime_api.h"
    try:
        status = header.stat()
        number = _cudart_version(header, status.st_mtime_ns, status.st_size)
    except OSError:
        return ""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def check_release(source_name: str, root: Path, *, nvrtc: str, nvrtc_path: str) -> None:
    """Refuse headers of another release than the compiler: mixed, they compile without a word.

    Args:
        source_name: for the message.
        root: the folder of the headers.
        nvrtc: the compiler's version, such as "13.0".
        nvrtc_path: where it is.

    Raises:
        CompileError: the releases differ.
    """
    release = headers_release(root)
    if release and release != nvrtc:
        raise CompileError(
            source_name,
            arch="any",
            log=f"the CUDA headers in {root} are of release {release}, and NVRTC is {nvrtc}, from"
            f" {nvrtc_path}: together they would compile and might mean different things",
            remedy=f"install one release of both: {INSTALL_COMMAND}, or correct CUDA_PATH",
        )


def reached(roots: Sequence[Path], names: Iterable[str]) -> tuple[tuple[str, bytes], ...]:
    """Return name and bytes of the headers that `names` include, and so on, below any root.

    Where one includes a header by a macro, which only a preprocessor could follow, the names, sizes
    and times of all headers stand for it.

    Raises:
        CompileError: a header cannot be read.
    """
    found: dict[str, bytes] = {}
    pending = list(names)
    seen: set[str] = set()
    has_computed = False
    while pending:
        name = posixpath.normpath(pending.pop())
        if name in seen or name.startswith(("/", "../")):
            continue
        seen.add(name)
        for index, root in enumerate(roots):
            content = _read(root / name)
            if content is None:
                continue
            # The same name below two folders is two headers; which one is taken is NVRTC's matter.
            found[f"{index}/{name}"] = content
            scanned = scan(content.decode(errors="replace"))
            has_computed = has_computed or bool(scanned.macro)
            for include in scanned.includes:
                beside = posixpath.join(posixpath.dirname(name), include.name)
                pending += [include.name, beside]
    if has_computed:
        found[""] = _listing(roots)
    return tuple(sorted(found.items()))


def header_remedy(header: str) -> str:
    """Return what to do about a header that the compiler did not find."""
    for pattern, package in _PACKAGES:
        if pattern.match(header) and not package:
            return f"the header {header} ships with the CUDA runtime headers: {INSTALL_COMMAND}"
        if pattern.match(header):
            return (
                f"the header {header} ships with the package {package}, of NVRTC's release:"
                f" pip install {package}"
            )
    if _HOST_HEADER.fullmatch(header):
        return (
            f"{header} belongs to the host's compiler, and NVRTC has no such headers; include the"
            f" one of cuda/std/ (package nvidia-cuda-cccl), or use the compiler's own types"
        )
    return (
        f"{header} is in no known package; include headers of your own in quotes, and put them"
        " beside the .cu file"
    )


@lru_cache(maxsize=16)
def _cudart_version(header: Path, mtime_ns: int, nbytes: int) -> int:  # noqa: ARG001
    """Return the number in a header; time and size are there for the cache's sake."""
    match = _CUDART_VERSION.search(header.read_text(errors="replace"))
    return 0 if match is None else int(match[1])


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.is_file() else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CompileError(path.name, arch="any", log=f"{path}: {reason}") from error


def _listing(roots: Sequence[Path]) -> bytes:
    digest = hashlib.sha256()
    for root in roots:
        for line in sorted(_lines(root)):
            digest.update(f"{len(line)} {line}".encode(errors="surrogateescape"))
    return digest.digest()


def _lines(root: Path) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            try:
                status = path.stat()
            except OSError:  # a dangling link: NVRTC cannot read it either
                continue
            yield f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}"
