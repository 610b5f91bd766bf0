"""What a node declares of its state, every refusal, and the order in which they are given."""

from dataclasses import replace
from typing import Any

import pytest

from nxrt.errors import InvalidInputError
from nxrt.graph import Node
from nxrt.memory.state_descriptor import (
    CacheFormat,
    RefusalKind,
    StateGroupDescriptor,
    StateGroupRefusal,
)

K = RefusalKind
RATIO_4 = StateGroupDescriptor(4, CacheFormat.FP8, 64, 512, 64, 128, 0, 1, 7, True, True)
RATIO_128 = replace(RATIO_4, ratio=128, cache_format=CacheFormat.F32, index_head_dim=0)

# In the order in which they are checked.
REFUSALS: list[tuple[RefusalKind, StateGroupDescriptor, dict[str, Any]]] = [
    (K.UNSUPPORTED_RATIO, RATIO_4, {"ratio": 2}),
    (K.INVALID_HEAD_GEOMETRY, RATIO_4, {"head_dim": 0, "qk_rope_head_dim": 0}),
    (K.INVALID_HEAD_GEOMETRY, RATIO_4, {"num_heads": 0}),
    (K.ROPE_EXCEEDS_HEAD_DIM, RATIO_4, {"qk_rope_head_dim": 513}),
    (K.MULTI_DEVICE_AMBIGUITY, RATIO_4, {"device_count": 2}),
    (K.MULTI_DEVICE_AMBIGUITY, RATIO_4, {"device_count": 0}),
    (K.MISSING_STATE_EDGE, RATIO_4, {"has_compressed_state": False}),
    (K.MISSING_STATE_EDGE, RATIO_4, {"has_carry_state": False}),
    (K.RATIO4_REQUIRES_FP8_CACHE, RATIO_4, {"cache_format": CacheFormat.F32}),
    (K.RATIO4_REQUIRES_FP8_CACHE, RATIO_4, {"cache_format": CacheFormat.FP4}),
    (K.RATIO4_REQUIRES_INDEX_HEAD_DIM_128, RATIO_4, {"index_head_dim": 64}),
    (K.RATIO128_REJECTS_FP4, RATIO_128, {"cache_format": CacheFormat.FP4}),
]
IDS = [f"{kind.value}-{next(iter(change))}" for kind, _, change in REFUSALS]


@pytest.mark.parametrize(("kind", "base", "change"), REFUSALS, ids=IDS)
def test_every_rule_refuses_by_itself(
    kind: RefusalKind, base: StateGroupDescriptor, change: dict[str, Any]
) -> None:
    refusal = replace(base, **change).refusal()
    assert refusal is not None
    assert refusal.kind is kind
    assert "accepted" in refusal.reason


@pytest.mark.parametrize("first", range(len(REFUSALS) - 1))
def test_of_two_broken_rules_the_earlier_is_given(first: int) -> None:
    kind, base, change = REFUSALS[first]
    for _, other_base, other_change in REFUSALS[first + 1 :]:
        if base == other_base and not set(change) & set(other_change):
            refusal = replace(base, **(other_change | change)).refusal()
            assert refusal is not None
            assert refusal.kind is kind


@pytest.mark.parametrize(
    "descriptor",
    [RATIO_4, RATIO_128, replace(RATIO_128, cache_format=CacheFormat.FP8)],
    ids=["ratio 4", "ratio 128 f32", "ratio 128 fp8"],
)
def test_what_the_contract_admits_is_not_refused(descriptor: StateGroupDescriptor) -> None:
    assert descriptor.refusal() is None


def test_the_missing_edge_is_named_records_first() -> None:
    neither = replace(RATIO_4, has_compressed_state=False, has_carry_state=False)
    refusal = neither.refusal()
    assert refusal is not None
    assert "past_compressed_kv" in refusal.reason


def node(inputs: int = 19, **attributes: Any) -> Node:
    declared: dict[str, Any] = {
        "compression_ratio": 4,
        "num_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "cache_format": "fp8_e4m3_block64",
    } | attributes
    kept = {name: value for name, value in declared.items() if value is not None}
    names = tuple(f"i{slot}" for slot in range(inputs))
    return Node("CompressedSparseAttention", names, ("y",), "pkg.nxrt", kept)


def described(source: Node) -> StateGroupDescriptor:
    descriptor = StateGroupDescriptor.of_node(source, device_ordinal=0, request_id=7)
    assert isinstance(descriptor, StateGroupDescriptor)
    return descriptor


def test_a_node_is_read_as_it_declares() -> None:
    assert described(node()) == RATIO_4
    assert described(node()).charge_key == (7, 0)


def test_the_format_is_f32_where_none_is_declared() -> None:
    assert described(node(cache_format=None)).cache_format is CacheFormat.F32


@pytest.mark.parametrize("declared", ["fp16", "", 3, ("f32",)])
def test_an_unknown_format_is_refused_before_all_else(declared: Any) -> None:
    wrong = node(inputs=1, compression_ratio=3, cache_format=declared)
    refusal = StateGroupDescriptor.of_node(wrong, device_ordinal=0, request_id=0, device_count=3)
    assert isinstance(refusal, StateGroupRefusal)
    assert refusal.kind is K.UNKNOWN_CACHE_FORMAT


@pytest.mark.parametrize("value", [None, -4, 4.0, "4", True])
def test_a_number_that_is_none_reads_as_zero(value: Any) -> None:
    descriptor = described(node(compression_ratio=value))
    assert descriptor.ratio == 0
    refusal = descriptor.refusal()
    assert refusal is not None
    assert refusal.kind is K.UNSUPPORTED_RATIO


