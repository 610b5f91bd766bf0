"""How a model package says which ports carry compressed state from one step to the next.

Models of the package's metadata, and how they meet a graph's ports. A package that is malformed
raises; one that is well-formed but cannot be honoured gets a refusal, which is a value. No state
is held here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic import ValidationError as PydanticError

from nxrt.errors import InvalidInputError
from nxrt.memory.state_descriptor import CacheFormat
from nxrt.tensor import DType

SourceT = TypeVar("SourceT")
_SHOWN_PORTS = 8


class AbiRefusalKind(Enum):
    """Name why a state group's ports are refused; the last five need the graph."""

    UNKNOWN_MTP_RECURRENCE = "unknown_mtp_recurrence"
    FP4_NOT_KV_CACHE_FORMAT = "fp4_not_kv_cache_format"
    EMPTY_PORT = "empty_port"
    DUPLICATE_STATE_EDGE = "duplicate_state_edge"
    PORT_COLLISION = "port_collision"
    UNEXPECTED_INDEX_EDGE = "unexpected_index_edge"
    MISSING_STATE_EDGE = "missing_state_edge"
    PORT_OVERLAP = "port_overlap"
    MISSING_PAST_INPUT = "missing_past_input"
    MISSING_PRESENT_OUTPUT = "missing_present_output"
    PAST_DTYPE = "past_dtype"
    PRESENT_DTYPE = "present_dtype"


@dataclass(frozen=True, slots=True)
class AbiRefusal:
    """Say no to a state group's ports.

    Args:
        kind: which rule.
        reason: what came, what is accepted, what to do.
    """

    kind: AbiRefusalKind
    reason: str

    def __str__(self) -> str:
        return self.reason


class StateRole(Enum):
    """Name what an edge carries; the order of the members is the canonical order of edges."""

    COMPRESSED_KV = "compressed_kv"
    COMPRESSION_CARRY = "compression_carry"
    INDEX_KEY = "index_key"
    INDEX_CARRY = "index_carry"


class StateRatio(Enum):
    """Name how many tokens one record stands for."""

    RATIO4 = "ratio4"
    RATIO128 = "ratio128"

    @property
    def roles(self) -> tuple[StateRole, ...]:
        """Return the roles whose edges this ratio must have, in canonical order."""
        return tuple(StateRole) if self is StateRatio.RATIO4 else tuple(StateRole)[:2]


class Recurrence(Enum):
    """Name how state moves from step to step; only the standard one is defined."""

    STANDARD = "standard"
    MULTI_TOKEN_PREDICTION = "multi_token_prediction"


