"""DsaIndexSelect as a provider's factory makes it with other options."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nxrt import CudaProvider, KernelPlugin
from nxrt.kernels.dsa_index_select.cuda import DsaIndexSelectFactory
from nxrt.kernels.dsa_index_select.spec import KEY


@contextmanager
def changed_kernel(provider: CudaProvider, **options: Any) -> Iterator[None]:
    plugin = KernelPlugin("changed", ((KEY, DsaIndexSelectFactory(**options)),))
    provider.registry.register(plugin, replace=True)
    try:
        yield
    finally:
        provider.registry.unregister("changed")
