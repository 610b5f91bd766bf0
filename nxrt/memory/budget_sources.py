"""Where budgets are written: code, a TOML file, the environment; merged key by key.

Every value keeps its origin, so that a message can say where to change it. What the values mean
is in `budget`.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nxrt.errors import BudgetError
from nxrt.memory.tier import Role, TierKind

ENVIRONMENT_PREFIX = "NXRT_BUDGET_"

_LIMIT_KEYS = ("limit", "nbytes", "fraction")
"""Ways to write one thing: who writes any of them replaces the others."""
_CAPS = ("roles", "holders", "requests")

Key = tuple[int | str, ...]
Source = dict[Key, tuple[object, str]]
"""(value, origin) by path: ("device", "limit"), ("device", "roles", "kv_cache")."""


def from_code(limits: Mapping[str, object]) -> Source:
    """Return what code passed."""
    return _flat(limits, "code")


def from_environment(environ: Mapping[str, str]) -> Source:
    """Return what environment variables set, not yet validated.

    Raises:
        BudgetError: a variable with our prefix that nobody reads, or a list that cannot be read.
    """
    known = _known_variables()
    found: Source = {}
    for name, value in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name not in known:
            raise BudgetError(name, found="a variable nobody reads", accepted=", ".join(known))
        kind, key = known[name]
        table = _caps_of(name, value) if key in _CAPS else value
        found |= _flat({kind: {key: table}}, f"the environment variable {name}")
    return found


def _known_variables() -> dict[str, tuple[str, str]]:
    """Return (kind, key) by variable name."""
    names = {ENVIRONMENT_PREFIX + kind.name: (kind.value, "limit") for kind in TierKind}
    for kind in TierKind:
        for key in ("headroom", "watermark", *_CAPS):
            names[f"{ENVIRONMENT_PREFIX}{kind.name}_{key.upper()}"] = (kind.value, key)
    return names


def _caps_of(name: str, text: str) -> dict[str, str]:
    """Return the caps of "kv_cache = 8 GiB, workspace = 1 GiB"."""
    caps = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, separator, size = part.rpartition("=")
        if not separator or not key.strip():
            raise BudgetError(name, found=repr(part), accepted='"NAME=SIZE, NAME=SIZE"')
        caps[key.strip()] = size.strip()
    return caps


def from_toml(path: Path) -> Source:
    """Return the [budget] table of a file, not yet validated. Raises BudgetError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("budget", {})
    except (OSError, ValueError, RecursionError) as error:
        raise BudgetError(str(path), found=str(error), accepted="a TOML file") from error
    if not isinstance(table, dict):
        raise BudgetError(f"{path}: budget", found=repr(table), accepted="a [budget] table")
    return _flat(table, str(path))


def _flat(table: Mapping[str, object], origin: str) -> Source:
    found: Source = {}
    kinds = [kind.value for kind in TierKind]
    for key, value in table.items():
        if key not in kinds or isinstance(value, BaseModel):
            found[key,] = value, origin
        else:
            found |= {path: (part, origin) for path, part in _parts(key, value)}
    return found


def _parts(kind: str, value: object) -> Iterator[tuple[Key, object]]:
    if not isinstance(value, Mapping):
        yield (kind, "limit"), value
        return
    limit = {key: value[key] for key in _LIMIT_KEYS if key in value}
    if limit:
        yield (kind, "limit"), limit["limit"] if limit.keys() == {"limit"} else limit
    for key, part in value.items():
        if key in _CAPS and isinstance(part, Mapping):
            for name, cap in part.items():
                yield (kind, key, name.value if isinstance(name, Role) else name), cap
        elif key not in _LIMIT_KEYS:
            yield (kind, key), part


@dataclass
class Merged:
    """Hold what all sources say: nested values to validate, and the origin of each."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)

    def limits(self) -> Iterator[tuple[str, object]]:
        """Yield the limit of each kind that has one."""
        for kind, table in self.values.items():
            if (kind, "limit") in self.origins:
                yield kind, table.get("limit", table)

    def origin(self, path: Key) -> str:
        """Say where a key was written; nothing where several sources share it."""
        parts = tuple("limit" if part in _LIMIT_KEYS else part for part in path)
        for length in range(len(parts), 0, -1):
            prefix = parts[:length]
            found = {o for key, o in self.origins.items() if key[:length] == prefix}
            if len(found) == 1:
                return f"it comes from {found.pop()}"
        return ""


def merged(sources: list[Source]) -> Merged:
    """Return all sources as one; the later ones win, key by key.

    A model that code passes for a kind is whole: it replaces all that others say of that kind.
    """
    flat: Source = {}
    for source in sources:
        whole = {path[0] for path, (value, _) in source.items() if isinstance(value, BaseModel)}
        flat = {path: part for path, part in flat.items() if path[0] not in whole} | source
    result = Merged(origins={path: origin for path, (_, origin) in flat.items()})
    for path, (value, _) in flat.items():
        _put(result.values, path, value)
    return result


def _put(values: dict[str, Any], path: Key, value: object) -> None:
    kind, *rest = path
    if not rest:
        values[str(kind)] = value
        return
    table = values.setdefault(str(kind), {})
    if rest == ["limit"] and isinstance(value, Mapping):
        table |= value
    elif len(rest) == 1:
        table[rest[0]] = value
    else:
        table.setdefault(rest[0], {})[rest[1]] = value
