"""What a CUDA kernel is given when it is created: compiled code and charged memory, on one device.

Kernels get nothing from globals; whatever they use comes from here or through `execute`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nxrt.errors import InvalidInputError
from nxrt.memory.allocator import LeasedAllocator
from nxrt.runtime.code_loading import load_module
from nxrt.runtime.compilation.compile_cache import CompileCache
from nxrt.runtime.compilation.compiler import CompileOptions
from nxrt.runtime.compilation.source import load_source
from nxrt.runtime.device import Device
from nxrt.runtime.error_latch import ErrorLatch, FaultSlot
from nxrt.runtime.module import Module


@dataclass(frozen=True)
class KernelContext:
    """Lend a provider's device, compile cache and device memory to its kernels."""

    device: Device
    compile_cache: CompileCache
    allocator: LeasedAllocator
    open_latch: Callable[[], ErrorLatch] | None = None

    def fault_slot(self, node: str, meanings: Mapping[int, str]) -> FaultSlot:
        """Return where the kernel of a node reports bad data that it meets on the device.

        Args:
            node: the node's name, for the error.
            meanings: what each bit says, such as {1: "an index past the end"}.

        Raises:
            InvalidInputError: this context was made without a session, or has no slots left.
            CompileError, DriverError, LeaseRefusedError: nothing is kept.
        """
        if self.open_latch is None:
            raise InvalidInputError(
                "fault slot", found="a context without a session", accepted="a session's context"
            )
        return self.open_latch().slot(node, meanings)

    def load(
        self,
        path: Path,
        *,
        defines: tuple[tuple[str, str], ...] = (),
        flags: tuple[str, ...] = (),
        artefact: str = "cubin",
    ) -> Module:
        """Return a source compiled for this device and loaded; the caller closes it.

        Code that the driver does not load is compiled anew, once.

        Args:
            path: the .cu file; its quoted includes are beside it or nxrt's shared headers.
            defines: preprocessor names and values.
            flags: further NVRTC options.
            artefact: "cubin", for exactly this device; or "ptx", which the driver compiles when it
                loads it: for a device that is newer than NVRTC.

        Raises:
            CompileError: it does not compile, or the driver does not load what was compiled.
            DriverError: anything else that the driver refuses. Nothing is kept.
        """
        arch = self.device.capabilities.arch
        if artefact == "ptx":
            arch = self.compile_cache.compiler.ptx_arch(arch)
        options = CompileOptions(arch, defines, flags, artefact)
        return load_module(self.device, self.compile_cache, load_source(path), options)
