"""What a CUDA kernel is given when it is created: compiled code and charged memory, on one device.

Kernels get nothing from globals; whatever they use comes from here or through `execute`.
"""

from dataclasses import dataclass
from pathlib import Path

from nxrt.memory.allocator import LeasedAllocator
from nxrt.runtime.compile_cache import CompileCache
from nxrt.runtime.compiler import CompileOptions
from nxrt.runtime.device import Device
from nxrt.runtime.module import Module
from nxrt.runtime.source import load_source


@dataclass(frozen=True)
class KernelContext:
    """Lend a provider's device, compile cache and device memory to its kernels."""

    device: Device
    compile_cache: CompileCache
    allocator: LeasedAllocator

    def load(
        self,
        path: Path,
        *,
        defines: tuple[tuple[str, str], ...] = (),
        flags: tuple[str, ...] = (),
    ) -> Module:
        """Return a source compiled for this device and loaded; the caller closes it.

        Args:
            path: the .cu file; its quoted includes are beside it or nxrt's shared headers.
            defines: preprocessor names and values.
            flags: further NVRTC options.

        Raises:
            CompileError, DriverError: nothing is kept.
        """
        options = CompileOptions(self.device.capabilities.arch, defines, flags)
        return Module(self.device, self.compile_cache.get(load_source(path), options))