@pytest.mark.parametrize(
    ("inputs", "wired"), [(6, (False, False)), (7, (True, False)), (8, (True, True))]
)
def test_state_is_wired_where_its_input_is(inputs: int, wired: tuple[bool, bool]) -> None:
    descriptor = described(node(inputs))
    assert (descriptor.has_compressed_state, descriptor.has_carry_state) == wired


# All rules of a ratio broken at once, with the repair of each in the order of the checks.
REPAIRS: list[tuple[RefusalKind, dict[str, Any]]] = [
    (K.INVALID_HEAD_GEOMETRY, {"num_heads": 1, "head_dim": 64}),
    (K.ROPE_EXCEEDS_HEAD_DIM, {"qk_rope_head_dim": 64}),
    (K.MULTI_DEVICE_AMBIGUITY, {"device_count": 1}),
    (K.MISSING_STATE_EDGE, {"has_compressed_state": True}),
    (K.MISSING_STATE_EDGE, {"has_carry_state": True}),
]
ALL_BROKEN = StateGroupDescriptor(2, CacheFormat.FP4, 0, 0, 513, 64, 0, 2, 0, False, False)
FORMAT_REPAIRS: dict[int, list[tuple[RefusalKind, dict[str, Any]]]] = {
    4: [
        (K.RATIO4_REQUIRES_FP8_CACHE, {"cache_format": CacheFormat.FP8}),
        (K.RATIO4_REQUIRES_INDEX_HEAD_DIM_128, {"index_head_dim": 128}),
    ],
    128: [(K.RATIO128_REJECTS_FP4, {"cache_format": CacheFormat.F32})],
}


@pytest.mark.parametrize("ratio", [4, 128])
def test_repairing_rule_after_rule_meets_the_refusals_in_their_order(ratio: int) -> None:
    descriptor = ALL_BROKEN
    repairs = [(K.UNSUPPORTED_RATIO, {"ratio": ratio}), *REPAIRS, *FORMAT_REPAIRS[ratio]]
    for kind, repair in repairs:
        refusal = descriptor.refusal()
        assert refusal is not None
        assert refusal.kind is kind
        descriptor = replace(descriptor, **repair)
    assert descriptor.refusal() is None


@pytest.mark.parametrize(("kind", "base", "change"), REFUSALS, ids=IDS)
def test_a_reason_says_what_came_what_is_accepted_and_what_to_do(
    kind: RefusalKind, base: StateGroupDescriptor, change: dict[str, Any]
) -> None:
    refusal = replace(base, **change).refusal()
    assert refusal is not None
    came, accepted, *to_do = str(refusal).split("; ")
    assert ": got " in came
    assert accepted.startswith("accepted: ")
    assert to_do


@pytest.mark.parametrize("change", [{"num_heads": -1}, {"head_dim": -1}, {"qk_rope_head_dim": -1}])
def test_negative_head_geometry_is_invalid(change: dict[str, Any]) -> None:
    refusal = replace(RATIO_4, **change).refusal()
    assert refusal is not None
    assert refusal.kind is K.INVALID_HEAD_GEOMETRY


def test_a_head_may_be_rotated_whole() -> None:
    assert replace(RATIO_4, qk_rope_head_dim=512).refusal() is None


def test_the_missing_carry_is_named_where_the_records_are_wired() -> None:
    refusal = replace(RATIO_4, has_carry_state=False).refusal()
    assert refusal is not None
    assert "past_compression_carry" in refusal.reason


@pytest.mark.parametrize("omitted", [None, ""])
def test_an_omitted_input_is_not_wired(omitted: str | None) -> None:
    inputs = ("q", "kv", "c", "g", "a", "n", omitted, "carry")
    descriptor = described(Node("CompressedSparseAttention", inputs, ("y",), "pkg.nxrt"))
    assert (descriptor.has_compressed_state, descriptor.has_carry_state) == (False, True)


@pytest.mark.parametrize("cache_format", list(CacheFormat))
def test_every_known_format_is_read(cache_format: CacheFormat) -> None:
    assert described(node(cache_format=cache_format.value)).cache_format is cache_format


def test_a_node_that_declares_nothing_is_described_and_then_refused() -> None:
    descriptor = described(Node("CompressedSparseAttention", (), ("y",)))
    numbers = (descriptor.ratio, descriptor.num_heads, descriptor.head_dim)
    assert numbers == (0, 0, 0)
    assert (descriptor.qk_rope_head_dim, descriptor.index_head_dim) == (0, 0)
    assert descriptor.refusal() is not None


def test_the_number_of_devices_is_kept_for_the_refusal() -> None:
    descriptor = StateGroupDescriptor.of_node(
        node(), device_ordinal=1, request_id=2, device_count=2
    )
    assert isinstance(descriptor, StateGroupDescriptor)
    assert (descriptor.device_count, descriptor.charge_key) == (2, (2, 1))


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"device_ordinal": -1}, "device_ordinal"),
        ({"request_id": -1}, "request_id"),
        ({"request_id": "7"}, "request_id"),
        ({"device_count": True}, "device_count"),
        ({"head_dim": 512.0}, "head_dim"),
        ({"cache_format": "f32"}, "cache_format"),
    ],
)
def test_what_describes_nothing_raises(change: dict[str, Any], subject: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        replace(RATIO_4, **change)
    assert caught.value.subject == subject
