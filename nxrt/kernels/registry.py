"""Who serves which operator: explicit tables, validated whole, replaced only on explicit wish.

It decides nothing about devices or placement; each provider has a registry of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nxrt.errors import PluginError, RegistrationError
from nxrt.graph import Node
from nxrt.kernels.api import KernelFactory, KernelMatch, OpKey
from nxrt.locks import new_lock
from nxrt.tensor import TensorSpec


@dataclass(frozen=True)
class KernelPlugin:
    """List the kernels that one package brings for one provider.

    Args:
        name: unique in a registry; shown in every message about its kernels.
        kernels: the table.
        origin: where it comes from, such as a distribution and version.
    """

    name: str
    kernels: tuple[tuple[OpKey, KernelFactory[Any]], ...]
    origin: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.kernels, list):
            object.__setattr__(self, "kernels", tuple(self.kernels))


@dataclass(frozen=True)
class Claim:
    """Report what became of a node: who was asked, and the answer.

    Args:
        match: the answer.
        plugin: the plug-in's name, empty where nobody serves the operator.
        key: the version that was chosen, None likewise.
        factory: creates the kernel, None likewise.
    """

    match: KernelMatch
    plugin: str = ""
    key: OpKey | None = None
    factory: KernelFactory[Any] | None = None


class KernelRegistry:
    """Hold the plug-ins of one provider; safe to use from any thread.

    The plug-in registered last serves an operator that several have, and unregistering it brings
    back the one before.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._plugins: dict[str, KernelPlugin] = {}

    def register(self, plugin: KernelPlugin, *, replace: bool = False) -> None:
        """Add a plug-in; registering the same one twice is harmless.

        Args:
            plugin: checked whole before anything changes.
            replace: allow it to take operators over from plug-ins that are registered.

        Raises:
            RegistrationError: with every problem; nothing has changed.
        """
        with self._lock:
            problems = _problems(plugin)
            if not problems and self._plugins.get(plugin.name) == plugin:
                return
            problems = problems or self._conflicts(plugin, replace)
            if problems:
                raise RegistrationError(str(getattr(plugin, "name", plugin)), problems)
            self._plugins[plugin.name] = plugin

    def unregister(self, name: str) -> None:
        """Remove a plug-in. Raises RegistrationError where there is none of that name."""
        with self._lock:
            if name not in self._plugins:
                known = ", ".join(self._plugins) or "none"
                raise RegistrationError(name, [f"it is not registered; registered: {known}"])
            del self._plugins[name]

    def plugins(self) -> tuple[KernelPlugin, ...]:
        """Return the registered plug-ins, oldest first."""
        with self._lock:
            return tuple(self._plugins.values())

    def serving(self) -> dict[OpKey, tuple[str, KernelFactory[Any]]]:
        """Return for every operator version the plug-in that serves it, and its factory."""
        return {
            key: (plugin.name, factory)
            for plugin in self.plugins()
            for key, factory in plugin.kernels
        }

    def claim(
        self, node: Node, inputs: Sequence[TensorSpec | None], *, opset_version: int
    ) -> Claim:
        """Ask whoever serves the node's operator at the imported version.

        The greatest since_version that is not above `opset_version` is asked, and no other.

        Raises:
            PluginError: the factory raised, which its contract forbids.
        """
        serving = self.serving()
        versions = [k for k in serving if (k.domain, k.op) == (node.domain, node.op)]
        eligible = [key for key in versions if key.since_version <= opset_version]
        if not eligible:
            return Claim(KernelMatch.declined(_unserved(node, versions, opset_version, serving)))
        key = max(eligible, key=lambda candidate: candidate.since_version)
        plugin, factory = serving[key]
        try:
            match = factory.claim(node, inputs)
        except Exception as error:
            raise PluginError(plugin, f"claim of {node.name!r}", repr(error)) from error
        if not isinstance(match, KernelMatch):
            raise PluginError(
                plugin, f"claim of {node.name!r}", f"it returned {match!r}, not a KernelMatch"
            )
        if match.is_supported and len(match.outputs) != len(node.outputs):
            raise PluginError(
                plugin,
                f"claim of {node.name!r}",
                f"it described {len(match.outputs)} outputs of {len(node.outputs)}",
            )
        if not all(isinstance(spec, TensorSpec) for spec in match.outputs):
            found = f"its outputs are {match.outputs!r}, not TensorSpecs"
            raise PluginError(plugin, f"claim of {node.name!r}", found)
        return Claim(match, plugin, key, factory)

    def _conflicts(self, plugin: KernelPlugin, replace: bool) -> list[str]:
        same_name = self._plugins.get(plugin.name)
        if same_name is not None:
            origins = f"{same_name.origin or 'unknown'} and {plugin.origin or 'unknown'}"
            remedy = f"rename one, or unregister({plugin.name!r}) first"
            return [f"another plug-in has this name (origins: {origins}); {remedy}"]
        if replace:
            return []
        return [
            f"{key} of {plugin.origin or 'unknown origin'} is served by {other.name!r}"
            f" of {other.origin or 'unknown origin'};"
            " pass replace=True to take it over"
            for other in self._plugins.values()
            for key, _ in other.kernels
            if key in {mine for mine, _ in plugin.kernels}
        ]


def _problems(plugin: object) -> list[str]:
    """Return what is wrong with a plug-in by itself."""
    if not isinstance(plugin, KernelPlugin):
        return [f"got {type(plugin).__name__}; accepted: a KernelPlugin"]
    problems = []
    if not isinstance(plugin.name, str) or not plugin.name:
        problems.append(f"its name is {plugin.name!r}; accepted: a non-empty string")
    if not plugin.kernels:
        return [*problems, "it lists no kernels"]
    if not isinstance(plugin.kernels, tuple):
        return [*problems, f"its kernels are {plugin.kernels!r}; accepted: a tuple"]
    seen: set[OpKey] = set()
    for entry in plugin.kernels:
        problems += _entry_problems(entry, seen)
    return problems


def _entry_problems(entry: object, seen: set[OpKey]) -> list[str]:
    if not isinstance(entry, tuple) or len(entry) != 2:
        return [f"entry {entry!r} is not (OpKey, KernelFactory)"]
    key, factory = entry
    if not isinstance(key, OpKey):
        return [f"{key!r} is not an OpKey"]
    problems = [] if key not in seen else [f"it lists {key} twice"]
    seen.add(key)
    if not isinstance(factory, KernelFactory):
        problems.append(f"the factory of {key} is a {type(factory).__name__}, not a KernelFactory")
    return problems


def _unserved(
    node: Node,
    versions: Sequence[OpKey],
    opset_version: int,
    serving: dict[OpKey, tuple[str, KernelFactory[Any]]],
) -> str:
    if versions:
        earliest = min(key.since_version for key in versions)
        return (
            f"{node.qualified_op} is registered since version {earliest} and the graph imports"
            f" version {opset_version}; import {earliest} or later"
        )
    known = ", ".join(sorted({f"{key.domain or 'ai.onnx'}::{key.op}" for key in serving}))
    return f"{node.qualified_op} is not registered; registered: {known or 'nothing'}"
