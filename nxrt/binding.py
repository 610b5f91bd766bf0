"""The memory of one run: every value of a graph at an address that does not change.

A binding knows layouts and copies; what is computed with them is the session's business.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import ClosedError, InvalidInputError
from nxrt.kernels.api import GraphResource
from nxrt.memory.tier import Role
from nxrt.providers.base import Allocation, ProviderSession
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.storage import DeviceId
from nxrt.tensor import TensorSpec, TensorView


class Binding:
    """Hold the tensors of a graph for one set of sizes. Made by `Session.bind`.

    A context manager; `close` gives up the memory it allocated. Graphs captured from it keep what
    they need alive.

    Args:
        specs: every value by name, without symbols.
        provider: allocates and copies.
        device: where every tensor must be.
        written: the values that kernels write.
        views: memory of the caller's for some values; the rest is allocated.
        roles: what an allocated value is held for; activation when left out.
        lock: held by the session while it uses the binding.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        provider: ProviderSession,
        *,
        device: DeviceId,
        written: frozenset[str],
        views: Mapping[str, TensorView],
        roles: Mapping[str, Role],
        lock: AbstractContextManager[object],
    ) -> None:
        self._lock = lock
        self.specs = dict(specs)
        self._provider = provider
        self._is_closed = False
        _check_names("views", views, specs)
        _check_names("roles", roles, specs)
        for name, view in views.items():
            _check_view(name, view, specs[name], device)
            if name in written:
                _require_writable(name, view)
        self._views: dict[str, TensorView] = {}
        self._owned: list[Allocation] = []
        with ExitStack() as undo:
            for name, spec in specs.items():
                if name in views:
                    self._views[name] = self._kept(views[name], undo)
                    continue
                role = roles.get(name, Role.ACTIVATION)
                allocation = provider.allocate(spec.nbytes(name), role=role, holder=name)
                undo.callback(allocation.close)
                self._owned.append(allocation)
                self._views[name] = TensorView(allocation, spec.dtype, spec.sizes)
            self._undo = undo.pop_all()

    def _kept(self, view: TensorView, undo: ExitStack) -> TensorView:
        """Return a view whose memory stays as long as this binding, where it can be shared."""
        if not isinstance(view.storage, GraphAllocation):
            return view
        handle = view.storage.share()
        undo.callback(handle.close)
        self._owned.append(handle)
        return replace(view, storage=handle)

    @property
    def is_closed(self) -> bool:
        """Say whether `close` was called."""
        return self._is_closed

    def is_made_by(self, provider: ProviderSession) -> bool:
        """Say whether the binding's memory belongs to what a provider opened."""
        return self._provider is provider

    def view(self, name: str) -> TensorView:
        """Return the tensor of a value. Raises InvalidInputError, ClosedError."""
        if self._is_closed:
            raise ClosedError("binding")
        if name not in self._views:
            raise InvalidInputError("value", found=repr(name), accepted=", ".join(self._views))
        return self._views[name]

    def write(self, name: str, array: NDArray[Any], *, offset: int = 0) -> None:
        """Copy a host array into a value, in stream order.

        Args:
            name: the value.
            array: any shape; its elements go, row-major, to the value's elements from `offset`.
                bf16 and 8-bit floats come as unsigned integers of the same width.
            offset: the first element to write.

        Raises:
            InvalidInputError: the dtype differs, the elements do not fit, or the memory is
                read-only. Nothing is written.
            CaptureError: the session is recording.

        Stream: the array may be changed as soon as this returns.
        """
        view = self.view(name)
        _require_writable(name, view)
        if not isinstance(array, np.ndarray):
            found, accepted = type(array).__name__, "a NumPy array"
            raise InvalidInputError(name, found=found, accepted=accepted)
        if array.dtype != view.dtype.storage:
            accepted = f"{view.dtype.storage.name}, which holds {view.dtype}"
            raise InvalidInputError(f"{name} dtype", found=str(array.dtype), accepted=accepted)
        if not view.is_contiguous:
            raise InvalidInputError(
                f"{name} layout", found=f"strides {view.strides}", accepted="a contiguous tensor"
            )
        if not 0 <= offset <= view.num_elements - array.size:
            raise InvalidInputError(
                f"{name} elements",
                found=f"{array.size} from element {offset}",
                accepted=f"within its {view.num_elements}",
            )
        self._provider.upload(view, offset, np.ascontiguousarray(array))

    def read(self, name: str) -> NDArray[Any]:
        """Return a copy of a value, after everything enqueued before.

        Raises:
            InvalidInputError: no such value, or its memory is not contiguous.
            DriverError: an earlier kernel failed.
        """
        view = self.view(name)
        if not view.is_contiguous:
            raise InvalidInputError(
                f"{name} layout", found=f"strides {view.strides}", accepted="a contiguous tensor"
            )
        array = np.empty(view.shape, view.dtype.storage)
        self._provider.download(array, view)
        return array

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return the memory that a recording bakes in and can hold on to."""
        return [owned for owned in self._owned if isinstance(owned, GraphAllocation)]

    def close(self) -> None:
        """Give up the memory this binding allocated, after a run that uses it; may be repeated."""
        with self._lock:
            self._is_closed = True
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_names(what: str, given: Mapping[str, object], specs: Mapping[str, TensorSpec]) -> None:
    for name in given:
        if name not in specs:
            accepted = ", ".join(specs)
            raise InvalidInputError(f"name in {what}", found=repr(name), accepted=accepted)


def _require_writable(name: str, view: TensorView) -> None:
    if view.is_read_only:
        raise InvalidInputError(f"view of {name}", found="read-only memory", accepted="writable")


def _check_view(name: str, view: TensorView, spec: TensorSpec, device: DeviceId) -> None:
    if not isinstance(view, TensorView):
        found, accepted = type(view).__name__, "a TensorView; TensorView.of_array makes one"
        raise InvalidInputError(f"view of {name}", found=found, accepted=accepted)
    if view.spec != spec:
        raise InvalidInputError(f"view of {name}", found=str(view.spec), accepted=str(spec))
    if view.device != device:
        found = f"memory on {view.device}"
        raise InvalidInputError(f"view of {name}", found=found, accepted=f"memory on {device}")
