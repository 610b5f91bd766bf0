# The public names and where they are: the one list of them.

from .binding import Binding
from .errors import (
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
    LeaseCancelledError,
    LeaseRefusedError,
    LeasesOutstandingError,
    NxrtError,
    PluginError,
    RegistrationError,
    SizeOverflowError,
    StateGroupOutOfMemoryError,
    UnsupportedGraphError,
)
from .graph import Graph, Node
from .graph_cache import StepStats
from .kernels.api import (
    CaptureSupport,
    CompileUnit,
    Kernel,
    KernelFactory,
    KernelMatch,
    OpKey,
    WorkspaceRequirement,
)
from .kernels.registry import KernelPlugin, KernelRegistry
from .memory.budget import MemoryBudget
from .memory.governor import MemoryGovernor
from .memory.lease import MemoryLease
from .memory.state_bytes import StateGroupBytes
from .memory.state_ledger import StateGroupLedger
from .memory.tier import HOST, PINNED, Role, Tier, device_tier
from .memory.waiting import CancelToken
from .providers.cpu import CpuProvider
from .providers.cuda import CudaProvider
from .providers.select import cuda_status, select_provider
from .runtime.driver import DriverStatus
from .session import Session
from .storage import DeviceId, DeviceType, ForeignStorage
from .tensor import DType, TensorSpec, TensorView

__version__: str

__all__ = [
    "HOST",
    "PINNED",
    "AllocationFailedError",
    "Binding",
    "BudgetError",
    "CancelToken",
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
    "DriverStatus",
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
    "LeaseCancelledError",
    "LeaseRefusedError",
    "LeasesOutstandingError",
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
    "StateGroupBytes",
    "StateGroupLedger",
    "StateGroupOutOfMemoryError",
    "StepStats",
    "TensorSpec",
    "TensorView",
    "Tier",
    "UnsupportedGraphError",
    "WorkspaceRequirement",
    "cuda_status",
    "device_tier",
    "select_provider",
]