class StateEdge(BaseModel):
    """Connect an output of one step to an input of the next: the port names, and the role."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: StateRole
    past_port: str
    present_port: str

    @property
    def ports(self) -> tuple[str, str]:
        """Return the past port, then the present port."""
        return self.past_port, self.present_port


class StateGroupAbi(BaseModel):
    """Describe one state group of a package: its format, and its edges in any order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ratio: StateRatio
    cache_format: CacheFormat
    recurrence: Recurrence = Recurrence.STANDARD
    edges: tuple[StateEdge, ...]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "StateGroupAbi":
        """Return the description that parsed metadata holds.

        Raises:
            InvalidInputError: a key is unknown, missing or of the wrong type; `subject` names it.
        """
        return _parsed(cls.model_validate, values)

    @classmethod
    def of_json(cls, text: str | bytes) -> "StateGroupAbi":
        """Return the description that a JSON object holds. Raises as `of`."""
        return _parsed(cls.model_validate_json, text)

    def refusal(self) -> AbiRefusal | None:
        """Return the first reason against this group alone, None where there is none."""
        return next(self._refusals(), None)

    def present_past_edges(self) -> tuple[StateEdge, ...]:
        """Return the edges in canonical order, whatever order they were declared in."""
        canonical = list(StateRole)
        return tuple(sorted(self.edges, key=lambda edge: canonical.index(edge.role)))

    def dtype(self, role: StateRole) -> DType:
        """Return the element type of both ports of a role."""
        if role is StateRole.INDEX_KEY:
            return DType.U8
        if role is StateRole.COMPRESSED_KV and self.cache_format is not CacheFormat.F32:
            return DType.U8
        return DType.F32

    def _refusals(self) -> Iterator[AbiRefusal]:
        """Yield every reason against this group; the order is part of the contract."""
        if self.recurrence is not Recurrence.STANDARD:
            reason = (
                f"recurrence: got {self.recurrence.value!r}; accepted:"
                f" {Recurrence.STANDARD.value!r}; leave prediction layers out of the package"
            )
            yield AbiRefusal(AbiRefusalKind.UNKNOWN_MTP_RECURRENCE, reason)
        if self.cache_format is CacheFormat.FP4:
            reason = (
                f"cache_format: got {self.cache_format.value!r}; accepted:"
                f" {CacheFormat.F32.value!r} or {CacheFormat.FP8.value!r}; FP4 is for index"
                " records, which need no declaration"
            )
            yield AbiRefusal(AbiRefusalKind.FP4_NOT_KV_CACHE_FORMAT, reason)
        roles: set[StateRole] = set()
        ports: set[str] = set()
        for edge in self.edges:
            yield from _edge_refusals(edge, roles, ports)
            roles.add(edge.role)
            ports.update(edge.ports)
        yield from _role_refusals(self.ratio, roles)


def _edge_refusals(
    edge: StateEdge, roles: AbstractSet[StateRole], ports: AbstractSet[str]
) -> Iterator[AbiRefusal]:
    """Yield what is wrong with an edge, given the roles and ports of those before it."""
    role = edge.role.value
    for side, port in zip(("past_port", "present_port"), edge.ports, strict=True):
        if not port:
            reason = f"{side} of {role}: got an empty name; accepted: a port's name; write it"
            yield AbiRefusal(AbiRefusalKind.EMPTY_PORT, reason)
    if edge.role in roles:
        reason = f"edges: got a second {role}; accepted: one edge for each role; remove one"
        yield AbiRefusal(AbiRefusalKind.DUPLICATE_STATE_EDGE, reason)
    for port, taken in ((edge.past_port, ports), (edge.present_port, {*ports, edge.past_port})):
        if port in taken:
            reason = (
                f"edge {role}: got port {port!r}, which another end has; accepted: a port of its"
                " own for each end of each edge; rename one"
            )
            yield AbiRefusal(AbiRefusalKind.PORT_COLLISION, reason)


def _role_refusals(ratio: StateRatio, declared: AbstractSet[StateRole]) -> Iterator[AbiRefusal]:
    accepted = ", ".join(role.value for role in ratio.roles)
    for role in StateRole:
        if role in declared and role not in ratio.roles:
            reason = (
                f"edges: got {role.value} with {ratio.value}; accepted: {accepted}; remove the edge"
            )
            yield AbiRefusal(AbiRefusalKind.UNEXPECTED_INDEX_EDGE, reason)
    for role in ratio.roles:
        if role not in declared:
            reason = (
                f"edges: got no {role.value} with {ratio.value}; accepted: {accepted};"
                " declare the edge"
            )
            yield AbiRefusal(AbiRefusalKind.MISSING_STATE_EDGE, reason)


def resolve_state_edges(
    abi: StateGroupAbi,
    *,
    inputs: Mapping[str, DType],
    outputs: Mapping[str, DType],
    occupied: frozenset[str],
) -> tuple[StateEdge, ...] | AbiRefusal:
    """Find the edges of one group in a graph.

    Args:
        abi: the group; what it refuses by itself comes first.
        inputs: element types of the graph's inputs, by name.
        outputs: element types of the graph's outputs, by name.
        occupied: ports that somebody else has claimed.

    Returns:
        the edges in canonical order, or the first reason against them.
    """
    refusal = abi.refusal()
    if refusal is None:
        refusal = next(_graph_refusals(abi, inputs, outputs, occupied), None)
    return abi.present_past_edges() if refusal is None else refusal


