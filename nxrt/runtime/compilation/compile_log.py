"""What the compiler said, made useful: the files' real paths, and what to do about the cause.

Sources are compiled under names without a folder, so that neither a cubin nor its key depends on
where they lie; the log is where the paths come back.
"""

import re
from collections.abc import Mapping

from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.compilation.toolkit_headers import header_remedy

COMPILE_FOLDER = "/proc/nxrt/"
"""The folder that sources claim to lie in while they are compiled. NVRTC looks for quoted headers
beside the source on disk too; here nobody can put any, as could in the current folder."""

_MISSING_HEADER = re.compile(r'(?:could not|cannot) open source file "([^"]+)"')


def readable_log(log: str, source: KernelSource) -> str:
    """Return a log that names the real files, such as "/home/me/k.cu(12): error: ..."."""
    paths = {name: name for name in (source.name, *(name for name, _ in source.headers))}
    paths.update(source.paths)
    return _renamed(log, {_compiled_name(name, source): path for name, path in paths.items()})


def log_remedy(log: str) -> str:
    """Return what to do about a failed compilation, empty where its log says it all."""
    missing = _MISSING_HEADER.search(log)
    return "" if missing is None else header_remedy(missing[1])


def _compiled_name(name: str, source: KernelSource) -> str:
    return f"{COMPILE_FOLDER}{name}" if name == source.name else name


def _renamed(log: str, paths: Mapping[str, str]) -> str:
    """Replace names where the compiler speaks of a file, not where it repeats a line of one."""
    names = "|".join(re.escape(name) for name in sorted(paths, key=len, reverse=True))
    places = rf'(?:^({names})(?=\(\d+\): )|( line \d+ of )({names})$|( of ")({names})(?="\.$))'

    def path_of(match: re.Match[str]) -> str:
        first, line, at_line, quote, in_quotes = match.groups(default="")
        return line + quote + paths[first or at_line or in_quotes]

    return re.sub(places, path_of, log, flags=re.MULTILINE)
