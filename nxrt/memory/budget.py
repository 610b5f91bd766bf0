"""What an operator allows: one limit for each kind of memory, and finer ones inside it.

Budgets are data, validated whole; the governor enforces them. Where they come from is in
`budget_sources`.
"""

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)

from nxrt.errors import BudgetError
from nxrt.memory.budget_sources import Source, from_code, from_environment, from_toml, merged
from nxrt.memory.tier import Role, Tier, TierKind
from nxrt.memory.validation import validated
from nxrt.tensor import MAX_SIZE

__all__ = ["Amount", "MemoryBudget", "TierBudget", "measured_host_capacity", "validated"]

ACCEPTED_SIZE = 'bytes as an integer, a size such as "24 GiB", or a share such as "85%"'
ANY = "*"
"""Stands for every holder or request that the budget does not name, each by itself."""

UNMEASURED = "a capacity nobody has measured"
UNLIMITED = "a limit that is not set"
_KNOWN = {UNMEASURED: "a measured capacity", UNLIMITED: "a limit"}

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_SIZE = re.compile(
    r"\s*(?:[0-9]+|[0-9]+(?:\.[0-9]+)?\s*(?:B|kB|[MGTP]B|[KMGTP]iB))\s*", re.IGNORECASE
)
_BYTE_SIZE = TypeAdapter(ByteSize)


def parse_amount(value: object) -> object:
    """Return what a person wrote as the fields of an `Amount`. Raises ValueError."""
    if isinstance(value, BaseModel | Mapping):
        return value
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        if not 0 < Decimal(match[1]) <= 100:
            raise ValueError("accepted: a share above 0% and up to 100%")
        return {"fraction": float(Decimal(match[1]) / 100)}
    if isinstance(value, str) and _SIZE.fullmatch(value):
        return {"nbytes": int(_BYTE_SIZE.validate_python(value))}
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE:
        return {"nbytes": value}
    raise ValueError(f"accepted: {ACCEPTED_SIZE}")


def _parse_tier(value: object) -> object:
    if not isinstance(value, Mapping) or "limit" not in value:
        return parse_amount(value)
    if value.keys() & {"nbytes", "fraction"}:
        raise ValueError("accepted: limit, or nbytes, or fraction, not two of them")
    limit = parse_amount(value["limit"])
    parts = limit.model_dump(exclude_none=True) if isinstance(limit, BaseModel) else limit
    assert isinstance(parts, Mapping)  # the other thing that parse_amount returns
    return {key: value[key] for key in value if key != "limit"} | dict(parts)


