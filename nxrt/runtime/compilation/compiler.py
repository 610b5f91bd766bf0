"""NVRTC: one source and its options in, one cubin out. Needs no driver and no device.

Nothing is remembered here; `compile_cache` does that.
"""

import posixpath
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nxrt.errors import CompileError, InvalidInputError
from nxrt.runtime import driver
from nxrt.runtime.compilation.compile_log import COMPILE_FOLDER, log_remedy, readable_log
from nxrt.runtime.compilation.includes import scan
from nxrt.runtime.compilation.nvrtc import (
    INSTALL_COMMAND,
    call,
    nvrtc_identity,
    nvrtc_location,
    nvrtc_version,
    read_output,
    supported_archs,
)
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.compilation.toolkit_headers import (
    check_release,
    cuda_include_dir,
    reached,
    with_cccl,
)
from nxrt.runtime.driver import Handle

__all__ = [
    "ARTEFACTS",
    "INSTALL_COMMAND",
    "CompileOptions",
    "CompiledKernel",
    "Compiler",
    "cuda_include_dir",
    "nvrtc_location",
]

ARTEFACTS = ("cubin", "ptx")
"""Machine code for exactly one architecture, or text that the driver compiles when it loads it."""

_REAL_ARCH = re.compile(r"sm_(\d+)([af]?)")
_MACRO = re.compile(r"([A-Za-z_]\w*)(\([^)]*\))?")
_INCLUDE_FLAG = re.compile(r"(?:-I|--include-path)(?:=|$)|-I(?=.)")
_READING_FLAG = re.compile(
    r"(?:--?(?:pre-include|include|use-pch|pch|create-pch|pch-dir|options-file))(?:=.*)?|-pch.*"
)


@dataclass(frozen=True)
class CompileOptions:
    """Say what a source is compiled for.

    Args:
        arch: a real architecture, such as "sm_90a".
        defines: preprocessor names and values; the order has no meaning.
        flags: further NVRTC options, as they are, in this order.
        artefact: one of ARTEFACTS.

    Raises:
        InvalidInputError: an unknown artefact, a define without a name or with two values, or a
            flag by which NVRTC would read a file that the cache key cannot see.
    """

    arch: str
    defines: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    artefact: str = "cubin"

    def __post_init__(self) -> None:
        if self.artefact not in ARTEFACTS:
            raise InvalidInputError(
                "artefact", found=repr(self.artefact), accepted=" or ".join(ARTEFACTS)
            )
        values: dict[str, str] = {}
        for name, value in self.defines:
            macro = _MACRO.fullmatch(name)
            if macro is None:
                raise InvalidInputError("define", found=repr(name), accepted="a macro's name")
            if values.setdefault(macro[1], value) != value:
                raise InvalidInputError(f"define {name}", found="two values", accepted="one")
        for flag in self.flags:
            if _READING_FLAG.fullmatch(flag):
                accepted = "flags that read no file; include the header by a line in the source"
                raise InvalidInputError("flag", found=repr(flag), accepted=accepted)
        if any("\0" in text for text in self.arguments()):
            raise InvalidInputError("compile options", found="a NUL", accepted="text without one")

    def arguments(self) -> list[str]:
        """Return NVRTC's options in the order given."""
        defines = [f"--define-macro={name}={value}" for name, value in sorted(self.defines)]
        arch = self.arch if self.artefact == "cubin" else self.arch.replace("sm_", "compute_", 1)
        return [f"--gpu-architecture={arch}", "--std=c++17", *defines, *self.flags]

    def include_folders(self) -> tuple[Path, ...]:
        """Return the folders that the flags add to the search for headers."""
        return tuple(self._include_folders())

    def _include_folders(self) -> Iterator[Path]:
        flags = iter(self.flags)
        for flag in flags:
            match = _INCLUDE_FLAG.match(flag)
            if match is not None:
                folder = flag[match.end() :] or next(flags, "")
                yield Path(folder.removeprefix("="))


@dataclass(frozen=True)
class CompiledKernel:
    """Hold a cubin, or the PTX that was asked for, and what the compiler said while making it."""

    cubin: bytes
    log: str


