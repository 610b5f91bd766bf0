"""From a source to loaded code: compile or fetch, load, and once more where the driver says no.

The cache's digest says that bytes are what was written; only the driver says that they are code.
"""

from nxrt.errors import CompileError, DriverError
from nxrt.runtime import driver
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import CompileOptions
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.device import Device
from nxrt.runtime.module import Module

UNLOADABLE_CODES = frozenset({200, 209, 218, 222, 300, 301})
"""The driver's answers that speak of the code's bytes, not of the device's state: INVALID_IMAGE,
NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION, INVALID_SOURCE, FILE_NOT_FOUND."""

_LOAD = "cuModuleLoadData"
_UNSUPPORTED_PTX_VERSION = 222


def load_module(
    device: Device, cache: CompileCache, source: KernelSource, options: CompileOptions
) -> Module:
    """Return the code of a source, loaded on a device; the caller closes it.

    Code that the driver does not load is forgotten and compiled anew, once.

    Raises:
        CompileError: it does not compile, or the driver does not load what was compiled anew; the
            driver's error is then `__cause__`. Nothing is kept.
        DriverError: anything else that the driver refuses.
    """
    loaded = _loaded(device, cache, source, options)
    if isinstance(loaded, DriverError):
        loaded = _loaded(device, cache, source, options)
    if isinstance(loaded, DriverError):
        raise _unloadable(cache, source, options, loaded) from loaded
    return loaded


def _loaded(
    device: Device, cache: CompileCache, source: KernelSource, options: CompileOptions
) -> Module | DriverError:
    code = cache.get(source, options)
    try:
        return Module(device, code)
    except DriverError as error:
        # The same code from making the context current says nothing about these bytes.
        if error.code not in UNLOADABLE_CODES or error.call != _LOAD:
            raise
        # Nor shall the next process have to find out.
        cache.discard(source, options, code)
        return error


def _unloadable(
    cache: CompileCache, source: KernelSource, options: CompileOptions, error: DriverError
) -> CompileError:
    cuda = _driver_version()
    remedy = f"NVRTC is {cache.compiler.version}, the driver is for CUDA {cuda}"
    if error.code == _UNSUPPORTED_PTX_VERSION:
        remedy += (
            ", too old for this PTX: update the driver, install an NVRTC that is not newer"
            f' (pip install "nvidia-cuda-nvrtc=={cuda}.*"), or compile to a cubin'
        )
    log = f"the driver does not load what NVRTC made, not even compiled anew: {error}"
    return CompileError(source.name, arch=options.arch, log=log, remedy=remedy)


def _driver_version() -> str:
    number = driver.call(driver.api.cuDriverGetVersion)
    return f"{number // 1000}.{number % 1000 // 10}"
