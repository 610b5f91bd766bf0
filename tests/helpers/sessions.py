"""Sessions on a device that are open and written to, and what they hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nxrt import (
    CudaProvider,
    MemoryGovernor,
    Role,
    Session,
    device_tier,
)
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelect
from tests.helpers.cases import IndexSelectCase, drawn_case
from tests.helpers.targets import Target


def kernel_of(session: Session) -> DsaIndexSelect:
    kernel = session.kernels[0]
    assert isinstance(kernel, DsaIndexSelect)
    return kernel


@contextmanager
def running(
    provider: CudaProvider, case: IndexSelectCase, governor: MemoryGovernor | None = None
) -> Iterator[tuple[Session, Any, Any]]:
    target = Target(provider, "eager")
    with target.bound(case, governor or MemoryGovernor()) as bound:
        yield bound


def dynamic_session(provider: CudaProvider, governor: MemoryGovernor) -> Session:
    """Return a session over any number of keys."""
    template = drawn_case("dynamic", num_queries=1, num_keys=2, top_k=4)
    return Session(template.graph_of("T"), [provider], governor)


def write(binding: Any, case: IndexSelectCase) -> None:
    for name, array in case.inputs.items():
        binding.write(name, array)


def workspace_bytes(governor: MemoryGovernor) -> int:
    holders = governor.usage(device_tier(0)).holders
    return sum(holder.used for holder in holders if holder.role is Role.WORKSPACE)
