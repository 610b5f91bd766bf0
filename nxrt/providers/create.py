"""Turn a claim into a kernel, and a plug-in's stray exception into a typed one."""

from collections.abc import Sequence
from typing import Any

from nxrt.errors import NxrtError, PluginError
from nxrt.graph import Node
from nxrt.kernels.api import Kernel
from nxrt.kernels.registry import Claim
from nxrt.tensor import TensorSpec


def created(
    claim: Claim, node: Node, inputs: Sequence[TensorSpec | None], context: object
) -> Kernel[Any]:
    """Return the kernel that the claiming factory creates.

    Raises:
        PluginError: the factory raised something that is not nxrt's own, or returned no kernel.
        NxrtError: as the factory raised it.
    """
    assert claim.factory is not None  # the session creates what was claimed
    action = f"create of {node.name!r}"
    try:
        kernel = claim.factory.create(node, inputs, context)
    except NxrtError:
        raise
    except Exception as error:
        raise PluginError(claim.plugin, action, repr(error)) from error
    if not isinstance(kernel, Kernel):
        raise PluginError(claim.plugin, action, f"it returned {kernel!r}, not a Kernel")
    return kernel
