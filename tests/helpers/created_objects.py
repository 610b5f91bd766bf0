"""The driver objects that nxrt makes while watched, so that a test can destroy what it leaves.

A device that was lost leaves everything behind: on a real driver until the process ends, here until
the next test would count it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import pytest

from nxrt import DriverError
from nxrt.runtime import driver
from nxrt.runtime.compilation.source import load_source

_ENDS = {
    "cuStreamCreate": "cuStreamDestroy",
    "cuEventCreate": "cuEventDestroy",
    "cuModuleLoadData": "cuModuleUnload",
    "cuMemAlloc": "cuMemFree",
    "cuMemAllocHost": "cuMemFreeHost",
    "cuGraphInstantiate": "cuGraphExecDestroy",
    "cuStreamEndCapture": "cuGraphDestroy",
}
RETAIN, RELEASE = "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"


_load_source = cache(load_source)
"""Reads each file once in a run; a sweep opens a thousand sessions."""


class CreatedObjects:
    """Remember the driver objects that were made, to destroy in the end what is still there.

    Destroying one that is gone is harmless on the double: it uses no handle twice.
    """

    def __init__(self) -> None:
        self.num_contexts = 0
        """How often the context was retained and not released."""
        self._ends: list[tuple[Callable[..., Any], Any]] = []
        self._real = driver.call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See every object that nxrt makes inside the with-block.

        The context stays meanwhile: its end would destroy, and hide, whatever was forgotten.
        """
        device = self._real(driver.api.cuDeviceGet, 0)
        self._real(driver.api.cuDevicePrimaryCtxRetain, device)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(driver, "call", self._call)
                patch.setattr("nxrt.runtime.kernel_context.load_source", _load_source)
                yield
        finally:
            self._real(driver.api.cuDevicePrimaryCtxRelease, device)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        result = self._real(function, *args)
        name = function.__name__
        if name in _ENDS:
            self._ends.append((getattr(driver.api, _ENDS[name]), result))
        self.num_contexts += {RETAIN: 1, RELEASE: -1}.get(name, 0)
        return result

    def destroy(self, *, is_anything_left: bool) -> None:
        """Destroy what was made, newest first, and the context last."""
        ends, self._ends = self._ends, []
        for function, handle in reversed(ends if is_anything_left else []):
            with suppress(DriverError):
                self._real(function, handle)
        while self.num_contexts > 0:
            self._real(driver.api.cuDevicePrimaryCtxRelease, 0)
            self.num_contexts -= 1
