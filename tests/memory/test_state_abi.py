"""Check packages' state ports: what parses, every refusal and their order, and meeting a graph."""

import json
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest

from nxrt.errors import InvalidInputError
from nxrt.memory.state_abi import (
    AbiRefusal,
    AbiRefusalKind,
    Recurrence,
    StateEdge,
    StateGroupAbi,
    StateRatio,
    StateRole,
    resolve_state_edges,
    resolve_state_groups,
)
from nxrt.memory.state_descriptor import CacheFormat
from nxrt.tensor import DType

K = AbiRefusalKind
ROLES = ("compressed_kv", "compression_carry", "index_key", "index_carry")
FP8, FP4 = CacheFormat.FP8.value, CacheFormat.FP4.value
DTYPES = {
    "compressed_kv": DType.U8,
    "compression_carry": DType.F32,
    "index_key": DType.U8,
    "index_carry": DType.F32,
}


def edge(role: str, past: str | None = None, present: str | None = None) -> dict[str, str]:
    return {
        "role": role,
        "past_port": f"past.{role}" if past is None else past,
        "present_port": f"present.{role}" if present is None else present,
    }


def abi(ratio: str = "ratio4", **changes: Any) -> StateGroupAbi:
    roles = ROLES if ratio == "ratio4" else ROLES[:2]
    values = {"ratio": ratio, "cache_format": FP8, "edges": [edge(role) for role in roles]}
    return StateGroupAbi.of(values | changes)


def refused(group: StateGroupAbi) -> AbiRefusal:
    refusal = group.refusal()
    assert refusal is not None
    return refusal


def replaced(*changed: dict[str, str]) -> list[dict[str, str]]:
    by_role = {item["role"]: item for item in changed}
    return [by_role.get(role, edge(role)) for role in ROLES]


def test_a_group_is_read_from_json_as_from_parsed_metadata() -> None:
    values = {"ratio": "ratio4", "cache_format": FP8, "edges": [edge(role) for role in ROLES]}
    assert StateGroupAbi.of_json(json.dumps(values)) == StateGroupAbi.of(values)


def test_a_group_holds_what_was_declared() -> None:
    group = abi("ratio128", cache_format="f32")
    assert (group.ratio, group.cache_format) == (StateRatio.RATIO128, CacheFormat.F32)
    assert group.edges[0] == StateEdge(
        role=StateRole.COMPRESSED_KV,
        past_port="past.compressed_kv",
        present_port="present.compressed_kv",
    )


def test_the_recurrence_is_standard_where_none_is_declared() -> None:
    assert abi().recurrence is Recurrence.STANDARD


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"extra": 1}, "state group.extra"),
    ({"ratio": "ratio2"}, "state group.ratio"),
    ({"ratio": 4}, "state group.ratio"),
    ({"cache_format": "fp16"}, "state group.cache_format"),
    ({"recurrence": "mtp"}, "state group.recurrence"),
    ({"edges": 3}, "state group.edges"),
    ({"edges": [edge("kv")]}, "state group.edges.0.role"),
    ({"edges": [edge("index_key") | {"port": "p"}]}, "state group.edges.0.port"),
    ({"edges": [edge("index_key") | {"past_port": 3}]}, "state group.edges.0.past_port"),
    ({"edges": [{"role": "index_key", "past_port": "p"}]}, "state group.edges.0.present_port"),
]


@pytest.mark.parametrize(("change", "subject"), MALFORMED, ids=[name for _, name in MALFORMED])
def test_what_does_not_parse_names_its_key(change: dict[str, Any], subject: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        abi(**change)
    assert caught.value.subject == subject
    assert caught.value.accepted


@pytest.mark.parametrize("key", ["ratio", "cache_format", "edges"])
def test_a_required_key_that_is_missing_is_named(key: str) -> None:
    values: dict[str, Any] = {"ratio": "ratio4", "cache_format": "f32", "edges": []}
    del values[key]
    with pytest.raises(InvalidInputError, match=rf"state group\.{key}: got nothing"):
        StateGroupAbi.of(values)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_text_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="state group"):
        StateGroupAbi.of_json(text)


