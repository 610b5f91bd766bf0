"""Choose a provider by name, or by what this machine has, and say why."""

from dataclasses import dataclass
from pathlib import Path

from nxrt.errors import DriverError, DriverUnavailableError, InvalidInputError
from nxrt.providers.base import ExecutionProvider
from nxrt.providers.cpu import CpuProvider
from nxrt.providers.cuda import CudaProvider
from nxrt.runtime import driver
from nxrt.runtime.driver import DriverStatus

PROVIDER_NAMES = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class ProviderChoice:
    """Hold an opened provider and the reason it was chosen."""

    provider: ExecutionProvider
    reason: str


def select_provider(
    name: str = "auto", *, ordinal: int = 0, cache_dir: Path | None = None
) -> ProviderChoice:
    """Open a provider; the caller closes it.

    Args:
        name: "cuda", "cpu", or "auto": CUDA when a device can be used and the CPU otherwise.
        ordinal: the CUDA device.
        cache_dir: where compiled kernels are kept; from the environment when left out.

    Raises:
        InvalidInputError: another name, or no such device.
        DriverUnavailableError: "cuda" was asked for and there is none.
        DriverError: "cuda" was asked for and the device cannot be used, as it is full or in
            exclusive use.
    """
    if name not in PROVIDER_NAMES:
        raise InvalidInputError("provider", found=repr(name), accepted=", ".join(PROVIDER_NAMES))
    if name == "cpu":
        return ProviderChoice(CpuProvider(), "asked for")
    status = driver.start()
    if name == "auto" and not status.is_available:
        return ProviderChoice(CpuProvider(), status.reason)
    try:
        provider = CudaProvider(ordinal, cache_dir=cache_dir)
    except (DriverError, DriverUnavailableError) as error:
        if name != "auto":
            raise
        return ProviderChoice(CpuProvider(), f"{status.reason}, which cannot be used: {error}")
    found = f"{provider.capabilities.name}, {status.reason}"
    return ProviderChoice(provider, found if name == "auto" else f"asked for; {found}")


def cuda_status() -> DriverStatus:
    """Say whether CUDA can be used here, without initialising it in this process.

    Children forked afterwards can use it. Takes a few hundred milliseconds where there is a driver
    that this process does not use yet, as another process is asked.
    """
    return driver.probe()
