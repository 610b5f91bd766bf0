"""What an operator allows: one limit for each kind of memory, as sizes or shares of what is there.

Budgets are data. They come from code, a TOML file or the environment, in that order of precedence,
and are validated whole; the governor enforces them.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)
from pydantic import ValidationError as PydanticError

from nxrt.errors import BudgetError, InvalidInputError
from nxrt.memory.tier import Tier, TierKind
from nxrt.tensor import MAX_SIZE

ENVIRONMENT_PREFIX = "NXRT_BUDGET_"
ACCEPTED_SIZE = 'bytes as an integer, a size such as "24 GiB", or a share such as "85%"'

_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_SIZE = re.compile(
    r"\s*(?:[0-9]+|[0-9]+(?:\.[0-9]+)?\s*(?:B|kB|[MGTP]B|[KMGTP]iB))\s*", re.IGNORECASE
)
_BYTE_SIZE = TypeAdapter(ByteSize)


class TierBudget(BaseModel):
    """Limit one kind of memory: `nbytes`, or `fraction` of the measured capacity, or neither.

    A tier with neither has no limit; what it holds is counted all the same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nbytes: int | None = Field(default=None, ge=0, le=MAX_SIZE, strict=True)
    fraction: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.nbytes is not None and self.fraction is not None:
            raise ValueError("accepted: nbytes or fraction, not both")
        return self

    def limit(self, tier: Tier, capacity: int | None) -> int | None:
        """Return the limit in bytes; None is no limit.

        Args:
            tier: for the message.
            capacity: measured bytes of the tier, None where nobody has measured.

        Raises:
            BudgetError: a share was asked of a capacity nobody has measured.
        """
        if self.fraction is None:
            return self.nbytes
        if capacity is None:
            raise BudgetError(
                f"budget of {tier}",
                found=f"{self.fraction:.0%} of a capacity nobody has measured",
                accepted="a share of a measured capacity, or a size in bytes",
                remedy=f'write {tier.kind.value} = "8 GiB" or pass the capacity to the governor',
            )
        return int(capacity * Fraction(str(self.fraction)))


def _parse_tier(value: object) -> object:
    if isinstance(value, TierBudget | dict):
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
        return validated(cls, limits, BudgetError, "budget")

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
            environ: NXRT_BUDGET_DEVICE, NXRT_BUDGET_PINNED, NXRT_BUDGET_HOST; the process's own
                when left out.

        Raises:
            BudgetError: a source cannot be read, or a key or a size is not accepted.
        """
        found = _environment_limits(os.environ if environ is None else environ)
        if toml is not None:
            found |= _toml_limits(toml)
        return cls.of(**(found | limits))

    def limit(self, tier: Tier, capacity: int | None) -> int | None:
        """Return the limit of one tier in bytes; None is no limit. Raises as TierBudget.limit."""
        by_kind = {
            TierKind.DEVICE: self.device,
            TierKind.PINNED: self.pinned,
            TierKind.HOST: self.host,
        }
        return by_kind[tier.kind].limit(tier, capacity)


def _environment_limits(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the limits that environment variables set, by budget key, not yet validated."""
    known = [ENVIRONMENT_PREFIX + kind.name for kind in TierKind]
    for name in environ:
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            raise BudgetError(name, found="a variable nobody reads", accepted=", ".join(known))
    return {
        kind.value: environ[ENVIRONMENT_PREFIX + kind.name]
        for kind in TierKind
        if ENVIRONMENT_PREFIX + kind.name in environ
    }


def _toml_limits(path: Path) -> dict[str, object]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("budget", {})
    except (OSError, ValueError, RecursionError) as error:
        raise BudgetError(str(path), found=str(error), accepted="a TOML file") from error
    if not isinstance(table, dict):
        raise BudgetError(f"{path}: budget", found=repr(table), accepted="a [budget] table")
    return table


ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(
    model: type[ModelT], values: Mapping[str, Any], error: type[InvalidInputError], where: str
) -> ModelT:
    """Build a pydantic model; its first complaint becomes one typed error that names the key.

    Args:
        model: the model class.
        values: its fields.
        error: the class to raise.
        where: what the values are, put before the key in the message.
    """
    try:
        return model.model_validate(values)
    except PydanticError as problem:
        first = problem.errors(include_url=False)[0]
        key = ".".join([where, *map(str, first["loc"])])
        message = first["msg"].removeprefix("Value error, accepted: ")
        accepted = message
        if first["type"] == "extra_forbidden":
            accepted = f"no such key; known: {', '.join(_fields_at(model, first['loc'][:-1]))}"
        if first["type"] == "missing":
            accepted = "a value: the key is required"
        found = "nothing" if first["type"] == "missing" else repr(first["input"])
        raise error(key, found=found, accepted=accepted) from problem


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table that `path` leads to from a model."""
    table: Any = model
    for key in path:
        table = table.model_fields[key].annotation
    return list(table.model_fields)


def measured_host_capacity() -> int | None:
    """Return the bytes of physical host memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
