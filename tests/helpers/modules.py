"""Code that a test compiles for the device it has."""

from nxrt.runtime.compilation.compiler import CompileOptions, Compiler
from nxrt.runtime.compilation.source import KernelSource
from nxrt.runtime.device import Device
from nxrt.runtime.module import Module


def compiled(device: Device, text: str) -> Module:
    options = CompileOptions(device.capabilities.arch)
    return Module(device, Compiler().compile(KernelSource("test.cu", text), options).cubin)
