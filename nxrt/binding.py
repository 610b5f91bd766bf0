"""The memory of one run: every value of a graph at an address that does not change.

A binding knows layouts and copies; what is computed with them is the session's business.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nxrt.errors import ClosedError, InvalidInputError
from nxrt.graph import Node
from nxrt.kernels.api import GraphResource
from nxrt.memory.tier import Role
from nxrt.providers.base import Allocation, ProviderSession
from nxrt.runtime.graph_memory import GraphAllocation
from nxrt.storage import DeviceId, checked_int
from nxrt.tensor import TensorSpec, TensorView


class BindingOwner(Protocol):
    """The session that made a binding."""

    def naming_recent(self) -> AbstractContextManager[None]:
        """Name what was enqueued where waiting inside the with-block fails."""

    def closing(self, binding: "Binding") -> AbstractContextManager[None]:
        """Give up graphs over the binding; let nothing run inside the with-block."""


class Binding:
    """Hold the tensors of a graph for one set of sizes. Made by `Session.bind`.

    A context manager; `close` gives up the memory it allocated. Graphs captured from it keep what
    they need alive.

    Args:
        specs: every value by name, without symbols.
        provider: allocates and copies.
        device: where every tensor must be.
        nodes: what reads and writes the values.
        views: memory of the caller's for some values; the rest is allocated.
        roles: what an allocated value is held for; activation when left out.
        owner: the session.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        provider: ProviderSession,
        *,
        device: DeviceId,
        nodes: Sequence[Node],
        views: Mapping[str, TensorView],
        roles: Mapping[str, Role],
        owner: BindingOwner,
    ) -> None:
        self._owner = owner
        self.specs = dict(specs)
        self._provider = provider
        self._is_closed = False
        _check_names("views", views, specs)
        _check_names("roles", roles, specs)
        written = {name for node in nodes for name in node.outputs}
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
            self.operands = [self._operands(node) for node in nodes]
            """The inputs and outputs of each node, by slot."""
            self._undo = undo.pop_all()

    def _operands(self, node: Node) -> tuple[tuple[TensorView | None, ...], tuple[TensorView, ...]]:
        inputs = tuple(None if name is None else self._views[name] for name in node.inputs)
        return inputs, tuple(self._views[name] for name in node.outputs)

    def _kept(self, view: TensorView, undo: ExitStack) -> TensorView:
        """Return a view whose memory stays as long as this binding, where it can be shared."""
        if not isinstance(view.storage, GraphAllocation):
            return view
        handle = view.storage.share()
        undo.callback(handle.close)
        handle.used_on(self._provider.stream)  # it may be another session's
        self._owned.append(handle)
        return replace(view, storage=handle)

    @property
    def is_closed(self) -> bool:
        """Say whether `close` was called."""
        return self._is_closed

    def is_made_by(self, provider: ProviderSession) -> bool:
        """Say whether the binding's memory belongs to what a provider opened."""
        return self._provider is provider

    def require_open(self) -> None:
        """Raise ClosedError once `close` was called."""
        if self._is_closed:
            raise ClosedError("binding")

    def view(self, name: str) -> TensorView:
        """Return the tensor of a value. Raises InvalidInputError, ClosedError."""
        self.require_open()
        if name not in self._views:
            raise InvalidInputError("value", found=repr(name), accepted=", ".join(self._views))
        return self._views[name]

    def write(
        self, name: str, array: NDArray[Any], *, offset: int = 0, stream: object | None = None
    ) -> None:
        """Copy a host array into a value, in stream order.

        Args:
            name: the value.
            array: any shape; its elements go, row-major, to the value's elements from `offset`.
                bf16 and 8-bit floats come as unsigned integers of the same width.
            offset: the first element to write.
            stream: a stream of the caller's to be ordered with; see `Session.run`.

        Raises:
            InvalidInputError: the dtype differs, the elements do not fit, or the memory is
                read-only. Nothing is written.
            ClosedError: the binding or its session is closed.
            CaptureError: this thread records a graph.
            DriverError: an earlier kernel failed, or some of it was not copied.

        Stream: enqueued on the session's stream; waits only for earlier copies that still use
            the page-locked memory. The array may be changed as soon as this returns.
        """
        view, offset = self.view(name), checked_int("offset", offset)
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
        with self._held(view) as held, self._provider.ordered_with(stream):
            self._provider.upload(held, offset, np.ascontiguousarray(array))

    def read(self, name: str, *, stream: object | None = None) -> NDArray[Any]:
        """Return a copy of a value, after everything enqueued before.

        Args:
            name: the value.
            stream: a stream of the caller's to be ordered with; see `Session.run`.

        Raises:
            InvalidInputError: no such value, or its memory is not contiguous.
            ClosedError: the binding or its session is closed.
            CaptureError: this thread records a graph.
            DriverError: an earlier kernel failed; the notes name what was enqueued.
            DeviceFaultError: an earlier kernel met bad data.
        """
        view = self.view(name)
        if not view.is_contiguous:
            raise InvalidInputError(
                f"{name} layout", found=f"strides {view.strides}", accepted="a contiguous tensor"
            )
        array = np.empty(view.shape, view.dtype.storage)
        with (
            self._held(view) as held,
            self._owner.naming_recent(),
            self._provider.ordered_with(stream),
        ):
            self._provider.download(array, held)
        return array

    @contextmanager
    def _held(self, view: TensorView) -> Iterator[TensorView]:
        """Keep a view's memory from going away, should another thread close the binding."""
        if not isinstance(view.storage, GraphAllocation):
            yield view
            return
        with view.storage.share() as handle:
            yield replace(view, storage=handle)

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return the memory that a recording bakes in and can hold on to."""
        return [owned for owned in self._owned if isinstance(owned, GraphAllocation)]

    def foreign_views(self) -> list[TensorView]:
        """Return the views of memory that cannot be shared, only be kept referenced."""
        views = self._views.values()
        return [view for view in views if not isinstance(view.storage, GraphAllocation)]

    def close(self) -> None:
        """Give up the memory this binding allocated once no run uses it; may be repeated.

        Waits for a run that is being enqueued, not for the device.
        """
        self._is_closed = True  # no use begins any more; one that has begun is waited for
        with self._owner.closing(self):
            self._undo.close()
            foreign = self.foreign_views()
            self._views.clear()
            self.operands.clear()
            self._provider.drop(foreign)  # the caller's memory is the caller's again, in time

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