class Amount(BaseModel):
    """Say how much: `nbytes`, or a `fraction` of something that the key names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nbytes: int | None = Field(default=None, ge=0, le=MAX_SIZE, strict=True)
    fraction: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.nbytes is not None and self.fraction is not None:
            raise ValueError("accepted: nbytes or fraction, not both")
        return self

    def of(self, whole: int | None, subject: str, what: str, remedy: str) -> int | None:
        """Return the bytes, None where neither was written.

        Args:
            whole: what the fraction is taken of, None where nobody knows.
            subject: for the message: whose amount this is.
            what: for the message: what the whole is.
            remedy: for the message: what to do.

        Raises:
            BudgetError: a share of an unknown whole was asked for.
        """
        if self.fraction is None:
            return self.nbytes
        if whole is None:
            found = f"{self.fraction:.0%} of {what}"
            accepted = f"a share of {_KNOWN[what]}, or a size in bytes"
            raise BudgetError(subject, found=found, accepted=accepted, remedy=remedy)
        return int(whole * Fraction(str(self.fraction)))


SizeOrShare = Annotated[Amount, BeforeValidator(parse_amount)]


def parsed_amount(value: object, subject: str) -> Amount:
    """Return what a person or a program wrote as an amount. Raises BudgetError."""
    try:
        return Amount.model_validate(parse_amount(value))
    except ValueError as error:
        raise BudgetError(subject, found=repr(value), accepted=ACCEPTED_SIZE) from error


class TierBudget(Amount):
    """Limit one kind of memory: `nbytes`, or `fraction` of the measured capacity, or neither.

    A tier with neither has no limit; what it holds is counted all the same.

    Args:
        headroom: what nxrt leaves to others: the limit never exceeds the capacity less this.
        watermark: the use from which watchers are told; a share is one of the limit.
        roles: the most that each role may hold; shares are of the limit, here and below.
        holders: likewise for each holder; "*" is for each that is not named.
        requests: likewise for each request.
    """

    headroom: SizeOrShare | None = None
    watermark: SizeOrShare | None = None
    roles: dict[Role, SizeOrShare] = Field(default_factory=dict)
    holders: dict[str, SizeOrShare] = Field(default_factory=dict)
    requests: dict[str, SizeOrShare] = Field(default_factory=dict)

    def limit(self, tier: Tier, capacity: int | None) -> int | None:
        """Return the limit in bytes; None is no limit.

        Args:
            tier: for the message.
            capacity: measured bytes of the tier, None where nobody has measured.

        Raises:
            BudgetError: a share or a headroom was asked of a capacity nobody has measured.
        """
        kind = tier.kind.value
        remedy = f'write {kind} = "8 GiB" or pass the capacity to the governor'
        limit = self.of(capacity, f"budget of {tier}", UNMEASURED, remedy)
        if self.headroom is None:
            return limit
        subject = f"headroom of {tier}"
        remedy = f"lower the limit of {kind} instead, or pass the capacity to the governor"
        headroom = self.headroom.of(capacity, subject, UNMEASURED, remedy) or 0
        if capacity is None or headroom > capacity:
            of_what = UNMEASURED if capacity is None else f"a capacity of {capacity:,} B"
            found, accepted = f"{headroom:,} B of {of_what}", "up to a measured capacity"
            raise BudgetError(subject, found=found, accepted=accepted, remedy=remedy)
        return min(capacity - headroom, capacity if limit is None else limit)

    def watermark_of(self, tier: Tier, limit: int | None) -> int | None:
        """Return the use from which watchers are told. Raises BudgetError: a share of no limit."""
        return self._share(self.watermark, f"watermark of {tier}", limit)

    def changed(self, amount: Amount, axis: str = "", name: str | Role = "") -> "TierBudget":
        """Return the same budget with another limit, or another cap where an axis is given."""
        if not axis:
            return self.model_copy(update=amount.model_dump())
        return self.model_copy(update={axis: getattr(self, axis) | {name: amount}})

    def cap(self, tier: Tier, axis: str, name: str | Role, limit: int | None) -> int | None:
        """Return the most that one role, holder or request may hold; None is no cap.

        Args:
            tier: for the message.
            axis: "roles", "holders" or "requests".
            name: which of them.
            limit: the tier's, of which shares are taken.

        Raises:
            BudgetError: a share of no limit.
        """
        caps: dict[str | Role, Amount] = getattr(self, axis)
        amount = caps.get(name) or caps.get(ANY)
        return self._share(amount, f"{axis} of {tier}", limit)

    def _share(self, amount: Amount | None, subject: str, limit: int | None) -> int | None:
        remedy = "give the tier a limit, or write a size"
        return None if amount is None else amount.of(limit, subject, UNLIMITED, remedy)


TierLimit = Annotated[TierBudget, BeforeValidator(_parse_tier)]


class MemoryBudget(BaseModel):
    """Limit every kind of memory; `device` holds for each device by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: TierLimit = TierBudget()
    pinned: TierLimit = TierBudget()
    host: TierLimit = TierBudget()

    @classmethod
    def of(cls, /, **limits: object) -> "MemoryBudget":
        """Return a budget from sizes: `MemoryBudget.of(device="24 GiB", host="50%")`.

        Raises:
            BudgetError: a key or a size is not accepted.
        """
        return cls._from([from_code(limits)])

    @classmethod
    def load(
        cls,
        *,
        toml: Path | None = None,
        environ: Mapping[str, str] | None = None,
        **limits: object,
    ) -> "MemoryBudget":
        """Return a budget from all sources; what stands further left wins, key by key.

        Args:
            limits: from code.
            toml: a file with a [budget] table.
            environ: NXRT_BUDGET_DEVICE, NXRT_BUDGET_PINNED, NXRT_BUDGET_HOST, and each of them
                with _HEADROOM, _WATERMARK, _ROLES, _HOLDERS or _REQUESTS; the process's own when
                left out.

        Raises:
            BudgetError: a source cannot be read, or a key or a size is not accepted.
        """
        sources = [from_environment(os.environ if environ is None else environ)]
        if toml is not None:
            sources.append(from_toml(toml))
        return cls._from([*sources, from_code(limits)])

    @classmethod
    def _from(cls, sources: list[Source]) -> "MemoryBudget":
        found = merged(sources)
        for kind, limit in found.limits():
            try:
                parse_amount(limit)
            except ValueError as error:
                raise BudgetError(
                    f"budget.{kind}",
                    found=repr(limit),
                    accepted=str(error).removeprefix("accepted: "),
                    remedy=found.origin((kind, "limit")),
                ) from error
        return validated(cls, found.values, BudgetError, "budget", found.origin)

    def tier(self, kind: TierKind) -> TierBudget:
        """Return what holds for one kind of memory."""
        budget: TierBudget = getattr(self, kind.value)
        return budget

    def limit(self, tier: Tier, capacity: int | None) -> int | None:
        """Return the limit of one tier in bytes; None is no limit. Raises as TierBudget.limit."""
        return self.tier(tier.kind).limit(tier, capacity)


def measured_host_capacity() -> int | None:
    """Return the bytes of physical host memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