class Compiler:
    """Call NVRTC; safe to use from any thread.

    Args:
        include_dir: the toolkit's headers, for sources with angle-bracket includes; found through
            cuda-pathfinder when left out.
    """

    def __init__(self, include_dir: Path | None = None) -> None:
        self._include_dir = include_dir

    @property
    def version(self) -> str:
        """Return NVRTC's version, such as "13.0".

        Raises:
            CompileError: NVRTC is not installed.
        """
        return nvrtc_version()

    @property
    def identity(self) -> str:
        """Return what tells this compiler from every other one, for the cache key.

        Raises:
            CompileError: NVRTC is not installed.
        """
        return nvrtc_identity()

    def header_bytes(
        self, source: KernelSource, options: CompileOptions | None = None
    ) -> tuple[tuple[str, bytes], ...]:
        """Return every header on disk that a source reaches, for its cache key.

        Raises:
            CompileError: the toolkit's headers are of another release than the compiler, a header
                cannot be read, or a name leads to a file outside the folders.
        """
        names = _names_on_disk(source)
        if not names:
            return ()
        added = () if options is None else options.include_folders()
        return reached((*added, *self._roots(source)), names)

    def ptx_arch(self, arch: str) -> str:
        """Return the newest architecture that this NVRTC knows and a device of `arch` can run.

        Raises:
            CompileError: there is none.
        """
        match = _REAL_ARCH.fullmatch(arch)
        known = supported_archs()
        if match is None or int(match[1]) in known:
            return arch
        older = [number for number in known if number < int(match[1])]
        if not older:
            log = f"NVRTC {self.version} knows {known[0]} and newer"
            raise CompileError("NVRTC", arch=arch, log=log, remedy="install an older NVRTC")
        return f"sm_{older[-1]}"

    def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
        """Compile to what the options ask for.

        Raises:
            CompileError: with the whole log; NVRTC or a header is missing, the headers are of
                another release, or the source is wrong.
        """
        self.version  # noqa: B018  (raises the clear error where NVRTC is missing)
        arguments = [*options.arguments(), *(f"--include-path={r}" for r in self._roots(source))]
        with ExitStack() as cleanup:
            program = _create(source)
            cleanup.callback(call, driver.nvrtc.nvrtcDestroyProgram, program)
            encoded = [argument.encode() for argument in arguments]
            (status,) = driver.nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = _log(program, source)
            if int(status) != 0:
                log = log or status.name
                raise CompileError(source.name, arch=options.arch, log=log, remedy=log_remedy(log))
            code = _code(program, options.artefact)
        if not code:
            raise CompileError(source.name, arch=options.arch, log="the compiler made no code")
        return CompiledKernel(code, log)

    def _roots(self, source: KernelSource) -> tuple[Path, ...]:
        """Return the toolkit's folders for a source that needs them; checked, but not searched."""
        if not source.system_headers:
            return ()
        root = self._include_dir or cuda_include_dir()
        if root is None:
            return ()
        folders = with_cccl(root)
        if any((folder / name).is_file() for folder in folders for name in source.system_headers):
            check_release(source.name, root, nvrtc=self.version, nvrtc_path=nvrtc_location()[0])
        return folders


def _names_on_disk(source: KernelSource) -> set[str]:
    """Return the headers that NVRTC will look for on disk."""
    in_memory = dict(source.headers)
    names = set(source.system_headers)
    for text in (source.text, *in_memory.values()):
        names.update(include.name for include in scan(text).includes)
    for name in names:
        if posixpath.normpath(name).startswith(("/", "../")) and name not in in_memory:
            log = f"includes {name}, which leads out of every folder; include it by a name in one"
            raise CompileError(source.name, arch="any", log=log)
    return names - in_memory.keys()


def _create(source: KernelSource) -> Handle:
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    return call(
        driver.nvrtc.nvrtcCreateProgram,
        source.text.encode(),
        f"{COMPILE_FOLDER}{source.name}".encode(),
        len(names),
        texts,
        names,
    )


def _log(program: Handle, source: KernelSource) -> str:
    log = read_output(driver.nvrtc.nvrtcGetProgramLogSize, driver.nvrtc.nvrtcGetProgramLog, program)
    return readable_log(log.rstrip(b"\0").decode(errors="replace"), source)


def _code(program: Handle, artefact: str) -> bytes:
    # PTX keeps its final NUL: the driver reads up to it.
    if artefact == "ptx":
        return read_output(driver.nvrtc.nvrtcGetPTXSize, driver.nvrtc.nvrtcGetPTX, program)
    return read_output(driver.nvrtc.nvrtcGetCUBINSize, driver.nvrtc.nvrtcGetCUBIN, program)