def test_an_unknown_key_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="known: role, past_port, present_port"):
        abi(edges=[edge("index_key") | {"port": "p"}])


@pytest.mark.parametrize("cache_format", ["f32", FP8])
@pytest.mark.parametrize("ratio", ["ratio4", "ratio128"])
def test_a_complete_group_is_not_refused(ratio: str, cache_format: str) -> None:
    assert abi(ratio, cache_format=cache_format).refusal() is None


# Every change breaks its own rule; the rules stand in the order in which they are looked for.
BROKEN: list[tuple[AbiRefusalKind, dict[str, Any]]] = [
    (K.UNKNOWN_MTP_RECURRENCE, {"recurrence": "multi_token_prediction"}),
    (K.FP4_NOT_KV_CACHE_FORMAT, {"cache_format": FP4}),
    (K.EMPTY_PORT, {"edges": replaced(edge("index_key", past=""))}),
    (K.EMPTY_PORT, {"edges": replaced(edge("index_key", present=""))}),
    (K.DUPLICATE_STATE_EDGE, {"edges": [*replaced(), edge("index_key", "p", "q")]}),
    (K.PORT_COLLISION, {"edges": replaced(edge("index_key", past="present.compressed_kv"))}),
    (K.PORT_COLLISION, {"edges": replaced(edge("index_key", present="past.compressed_kv"))}),
    (K.PORT_COLLISION, {"edges": replaced(edge("index_key", "same", "same"))}),
    (K.UNEXPECTED_INDEX_EDGE, {"ratio": "ratio128", "edges": replaced()}),
    (K.UNEXPECTED_INDEX_EDGE, {"ratio": "ratio128", "edges": replaced()[:3]}),
    (K.MISSING_STATE_EDGE, {"edges": replaced()[1:]}),
    (K.MISSING_STATE_EDGE, {"edges": replaced()[:3]}),
    (K.MISSING_STATE_EDGE, {"edges": []}),
]


@pytest.mark.parametrize(("kind", "change"), BROKEN, ids=[kind.value for kind, _ in BROKEN])
def test_every_broken_rule_is_refused_with_what_is_accepted(
    kind: AbiRefusalKind, change: dict[str, Any]
) -> None:
    refusal = refused(abi(**change))
    assert refusal.kind is kind
    assert "got " in refusal.reason
    assert "accepted: " in refusal.reason
    assert str(refusal) == refusal.reason


@pytest.mark.parametrize(("kind", "change"), BROKEN[1:], ids=[k.value for k, _ in BROKEN[1:]])
def test_the_recurrence_is_judged_before_everything(
    kind: AbiRefusalKind, change: dict[str, Any]
) -> None:
    wrong = abi(**(change | {"recurrence": "multi_token_prediction"}))
    assert refused(wrong).kind is K.UNKNOWN_MTP_RECURRENCE


@pytest.mark.parametrize(("kind", "change"), BROKEN[2:], ids=[k.value for k, _ in BROKEN[2:]])
def test_the_cache_format_is_judged_before_the_edges(
    kind: AbiRefusalKind, change: dict[str, Any]
) -> None:
    assert refused(abi(**(change | {"cache_format": FP4}))).kind is K.FP4_NOT_KV_CACHE_FORMAT


def test_an_edge_is_judged_whole_before_the_next() -> None:
    colliding = edge("compressed_kv", "same", "same")
    edges = [colliding, edge("index_key", past=""), colliding]
    assert refused(abi(edges=edges)).kind is K.PORT_COLLISION


def test_an_empty_port_comes_before_a_role_given_twice() -> None:
    edges = [edge("index_key"), edge("index_key", past="")]
    assert refused(abi(edges=edges)).kind is K.EMPTY_PORT


