"""`--budget`: every key of a budget, as an option of the command line.

What the keys mean is the governor's business; here they are told apart and put together.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nxrt.errors import BudgetError, InvalidInputError
from nxrt.memory.budget import MemoryBudget

OPTION = "--budget"
METAVAR = "TIER[.KEY]=SIZE"
HELP = "Such as device=24GiB, device.watermark=90% or device.roles.kv_cache=60%; may be repeated."
ACCEPTED = (
    f"{METAVAR} with a tier of {', '.join(MemoryBudget.model_fields)} and, as KEY, headroom,"
    " watermark, roles.NAME, holders.NAME or requests.NAME: device=24GiB, device.watermark=90%"
)

_SINGLE = ("limit", "headroom", "watermark")
_NAMED = ("roles", "holders", "requests")
_FROM_CODE = "it comes from code"

Limits = dict[str, dict[str, Any]]


def parse_budgets(options: Sequence[str], accepted: str = ACCEPTED) -> Limits:
    """Return the keys of each tier, as `MemoryBudget.load` takes them; sizes are not looked at.

    Raises:
        InvalidInputError: an option is no TIER[.KEY]=SIZE.
    """
    limits: Limits = {}
    for option in options:
        path, separator, size = option.rpartition("=")
        # A holder's or a request's name may have dots of its own.
        tier, *keys = path.split(".", 2)
        keys = keys or ["limit"]
        is_single = len(keys) == 1 and keys[0] in _SINGLE
        is_named = len(keys) == 2 and keys[0] in _NAMED and keys[1] != ""
        if not separator or tier not in MemoryBudget.model_fields or not (is_single or is_named):
            raise InvalidInputError(OPTION, found=repr(option), accepted=accepted)
        table = limits.setdefault(tier, {})
        if is_single:
            table[keys[0]] = size
        else:
            table.setdefault(keys[0], {})[keys[1]] = size
    return limits


def load_budget(
    limits: Mapping[str, object], *, toml: Path | None, environ: Mapping[str, str] | None = None
) -> MemoryBudget:
    """Return the budget; options win over the file, the file over the environment, key by key.

    Raises:
        BudgetError: naming the key, and where it was written.
    """
    try:
        return MemoryBudget.load(toml=toml, environ=environ, **limits)
    except BudgetError as error:
        if error.remedy != _FROM_CODE:
            raise
        remedy = f"it comes from {OPTION}"
        found, accepted = error.found, error.accepted
        raise BudgetError(error.subject, found=found, accepted=accepted, remedy=remedy) from error
