"""What one node's compressed attention state is, as its properties declare it, or why it is none.

It reserves nothing: sizes are in `state_bytes`, ports in `state_abi`. A "no" is a value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from nxrt.errors import InvalidInputError
from nxrt.graph import Node
from nxrt.storage import checked_int

COMPRESSED_SLOT = 6
"""Input past_compressed_kv."""

CARRY_SLOT = 7
"""Input past_compression_carry."""

INDEX_HEAD_DIM = 128
"""The only width of an index head that has a record format."""

_NUMBERS = ("ratio", "num_heads", "head_dim", "qk_rope_head_dim", "index_head_dim")
_OWNERS = ("device_ordinal", "device_count", "request_id")


class CacheFormat(Enum):
    """Name how attention records are stored; values are those of the attribute."""

    F32 = "f32"
    FP8 = "fp8_e4m3_block64"
    FP4 = "fp4_e2m1_block32"


class RefusalKind(Enum):
    """Name the rule that was not met; the order of the members is the order of the checks."""

    UNKNOWN_CACHE_FORMAT = "unknown_cache_format"
    UNSUPPORTED_RATIO = "unsupported_ratio"
    INVALID_HEAD_GEOMETRY = "invalid_head_geometry"
    ROPE_EXCEEDS_HEAD_DIM = "rope_exceeds_head_dim"
    MULTI_DEVICE_AMBIGUITY = "multi_device_ambiguity"
    MISSING_STATE_EDGE = "missing_state_edge"
    RATIO4_REQUIRES_FP8_CACHE = "ratio4_requires_fp8_cache"
    RATIO4_REQUIRES_INDEX_HEAD_DIM_128 = "ratio4_requires_index_head_dim_128"
    RATIO128_REJECTS_FP4 = "ratio128_rejects_fp4"


@dataclass(frozen=True, slots=True)
class StateGroupRefusal:
    """Say no as a value: the rule, and what came, what is accepted, what to do."""

    kind: RefusalKind
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class StateGroupDescriptor:
    """Describe the state of one attention node for one request.

    Any integers can be described; `refusal` says whether they are state.

    Args:
        ratio: tokens that one record stands for.
        cache_format: how records are stored.
        num_heads: query heads.
        head_dim: channels of a record.
        qk_rope_head_dim: how many of them are rotary.
        index_head_dim: channels of an index record, 0 without one.
        device_ordinal: where the state is, from 0.
        device_count: how many devices the node is spread over.
        request_id: whose state it is, from 0.
        has_compressed_state: the records' input is wired.
        has_carry_state: the carry's input is wired.

    Raises:
        InvalidInputError: a number is not an integer, the device or the request is negative, or
            the format is not a CacheFormat.
    """

    ratio: int
    cache_format: CacheFormat
    num_heads: int
    head_dim: int
    qk_rope_head_dim: int
    index_head_dim: int
    device_ordinal: int
    device_count: int
    request_id: int
    has_compressed_state: bool
    has_carry_state: bool

    def __post_init__(self) -> None:
        if not isinstance(self.cache_format, CacheFormat):
            found = repr(self.cache_format)
            raise InvalidInputError("cache_format", found=found, accepted="a CacheFormat")
        for name in (*_NUMBERS, *_OWNERS):
            object.__setattr__(self, name, checked_int(name, getattr(self, name)))
        # They are a key of somebody's books.
        for name, value in zip(("request_id", "device_ordinal"), self.charge_key, strict=True):
            if value < 0:
                raise InvalidInputError(name, found=str(value), accepted="an integer from 0")

    @classmethod
    def of_node(
        cls, node: Node, *, device_ordinal: int, request_id: int, device_count: int = 1
    ) -> "StateGroupDescriptor | StateGroupRefusal":
        """Read the properties of a node; an unknown cache format is refused before all else.

        A missing, negative or non-integer number reads as 0, which `refusal` then judges. A
        missing format reads as "f32".

        Raises:
            InvalidInputError: the device or the request is not an integer from 0.
        """
        declared = node.attributes.get("cache_format", CacheFormat.F32.value)
        known = {cache_format.value: cache_format for cache_format in CacheFormat}
        if not isinstance(declared, str) or declared not in known:
            remedy = "correct the attribute, or leave it out for f32"
            kind, accepted = RefusalKind.UNKNOWN_CACHE_FORMAT, ", ".join(known)
            return _refuse(kind, "cache_format", repr(declared), accepted, remedy)
        return cls(
            ratio=_number(node, "compression_ratio"),
            cache_format=known[declared],
            num_heads=_number(node, "num_heads"),
            head_dim=_number(node, "head_dim"),
            qk_rope_head_dim=_number(node, "qk_rope_head_dim"),
            index_head_dim=_number(node, "index_head_dim"),
            device_ordinal=device_ordinal,
            device_count=device_count,
            request_id=request_id,
            has_compressed_state=_is_wired(node, COMPRESSED_SLOT),
            has_carry_state=_is_wired(node, CARRY_SLOT),
        )

    @property
    def charge_key(self) -> tuple[int, int]:
        """Return whose books the state is in: (request, device)."""
        return self.request_id, self.device_ordinal

    def refusal(self) -> StateGroupRefusal | None:
        """Return the first rule that is not met, None where all are."""
        return next(chain(self._shape_refusals(), self._format_refusals()), None)

    def _shape_refusals(self) -> Iterator[StateGroupRefusal]:
        kinds = RefusalKind
        if self.ratio not in (4, 128):
            remedy = "leave a layer without compression to another operator"
            kind = kinds.UNSUPPORTED_RATIO
            yield _refuse(kind, "compression_ratio", self.ratio, "4 or 128", remedy)
        if self.num_heads < 1 or self.head_dim < 1 or self.qk_rope_head_dim < 0:
            found = f"{self.num_heads} of {self.head_dim}, rotary {self.qk_rope_head_dim}"
            accepted, remedy = "1 or more of 1 or more, rotary from 0", "correct the attributes"
            yield _refuse(kinds.INVALID_HEAD_GEOMETRY, "heads", found, accepted, remedy)
        if self.qk_rope_head_dim > self.head_dim:
            accepted = f"up to head_dim, {self.head_dim}"
            kind, found = kinds.ROPE_EXCEEDS_HEAD_DIM, str(self.qk_rope_head_dim)
            yield _refuse(kind, "qk_rope_head_dim", found, accepted, "correct one of the two")
        if self.device_count != 1:
            accepted = "1, since the state of a request is on one device"
            kind, remedy = kinds.MULTI_DEVICE_AMBIGUITY, "describe each device's part by itself"
            yield _refuse(kind, "devices", self.device_count, accepted, remedy)
        edges = {
            ("past_compressed_kv", COMPRESSED_SLOT): self.has_compressed_state,
            ("past_compression_carry", CARRY_SLOT): self.has_carry_state,
        }
        for (name, slot), is_wired in edges.items():
            if not is_wired:
                kind, remedy = kinds.MISSING_STATE_EDGE, f"wire input {slot}"
                yield _refuse(kind, name, "an omitted input", "the state so far", remedy)

    def _format_refusals(self) -> Iterator[StateGroupRefusal]:
        kinds, stored, remedy = RefusalKind, self.cache_format, "set the attribute"
        if self.ratio == 4 and stored is not CacheFormat.FP8:
            kind, accepted = kinds.RATIO4_REQUIRES_FP8_CACHE, f"{CacheFormat.FP8.value} at ratio 4"
            yield _refuse(kind, "cache_format", stored.value, accepted, remedy)
        if self.ratio == 4 and self.index_head_dim != INDEX_HEAD_DIM:
            kind = kinds.RATIO4_REQUIRES_INDEX_HEAD_DIM_128
            accepted = f"{INDEX_HEAD_DIM} at ratio 4"
            yield _refuse(kind, "index_head_dim", self.index_head_dim, accepted, remedy)
        if self.ratio == 128 and stored is CacheFormat.FP4:
            accepted = f"{CacheFormat.F32.value} or {CacheFormat.FP8.value} at ratio 128"
            kind, remedy = kinds.RATIO128_REJECTS_FP4, f"{remedy}; FP4 is for index records"
            yield _refuse(kind, "cache_format", stored.value, accepted, remedy)


def _refuse(
    kind: RefusalKind, subject: str, found: object, accepted: str, remedy: str
) -> StateGroupRefusal:
    return StateGroupRefusal(kind, f"{subject}: got {found}; accepted: {accepted}; {remedy}")


def _number(node: Node, name: str) -> int:
    value = node.attributes.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return max(value, 0)


def _is_wired(node: Node, slot: int) -> bool:
    return slot < len(node.inputs) and node.inputs[slot] is not None
