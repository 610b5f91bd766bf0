"""The small model description that providers claim from: nodes, their attributes, a graph.

It says what is computed, never where or how; it holds no weights and no memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from nxrt.errors import InvalidInputError
from nxrt.tensor import TensorSpec

AttributeValue = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]


def normalized_domain(domain: str) -> str:
    """Return the one spelling of an operator domain: "ai.onnx" and "" are the same."""
    return "" if domain == "ai.onnx" else domain


@dataclass(frozen=True)
class Node:
    """Apply one operator to named values.

    Args:
        op: the operator, such as "DsaIndexSelect".
        inputs: value names in slot order; None or "" is an omitted optional input.
        outputs: value names in slot order.
        domain: the operator's domain, such as "pkg.nxrt".
        attributes: by name; lists are stored as tuples.
        name: for messages and reports; `op` when left out.
    """

    op: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    domain: str = ""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.op, str) or not self.op:
            raise InvalidInputError("node op", found=repr(self.op), accepted="an operator's name")
        object.__setattr__(self, "domain", normalized_domain(self.domain))
        for slot in ("inputs", "outputs"):
            names = getattr(self, slot)
            if isinstance(names, str):
                raise InvalidInputError(
                    f"node {slot}", found=repr(names), accepted="a tuple of names"
                )
        object.__setattr__(self, "inputs", tuple(name or None for name in self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        object.__setattr__(self, "name", self.name or self.op)
        frozen = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in self.attributes.items()
        }
        object.__setattr__(self, "attributes", MappingProxyType(frozen))

    @property
    def qualified_op(self) -> str:
        """Return "domain::op", the way an operator is spoken of in messages."""
        return f"{self.domain or 'ai.onnx'}::{self.op}"


@dataclass(frozen=True)
class Graph:
    """Connect nodes, in an order in which they can be executed.

    Args:
        nodes: each may read graph inputs and outputs of earlier nodes.
        inputs: specs by name; the same symbol in two specs is the same size.
        outputs: names of values that the caller reads.
        opset_imports: version by domain, at least 1; a domain not listed counts as version 1.

    Raises:
        InvalidInputError: a name is defined twice, or read before it is defined, an output is
            nobody's, or a version is not a positive integer.
    """

    nodes: tuple[Node, ...]
    inputs: Mapping[str, TensorSpec]
    outputs: tuple[str, ...]
    opset_imports: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.nodes, Node) or isinstance(self.outputs, str):
            raise InvalidInputError("graph", found="one node or name", accepted="tuples of them")
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "inputs", MappingProxyType(dict(self.inputs)))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        imports = {normalized_domain(key): value for key, value in self.opset_imports.items()}
        if len(imports) != len(self.opset_imports):
            raise InvalidInputError(
                "opset import of ai.onnx", found='both "" and "ai.onnx"', accepted="one of them"
            )
        object.__setattr__(self, "opset_imports", MappingProxyType(imports))
        for domain, version in imports.items():
            if not isinstance(version, int) or isinstance(version, bool) or version < 1:
                raise InvalidInputError(
                    f"opset import of {domain or 'ai.onnx'}",
                    found=repr(version),
                    accepted="a version from 1",
                )
        _check_names(self.nodes, self.inputs, self.outputs)

    def opset_version(self, domain: str) -> int:
        """Return the imported version of a domain."""
        return self.opset_imports.get(normalized_domain(domain), 1)


def _check_names(
    nodes: Sequence[Node], inputs: Mapping[str, TensorSpec], outputs: Sequence[str]
) -> None:
    defined = set(inputs)
    for node in nodes:
        for name in node.inputs:
            if name is not None and name not in defined:
                raise InvalidInputError(
                    f"input {name!r} of node {node.name!r}",
                    found="a name nobody has defined yet",
                    accepted="a graph input or an output of an earlier node",
                )
        for name in node.outputs:
            if name in defined:
                raise InvalidInputError(
                    f"output {name!r} of node {node.name!r}",
                    found="a name that is taken",
                    accepted="a name defined once",
                )
            defined.add(name)
    for name in outputs:
        if name not in defined:
            raise InvalidInputError(
                f"graph output {name!r}", found="a name nobody defines", accepted="a node's output"
            )
