"""What this machine has for nxrt: driver, devices, compiler, headers, cache folder.

It looks and reports; it changes nothing and never raises for what is missing.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from nxrt.errors import CompileError, NxrtError
from nxrt.runtime import driver
from nxrt.runtime.compilation.cache_folder import CacheFolder
from nxrt.runtime.compilation.compile_cache import default_cache_dir
from nxrt.runtime.compilation.compiler import (
    INSTALL_COMMAND,
    CompileOptions,
    Compiler,
    cuda_include_dir,
    nvrtc_location,
)
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.device import Device

_PACKAGES = (
    "cuda-bindings",
    "cuda-pathfinder",
    "filelock",
    "lazy_loader",
    "ml_dtypes",
    "numpy",
    "pydantic",
)
_CUDART_VERSION = re.compile(r"#\s*define\s+CUDART_VERSION\s+(\d+)")


@dataclass(frozen=True)
class Finding:
    """Report one thing that was looked for.

    Args:
        subject: what was looked for.
        is_ok: it is there and usable.
        found: what was found.
        remedy: what to do where it is not ok.
        needed_for: "cpu" where nxrt does not run at all without it, "cuda" where CUDA does not,
            empty where everything goes on.
    """

    subject: str
    is_ok: bool
    found: str
    remedy: str = ""
    needed_for: str = ""


def inspect_environment(environ: Mapping[str, str] | None = None) -> tuple[Finding, ...]:
    """Look at everything nxrt uses; initialises the driver where there is one."""
    environ = os.environ if environ is None else environ
    return (
        *(_package(name) for name in _PACKAGES),
        *_driver_and_devices(),
        _nvrtc(),
        _headers(),
        _probe_compile(),
        _cache_dir(environ),
    )


def _package(name: str) -> Finding:
    try:
        return Finding(f"package {name}", True, metadata.version(name), needed_for="cpu")
    except metadata.PackageNotFoundError:
        return Finding(
            f"package {name}", False, "not installed", f"pip install {name}", needed_for="cpu"
        )


def _driver_and_devices() -> list[Finding]:
    status = driver.probe()
    if not status.is_available:
        return [Finding("driver", False, status.reason, status.remedy, "cuda")]
    findings = [Finding("driver", True, status.reason)]
    for ordinal in range(status.num_devices):
        try:
            findings.append(_device(ordinal))
        except NxrtError as error:
            remedy = "nvidia-smi shows who uses the device and in which mode it is"
            findings.append(Finding(f"device {ordinal}", False, str(error), remedy))
    if not any(finding.is_ok for finding in findings[1:]):
        findings = [replace(finding, needed_for="cuda") for finding in findings]
    return findings


def _device(ordinal: int) -> Finding:
    device = Device(ordinal)
    try:
        has = device.capabilities
        size = f"{has.total_memory / 2**30:,.0f} GiB, {has.num_multiprocessors} multiprocessors"
        return Finding(f"device {ordinal}", True, f"{has.name}, {has.arch}, {size}")
    finally:
        device.close()


def _nvrtc() -> Finding:
    try:
        version = Compiler().version
    except CompileError as error:
        return Finding("NVRTC", False, error.log, error.remedy, "cuda")
    path, found_via = nvrtc_location()
    return Finding("NVRTC", True, f"{version}, {Path(path).name} found via {found_via}")


def _headers() -> Finding:
    folder = cuda_include_dir()
    remedy = f"only kernels with toolkit headers need them: {INSTALL_COMMAND}"
    if folder is None:
        return Finding("CUDA headers", False, "not found", remedy)
    header = folder / "cuda_runtime_api.h"
    match = _CUDART_VERSION.search(header.read_text(errors="replace")) if header.is_file() else None
    if match is None:
        return Finding("CUDA headers", False, "a folder without cuda_runtime_api.h", remedy)
    number = int(match[1])
    version = f"{number // 1000}.{number % 1000 // 10}"
    return _compared(version)


def _compared(headers_version: str) -> Finding:
    try:
        nvrtc_version = Compiler().version
    except CompileError:
        return Finding("CUDA headers", True, headers_version)
    if headers_version == nvrtc_version:
        return Finding("CUDA headers", True, f"{headers_version}, as NVRTC")
    # Mixed releases compile without a word and may mean different things.
    found = f"{headers_version}, while NVRTC is {nvrtc_version}"
    return Finding("CUDA headers", False, found, f"install one release of both: {INSTALL_COMMAND}")


def _probe_compile() -> Finding:
    source = KernelSource("probe.cu", 'extern "C" __global__ void probe() {}')
    try:
        cubin = Compiler().compile(source, CompileOptions("sm_90a")).cubin
    except CompileError as error:
        found = str(error).splitlines()[0]
        return Finding("compiling a kernel", False, found, INSTALL_COMMAND, "cuda")
    return Finding("compiling a kernel", True, f"a cubin of {len(cubin):,} B for sm_90a")


def _cache_dir(environ: Mapping[str, str]) -> Finding:
    folder = default_cache_dir(environ)
    if folder is None:
        return Finding("compile cache", True, "in memory only: no folder is configured")
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
        files = CacheFolder(folder).files() if folder.is_dir() else []
        num_entries = sum(file.kind == "entry" and file.is_current for file in files)
    except OSError as error:
        remedy = "set NXRT_CACHE_DIR to a folder you can write to"
        return Finding("compile cache", False, f"{folder}: {error.strerror}", remedy)
    return Finding("compile cache", True, f"{folder}, writable, {num_entries} entries")
