"""One node of a session with its kernel, and what is asked of a kernel that is a plug-in's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nxrt.errors import NxrtError, PluginError
from nxrt.graph import Node
from nxrt.kernels.api import CaptureSupport, GraphResource, Kernel
from nxrt.tensor import TensorSpec

_T = TypeVar("_T")


@dataclass(frozen=True)
class ReadyNode:
    """Hold a node that can be run.

    Args:
        node: the node.
        kernel: its kernel, owned by the session.
        plugin: who made it.
    """

    node: Node
    kernel: Kernel[Any]
    plugin: str

    def graph_resources(self) -> Sequence[GraphResource]:
        """Return the kernel's answer. Raises PluginError where it raises what is not nxrt's."""
        return self._asked(self.kernel.graph_resources)

    def capture_support(self, inputs: Sequence[TensorSpec | None]) -> CaptureSupport:
        """Return the kernel's answer. Raises PluginError where it raises what is not nxrt's."""
        return self._asked(self.kernel.capture_support, inputs)

    def _asked(self, question: Callable[..., _T], *args: object) -> _T:
        try:
            return question(*args)
        except NxrtError:
            raise
        except Exception as error:
            action = f"{question.__name__} of {self.node.name!r}"
            raise PluginError(self.plugin, action, repr(error)) from error