def test_a_role_given_twice_comes_before_a_port_given_twice() -> None:
    edges = [edge("index_key"), edge("index_key")]
    assert refused(abi(edges=edges)).kind is K.DUPLICATE_STATE_EDGE


def test_the_past_port_is_judged_before_the_present_one() -> None:
    assert "past_port" in refused(abi(edges=[edge("index_key", "", "")])).reason
    both = [edge("compressed_kv", "a", "b"), edge("index_key", "b", "a")]
    assert "'b'" in refused(abi(edges=both)).reason


def test_edges_are_judged_in_the_order_of_their_declaration() -> None:
    edges = [edge("index_carry", past=""), edge("compressed_kv", present="")]
    assert "past_port of index_carry" in refused(abi(edges=edges)).reason


def test_a_port_given_twice_comes_before_an_index_without_one() -> None:
    edges = replaced(edge("index_key", "same", "same"))
    assert refused(abi("ratio128", edges=edges)).kind is K.PORT_COLLISION


def test_an_index_edge_too_many_comes_before_a_missing_one() -> None:
    wrong = abi("ratio128", edges=[edge("index_carry"), edge("index_key")])
    assert refused(wrong).kind is K.UNEXPECTED_INDEX_EDGE


@pytest.mark.parametrize("num_declared", range(4))
def test_the_first_missing_edge_in_canonical_order_is_named(num_declared: int) -> None:
    edges = [edge(role) for role in reversed(ROLES[:num_declared])]
    assert f"got no {ROLES[num_declared]} " in refused(abi(edges=edges)).reason


def test_edges_come_in_canonical_order_however_they_were_declared() -> None:
    for declared in permutations(replaced()):
        group = abi(edges=list(declared))
        assert group.refusal() is None
        assert tuple(item.role.value for item in group.present_past_edges()) == ROLES


def ports(
    side: str, roles: tuple[str, ...] = ROLES, changes: Mapping[str, DType | None] | None = None
) -> dict[str, DType]:
    declared = {role: DTYPES[role] for role in roles} | dict(changes or {})
    return {f"{side}.{role}": dtype for role, dtype in declared.items() if dtype is not None}


def resolved(
    group: StateGroupAbi,
    *,
    past: Mapping[str, DType | None] | None = None,
    present: Mapping[str, DType | None] | None = None,
    occupied: frozenset[str] = frozenset(),
) -> tuple[StateEdge, ...] | AbiRefusal:
    inputs, outputs = ports("past", changes=past), ports("present", changes=present)
    return resolve_state_edges(group, inputs=inputs, outputs=outputs, occupied=occupied)


def kind_of(answer: object) -> AbiRefusalKind:
    assert isinstance(answer, AbiRefusal)
    assert "accepted: " in answer.reason
    return answer.kind


def test_edges_of_a_graph_are_found_in_canonical_order() -> None:
    group = abi(edges=replaced()[::-1])
    assert resolved(group) == group.present_past_edges()


def test_records_in_float32_want_float32_ports() -> None:
    group = abi("ratio128", cache_format="f32")
    assert kind_of(resolved(group)) is K.PAST_DTYPE
    floats = {"compressed_kv": DType.F32}
    assert resolved(group, past=floats, present=floats) == group.edges


# In the order in which one edge is judged.
GRAPH_BROKEN: list[tuple[AbiRefusalKind, dict[str, Any]]] = [
    (K.PORT_OVERLAP, {"occupied": frozenset({"past.index_key"})}),
    (K.PORT_OVERLAP, {"occupied": frozenset({"present.index_key"})}),
    (K.MISSING_PAST_INPUT, {"past": {"index_key": None}}),
    (K.MISSING_PRESENT_OUTPUT, {"present": {"index_key": None}}),
    (K.PAST_DTYPE, {"past": {"index_key": DType.F32}}),
    (K.PRESENT_DTYPE, {"present": {"index_key": DType.I8}}),
]
GRAPH_IDS = [f"{kind.value}-{next(iter(change))}" for kind, change in GRAPH_BROKEN]


