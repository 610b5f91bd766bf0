"""The CUDA provider: one device, its compile cache, and its table of kernels.

Claiming and compiling ahead of time need no driver; everything else does, and says so at once.
"""

import os
from pathlib import Path

from nxrt.errors import ClosedError
from nxrt.kernels.api import CompileUnit
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelectFactory
from nxrt.kernels.dsa_index_select.spec import KEY as DSA_INDEX_SELECT
from nxrt.kernels.registry import KernelPlugin, KernelRegistry
from nxrt.memory.governor import MemoryGovernor
from nxrt.providers.base import ExecutionProvider, Health
from nxrt.providers.cuda_session import CudaProviderSession
from nxrt.runtime import error_latch
from nxrt.runtime.compilation.compile_cache import (
    CacheStats,
    CompileCache,
    default_cache_dir,
    default_cache_nbytes,
)
from nxrt.runtime.compilation.compiler import Compiler
from nxrt.runtime.device import Capabilities, Device

KERNELS = KernelPlugin(
    "nxrt.cuda",
    ((DSA_INDEX_SELECT, DsaIndexSelectFactory()),),
    origin="nxrt",
)


def all_compile_units(plugin: KernelPlugin = KERNELS) -> list[CompileUnit]:
    """Return all that a plug-in's kernels compile, and the sessions that run them; each once."""
    units = [unit for _, factory in plugin.kernels for unit in factory.compile_units()]
    return list(dict.fromkeys([*units, CompileUnit(error_latch.SOURCE)]))


class CudaProvider(ExecutionProvider):
    """Run CUDA kernels on one device.

    Args:
        ordinal: the device.
        cache_dir: where compiled kernels are kept; from the environment when left out.

    Raises:
        DriverUnavailableError: there is no driver or no device; at once, never a hang.
        ForkedProcessError: the process is the forked child of one that used CUDA.
        InvalidInputError: there is no device of that number, or NXRT_CACHE_MAX_BYTES is no size.
        DriverError: the device cannot be used: it is full, or in exclusive use.
    """

    def __init__(self, ordinal: int = 0, *, cache_dir: Path | None = None) -> None:
        # Read first: what it refuses must not leave the device's context behind.
        cache = CompileCache(
            Compiler(),
            cache_dir or default_cache_dir(os.environ),
            max_nbytes=default_cache_nbytes(os.environ),
        )
        self.name = "cuda"
        self.registry = KernelRegistry()
        self.registry.register(KERNELS)
        self._cache = cache
        self._device = Device(ordinal)
        self.device = self._device.id
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """Return what the device can do."""
        return self._device.capabilities

    @property
    def cache_stats(self) -> CacheStats:
        """Return what the compile cache did for this provider."""
        return self._cache.stats

    @property
    def health(self) -> Health:
        """Say whether kernels can run; asks no driver, so that a health check costs nothing."""
        fault = self._device.fault
        return Health(True) if fault is None else Health(False, str(fault()))

    def open(self, governor: MemoryGovernor) -> CudaProviderSession:
        """Return a session's stream, memory and staging.

        Raises:
            ClosedError: the provider is closed.
            LeaseRefusedError, AllocationFailedError, DriverError: nothing is kept.
        """
        if self._is_closed:
            raise ClosedError("CUDA provider")
        return CudaProviderSession(self._device, self._cache, governor)

    def close(self) -> None:
        """Give up the device; sessions and memory that are open keep it. May be repeated."""
        self._is_closed = True
        self._device.close()
