"""Choose the provider of a graph: the first that claims every node.

Specs of later values come from the claims of earlier nodes; no kernel is created here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nxrt.errors import InvalidInputError, UnsupportedGraphError
from nxrt.graph import Graph, Node
from nxrt.kernels.registry import Claim
from nxrt.providers.base import ExecutionProvider
from nxrt.tensor import MAX_SIZE, TensorSpec


@dataclass(frozen=True)
class Placement:
    """Report who serves a node: the provider, the plug-in, and the operator version chosen."""

    node: str
    provider: str
    plugin: str
    op: str


@dataclass(frozen=True)
class PlacedGraph:
    """A graph of which one provider has claimed every node."""

    provider: ExecutionProvider
    claims: list[tuple[Node, Claim]]
    specs: dict[str, TensorSpec]

    def placements(self) -> tuple[Placement, ...]:
        """Say who serves each node."""
        return tuple(
            Placement(node.name, self.provider.name, claim.plugin, str(claim.key))
            for node, claim in self.claims
        )


def placed_graph(graph: Graph, providers: Sequence[ExecutionProvider]) -> PlacedGraph:
    """Return the graph as the first provider takes it that takes all of its nodes.

    Raises:
        UnsupportedGraphError: there is none; says who declined what and why.
        PluginError: a plug-in broke its contract.
        InvalidInputError: there are no providers.
    """
    if isinstance(providers, ExecutionProvider) or not all(
        isinstance(provider, ExecutionProvider) for provider in providers
    ):
        accepted = "a sequence of providers"
        raise InvalidInputError("providers", found=repr(providers), accepted=accepted)
    if not providers:
        raise InvalidInputError("providers", found="none", accepted="at least one")
    declines: list[str] = []
    for provider in providers:
        placed = _claim_all(graph, provider, declines)
        if placed is not None:
            return placed
    raise UnsupportedGraphError(declines)


def _claim_all(
    graph: Graph, provider: ExecutionProvider, declines: list[str]
) -> PlacedGraph | None:
    """Ask a provider for every node; specs of later inputs come from earlier answers."""
    specs = dict(graph.inputs)
    claims: list[tuple[Node, Claim]] = []
    for node in graph.nodes:
        if any(name is not None and name not in specs for name in node.inputs):
            continue  # an earlier decline left its inputs unknown
        inputs = [None if name is None else specs[name] for name in node.inputs]
        version = graph.opset_version(node.domain)
        claim = provider.claim(node, inputs, opset_version=version)
        if not claim.match.is_supported:
            declines.append(f"{provider.name} declines {node.name!r}: {claim.match.reason}")
            continue
        claims.append((node, claim))
        specs.update(zip(node.outputs, claim.match.outputs, strict=True))
    return PlacedGraph(provider, claims, specs) if len(claims) == len(graph.nodes) else None


def check_dims(dims: Mapping[str, int], symbols: set[str]) -> None:
    """Raise InvalidInputError unless every symbol has a size, and nothing else has."""
    for symbol in sorted(symbols - dims.keys()):
        raise InvalidInputError(f"dims[{symbol!r}]", found="nothing", accepted="a size")
    for name, size in dims.items():
        if name not in symbols:
            accepted = ", ".join(sorted(symbols)) or "none: all sizes are known"
            raise InvalidInputError("dims", found=repr(name), accepted=accepted)
        is_integer = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if not is_integer or not 0 <= size <= MAX_SIZE:
            accepted = f"an integer from 0 to {MAX_SIZE}"
            raise InvalidInputError(f"dims[{name!r}]", found=repr(size), accepted=accepted)
