"""Custom CUDA kernels for inference engines: plug-ins, captured graphs, a budget for every byte.

Public names only. Importing makes no file, reads no variable and loads no driver.
"""

from nxrt.binding import Binding
from nxrt.errors import (
    AllocationFailedError,
    BudgetError,
    CaptureDeclinedError,
    CaptureError,
    ClosedError,
    CompileError,
    DeviceFaultError,
    DeviceLostError,
    DriverError,
    DriverUnavailableError,
    ForkedProcessError,
    InvalidInputError,
    InvalidNodeError,
    LeaseRefusedError,
    NxrtError,
    PluginError,
    RegistrationError,
    SizeOverflowError,
    UnsupportedGraphError,
)
from nxrt.graph import Graph, Node
from nxrt.graph_cache import StepStats
from nxrt.kernels.api import (
    CaptureSupport,
    CompileUnit,
    Kernel,
    KernelFactory,
    KernelMatch,
    OpKey,
    WorkspaceRequirement,
)
from nxrt.kernels.registry import KernelPlugin, KernelRegistry
from nxrt.memory.budget import MemoryBudget
from nxrt.memory.governor import MemoryGovernor
from nxrt.memory.lease import MemoryLease
from nxrt.memory.tier import HOST, PINNED, Role, Tier, device_tier
from nxrt.providers.cpu import CpuProvider
from nxrt.providers.cuda import CudaProvider
from nxrt.providers.select import select_provider
from nxrt.session import Session
from nxrt.storage import DeviceId, DeviceType, ForeignStorage
from nxrt.tensor import DType, TensorSpec, TensorView

__version__ = "0.1.0"

__all__ = [
    "HOST",
    "PINNED",
    "AllocationFailedError",
    "Binding",
    "BudgetError",
    "CaptureDeclinedError",
    "CaptureError",
    "CaptureSupport",
    "ClosedError",
    "CompileError",
    "CompileUnit",
    "CpuProvider",
    "CudaProvider",
    "DType",
    "DeviceFaultError",
    "DeviceId",
    "DeviceLostError",
    "DeviceType",
    "DriverError",
    "DriverUnavailableError",
    "ForeignStorage",
    "ForkedProcessError",
    "Graph",
    "InvalidInputError",
    "InvalidNodeError",
    "Kernel",
    "KernelFactory",
    "KernelMatch",
    "KernelPlugin",
    "KernelRegistry",
    "LeaseRefusedError",
    "MemoryBudget",
    "MemoryGovernor",
    "MemoryLease",
    "Node",
    "NxrtError",
    "OpKey",
    "PluginError",
    "RegistrationError",
    "Role",
    "Session",
    "SizeOverflowError",
    "StepStats",
    "TensorSpec",
    "TensorView",
    "Tier",
    "UnsupportedGraphError",
    "WorkspaceRequirement",
    "device_tier",
    "select_provider",
]