@pytest.mark.parametrize(("kind", "change"), GRAPH_BROKEN, ids=GRAPH_IDS)
def test_a_graph_that_does_not_fit_is_refused(kind: AbiRefusalKind, change: dict[str, Any]) -> None:
    assert kind_of(resolved(abi(), **change)) is kind


@pytest.mark.parametrize("first", range(len(GRAPH_BROKEN)), ids=GRAPH_IDS)
def test_of_several_misfits_of_an_edge_the_first_is_given(first: int) -> None:
    kind, change = GRAPH_BROKEN[first]
    for _, later in GRAPH_BROKEN[first + 1 :]:
        assert kind_of(resolved(abi(), **(later | change))) is kind


def test_an_edge_meets_the_graph_whole_before_the_next() -> None:
    """The last check of the first edge comes before the first check of the second."""
    answer = resolved(
        abi(edges=replaced()[::-1]),
        present={"compressed_kv": DType.F32},
        occupied=frozenset({"past.compression_carry"}),
    )
    assert kind_of(answer) is K.PRESENT_DTYPE


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("side", ["past", "present"])
def test_every_role_has_its_element_type(side: str, role: str) -> None:
    wrong = {role: DType.F32 if DTYPES[role] is DType.U8 else DType.U8}
    expected = K.PAST_DTYPE if side == "past" else K.PRESENT_DTYPE
    assert kind_of(resolved(abi(), **{side: wrong})) is expected  # type: ignore[arg-type]


def test_what_a_group_refuses_by_itself_comes_before_the_graph() -> None:
    answer = resolve_state_edges(
        abi(cache_format=FP4), inputs={}, outputs={}, occupied=frozenset({"past.index_key"})
    )
    assert kind_of(answer) is K.FP4_NOT_KV_CACHE_FORMAT


def test_a_refusal_lists_some_ports_of_a_large_graph() -> None:
    inputs = {f"in{index:03}": DType.F32 for index in range(300)}
    answer = resolve_state_edges(abi(), inputs=inputs, outputs={}, occupied=frozenset())
    assert isinstance(answer, AbiRefusal)
    assert "in007 and 292 more" in answer.reason


def layer(index: int, **changes: Any) -> StateGroupAbi:
    edges = [edge(role, f"past.{index}.{role}", f"present.{index}.{role}") for role in ROLES]
    return abi(**({"edges": edges} | changes))


def layer_ports(side: str, num_layers: int) -> dict[str, DType]:
    return {f"{side}.{index}.{role}": DTYPES[role] for index in range(num_layers) for role in ROLES}


def resolved_groups(
    *groups: StateGroupAbi, occupied: frozenset[str] = frozenset()
) -> tuple[tuple[StateEdge, ...], ...] | AbiRefusal:
    inputs, outputs = layer_ports("past", 3), layer_ports("present", 3)
    return resolve_state_groups(groups, inputs=inputs, outputs=outputs, occupied=occupied)


def test_groups_are_found_in_the_order_given() -> None:
    assert resolved_groups(layer(2), layer(0)) == (layer(2).edges, layer(0).edges)


def test_no_groups_are_no_edges() -> None:
    assert resolved_groups() == ()


def test_a_group_may_not_claim_a_port_of_an_earlier_one() -> None:
    answer = resolved_groups(layer(0), layer(1), layer(0))
    assert kind_of(answer) is K.PORT_OVERLAP
    assert "state group 2: edge compressed_kv: got port 'past.0.compressed_kv'" in str(answer)


def test_a_group_may_not_claim_a_port_that_was_occupied_before() -> None:
    answer = resolved_groups(layer(0), occupied=frozenset({"present.0.index_carry"}))
    assert kind_of(answer) is K.PORT_OVERLAP


def test_the_first_group_that_is_refused_is_named() -> None:
    answer = resolved_groups(layer(0), layer(1, cache_format=FP4), layer(0))
    assert kind_of(answer) is K.FP4_NOT_KV_CACHE_FORMAT
    assert str(answer).startswith("state group 1: ")