def resolve_state_groups(
    abis: Iterable[StateGroupAbi],
    *,
    inputs: Mapping[str, DType],
    outputs: Mapping[str, DType],
    occupied: frozenset[str] = frozenset(),
) -> tuple[tuple[StateEdge, ...], ...] | AbiRefusal:
    """Find the edges of several groups, none of which may claim a port of another.

    Args:
        abis: the groups; an earlier one claims its ports first.
        inputs, outputs, occupied: as for `resolve_state_edges`.

    Returns:
        the edges of each group in the order given, or the first reason against a group.
    """
    groups: list[tuple[StateEdge, ...]] = []
    for index, abi in enumerate(abis):
        edges = resolve_state_edges(abi, inputs=inputs, outputs=outputs, occupied=occupied)
        if isinstance(edges, AbiRefusal):
            return AbiRefusal(edges.kind, f"state group {index}: {edges.reason}")
        groups.append(edges)
        occupied = occupied.union(*(edge.ports for edge in edges))
    return tuple(groups)


def _graph_refusals(
    abi: StateGroupAbi,
    inputs: Mapping[str, DType],
    outputs: Mapping[str, DType],
    occupied: AbstractSet[str],
) -> Iterator[AbiRefusal]:
    """Yield what a graph has against a group, edge by edge; the order is part of the contract."""
    kinds = AbiRefusalKind
    for edge in abi.present_past_edges():
        past, present, where = edge.past_port, edge.present_port, f"edge {edge.role.value}"
        for port in edge.ports:
            if port in occupied:
                reason = f"got port {port!r}, claimed already; accepted: a port nobody claims"
                yield AbiRefusal(kinds.PORT_OVERLAP, f"{where}: {reason}; name another")
        for kind, port, ports, what in (
            (kinds.MISSING_PAST_INPUT, past, inputs, "input"),
            (kinds.MISSING_PRESENT_OUTPUT, present, outputs, "output"),
        ):
            if port not in ports:
                reason = f"got {port!r}, no {what} of the graph; accepted: {_listed(ports)}"
                yield AbiRefusal(kind, f"{where}: {reason}; correct the name")
        expected = abi.dtype(edge.role)
        for kind, port, dtype in (
            (kinds.PAST_DTYPE, past, inputs.get(past)),
            (kinds.PRESENT_DTYPE, present, outputs.get(present)),
        ):
            if dtype is not expected:
                reason = f"got {dtype} at port {port!r}; accepted: {expected}"
                yield AbiRefusal(kind, f"{where}: {reason}; correct the graph or cache_format")


def _listed(ports: Mapping[str, DType]) -> str:
    shown = ", ".join(sorted(ports)[:_SHOWN_PORTS]) or "nothing, the graph has none"
    left = len(ports) - _SHOWN_PORTS
    return f"{shown} and {left} more" if left > 0 else shown


def _parsed(validate: Callable[[SourceT], StateGroupAbi], source: SourceT) -> StateGroupAbi:
    """Parse; the first complaint becomes one typed error that names the key."""
    try:
        return validate(source)
    except PydanticError as problem:
        first = problem.errors(include_url=False)[0]
        subject = ".".join(["state group", *map(str, first["loc"])])
        found = "nothing" if first["type"] == "missing" else repr(first["input"])
        accepted = first["msg"]
        if first["type"] == "extra_forbidden":
            known = StateEdge if first["loc"][0] == "edges" else StateGroupAbi
            accepted = f"no such key; known: {', '.join(known.model_fields)}"
        raise InvalidInputError(subject, found=found, accepted=accepted) from problem
