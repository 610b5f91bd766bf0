"""NVRTC: one source and its options in, one cubin out. Needs no driver and no device.

Nothing is remembered here; `compile_cache` does that.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda import pathfinder

from nxrt.errors import CompileError
from nxrt.runtime import driver
from nxrt.runtime.driver import Handle
from nxrt.runtime.source import INCLUDE, KernelSource

INSTALL_COMMAND = 'pip install "nvidia-cuda-nvrtc==13.0.*" "nvidia-cuda-runtime==13.0.*"'
_MISSING_HEADER = re.compile(r'(?:could not|cannot) open source file "([^"]+)"')


@dataclass(frozen=True)
class CompileOptions:
    """Say what a source is compiled for.

    Args:
        arch: a real architecture, such as "sm_90a".
        defines: preprocessor names and values.
        flags: further NVRTC options, as they are.
    """

    arch: str
    defines: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return NVRTC's options in the order given."""
        defines = [f"--define-macro={name}={value}" for name, value in self.defines]
        return [f"--gpu-architecture={self.arch}", "--std=c++17", *defines, *self.flags]


@dataclass(frozen=True)
class CompiledKernel:
    """Hold a cubin and what the compiler said while making it."""

    cubin: bytes
    log: str


class Compiler:
    """Call NVRTC.

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
        return _nvrtc_version()

    def header_bytes(self, source: KernelSource) -> tuple[tuple[str, bytes], ...]:
        """Return every toolkit header that a source reaches, for its cache key."""
        root = self._headers(source)
        return () if root is None else _reached(root, source.system_headers)

    def compile(self, source: KernelSource, options: CompileOptions) -> CompiledKernel:
        """Compile to a cubin.

        Raises:
            CompileError: with the whole log; NVRTC or a header is missing, or the source is wrong.
        """
        self.version  # noqa: B018  (raises the clear error where NVRTC is missing)
        arguments = options.arguments()
        root = self._headers(source)
        if root is not None:
            arguments.append(f"--include-path={root}")
        with ExitStack() as cleanup:
            program = _create(source)
            cleanup.callback(_call, driver.nvrtc.nvrtcDestroyProgram, program)
            encoded = [argument.encode() for argument in arguments]
            (status,) = driver.nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = _read(
                driver.nvrtc.nvrtcGetProgramLogSize, driver.nvrtc.nvrtcGetProgramLog, program
            )
            text = log.rstrip(b"\0").decode(errors="replace")
            if int(status) != 0:
                raise _compile_error(source, options, text or status.name)
            cubin = _read(driver.nvrtc.nvrtcGetCUBINSize, driver.nvrtc.nvrtcGetCUBIN, program)
        if not cubin:
            raise CompileError(source.name, arch=options.arch, log="the compiler made no code")
        return CompiledKernel(cubin, text)

    def _headers(self, source: KernelSource) -> Path | None:
        if not source.system_headers:
            return None
        return self._include_dir or cuda_include_dir()


def _reached(root: Path, names: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    """Return name and bytes of the headers under `root` that `names` include, and so on.

    Conditions are not evaluated: a header that might be included counts.
    """
    found: dict[str, bytes] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        path = root / name
        if name in found or not path.is_file():
            continue
        found[name] = path.read_bytes()
        for _, included in INCLUDE.findall(found[name].decode(errors="replace")):
            beside = (Path(name).parent / included).as_posix()
            pending += [included, beside]
    return tuple(sorted(found.items()))


def nvrtc_location() -> tuple[str, str]:
    """Return the path of NVRTC's library and how it was found. Raises RuntimeError."""
    found = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    return str(found.abs_path), str(found.found_via)


def cuda_include_dir() -> Path | None:
    """Return the folder of the toolkit's headers, None where there is none."""
    found = pathfinder.locate_nvidia_header_directory("cudart")
    return None if found is None or found.abs_path is None else Path(found.abs_path)


@cache
def _nvrtc_version() -> str:
    try:
        major, minor = _call(driver.nvrtc.nvrtcVersion)
    except RuntimeError as error:
        raise CompileError(
            "NVRTC",
            arch="any",
            log=str(error).splitlines()[0],
            remedy=f"install it: {INSTALL_COMMAND}",
        ) from error
    return f"{major}.{minor}"


def _call(function: Any, *args: Any) -> Any:
    status, *outputs = function(*args)
    if int(status) != 0:
        raise CompileError(
            "NVRTC", arch="any", log=f"{function.__name__} failed with {status.name}"
        )
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _create(source: KernelSource) -> Handle:
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    return _call(
        driver.nvrtc.nvrtcCreateProgram,
        source.text.encode(),
        source.name.encode(),
        len(names),
        texts,
        names,
    )


def _read(get_size: Any, get: Any, program: Handle) -> bytes:
    buffer = bytes(_call(get_size, program))
    _call(get, program, buffer)
    return buffer


def _compile_error(source: KernelSource, options: CompileOptions, log: str) -> CompileError:
    missing = _MISSING_HEADER.search(log)
    remedy = ""
    if missing is not None:
        remedy = f"the header {missing[1]} ships with the CUDA runtime headers: {INSTALL_COMMAND}"
    return CompileError(source.name, arch=options.arch, log=log, remedy=remedy)
