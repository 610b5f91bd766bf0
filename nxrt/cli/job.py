"""Job files: what to run, on what, under which budgets.

A job is checked whole before anything is opened; what it means is in `decode`.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
)

from nxrt.cli.budget_options import load_budget
from nxrt.errors import JobError
from nxrt.memory.budget import MemoryBudget, validated
from nxrt.providers.select import PROVIDER_NAMES

Attribute = StrictInt | StrictFloat | StrictStr


_TABLES = ("job", "attributes", "budget")


def _known_provider(value: object) -> object:
    if value not in PROVIDER_NAMES:
        raise ValueError(f"accepted: {', '.join(PROVIDER_NAMES)}")
    return value


def _qualified_op(value: object) -> object:
    if not isinstance(value, str) or value.count("::") != 1 or not all(value.split("::")):
        raise ValueError('accepted: "domain::Operator", such as "pkg.nxrt::DsaIndexSelect"')
    return value


class JobSection(BaseModel):
    """Say what to run: the [job] table."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    op: Annotated[str, BeforeValidator(_qualified_op)]
    trace: Annotated[str, Field(min_length=1)]
    provider: Annotated[str, BeforeValidator(_known_provider)] = "auto"
    warmup_steps: Annotated[int, Field(ge=1)] = 2


class Job(BaseModel):
    """Hold a whole job; `budget` comes from the options, the file and the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: JobSection
    attributes: dict[str, Attribute]
    budget: MemoryBudget
    folder: Path

    @property
    def trace_path(self) -> Path:
        """Return where the trace is."""
        return self.folder / self.job.trace


def load_job(
    path: Path,
    *,
    provider: str | None = None,
    top_k: int | None = None,
    budgets: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Job:
    """Read and check a job file; options win over the file, the file over the environment.

    Args:
        path: a TOML file with the tables [job], [attributes] and, optionally, [budget].
        provider: replaces job.provider.
        top_k: replaces attributes.top_k.
        budgets: limits by tier, as `MemoryBudget.load` takes them; they win over [budget].
        environ: the process's own when left out.

    Raises:
        JobError, BudgetError: naming the key, what came and what is accepted.
    """
    tables = _read(path)
    section = dict(_table(tables, "job", path))
    attributes = dict(_table(tables, "attributes", path))
    if provider is not None:
        section["provider"] = provider
    if top_k is not None:
        attributes["top_k"] = top_k
    budget = load_budget(budgets or {}, toml=path, environ=environ)
    values = {"job": section, "attributes": attributes, "budget": budget, "folder": path.parent}
    for name in tables:
        if name not in _TABLES:
            accepted = f"no such table; known: {', '.join(_TABLES)}"
            raise JobError(f"{path.name}.{name}", found=repr(tables[name]), accepted=accepted)
    return validated(Job, values, JobError, path.name)


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError(str(path), found=reason, accepted="a readable job file") from error
    except (ValueError, RecursionError) as error:
        raise JobError(str(path), found=str(error), accepted="TOML") from error


def _table(tables: Mapping[str, object], name: str, path: Path) -> dict[str, object]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise JobError(f"{path.name}.{name}", found=repr(table), accepted=f"a [{name}] table")
    return table
