"""`nxrt plan`: what a model will need on each tier, as a table, as bars, and as data.

Rendering, and reading the options; the arithmetic is in `nxrt.planning`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nxrt.cli import budget_options
from nxrt.cli.sizes import size_text
from nxrt.errors import InvalidInputError
from nxrt.memory.budget import MemoryBudget, TierBudget, measured_host_capacity
from nxrt.memory.tier import PINNED, Role, Tier
from nxrt.planning.geometry import read_toml
from nxrt.planning.planner import DEVICE, Plan, RoleCap, TierTotal
from nxrt.runtime import driver
from nxrt.runtime.device import Device

FITS, DOES_NOT_FIT = 0, 1
ACCEPTED_BUDGET = f"{budget_options.ACCEPTED}, or one .toml file with a [budget] table"

_BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
_ROLE_STYLES = {
    Role.KV_CACHE: "blue",
    Role.STATE_GROUP: "cyan",
    Role.ACTIVATION: "green",
    Role.WORKSPACE: "yellow",
    Role.STAGING: "magenta",
    Role.GRAPH: "red",
}


def load_budget(options: Sequence[str]) -> MemoryBudget:
    """Return the budget of --budget; options win over the file, the file over the environment.

    Raises:
        BudgetError, InvalidInputError: an option, a file, a key or a size is not accepted.
    """
    files = [option for option in options if option.endswith(".toml") and "=" not in option]
    if len(files) > 1:
        raise InvalidInputError("--budget", found=repr(files[1]), accepted=ACCEPTED_BUDGET)
    others = [option for option in options if option not in files]
    limits = budget_options.parse_budgets(others, ACCEPTED_BUDGET)
    file = Path(files[0]) if files else None
    if file is not None and "budget" not in read_toml(file):
        # A table that is not there would be a budget without limits, which admits everything.
        found = "no such table"
        raise InvalidInputError(f"{file.name}.budget", found=found, accepted="a [budget] table")
    return budget_options.load_budget(limits, toml=file)


def measured_capacities(budget: MemoryBudget) -> dict[Tier, int]:
    """Return the bytes of the tiers whose budget needs them, where this machine knows them."""
    capacities = {}
    if _needs_capacity(budget.device) and driver.probe().is_available:
        device = Device(DEVICE.ordinal)
        try:
            capacities[DEVICE] = device.capabilities.total_memory
        finally:
            device.close()
    host = measured_host_capacity()
    if _needs_capacity(budget.pinned) and host is not None:
        capacities[PINNED] = host
    return capacities


def _needs_capacity(budget: TierBudget) -> bool:
    return budget.fraction is not None or budget.headroom is not None


def as_data(plan: Plan) -> dict[str, Any]:
    """Return everything the table says as plain JSON types."""
    return {
        "model": plan.geometry.name,
        "context": plan.context,
        "batch": plan.batch,
        "fits": plan.fits,
        "largest_batch": plan.largest_batch,
        "longest_context": plan.longest_context,
        "budget_line": plan.budget_line,
        "lines": [
            {
                "tier": str(line.tier),
                "role": line.role.value,
                "holder": line.holder,
                "nbytes": line.nbytes,
                "what": line.what,
            }
            for line in plan.lines
        ],
        "totals": [
            {
                "tier": str(total.tier),
                "nbytes": total.nbytes,
                "limit": total.limit,
                "capacity": total.capacity,
                "fits": total.fits,
            }
            for total in plan.totals
        ],
        "caps": [
            {
                "tier": str(cap.tier),
                "role": cap.role.value,
                "nbytes": cap.nbytes,
                "limit": cap.limit,
                "fits": cap.fits,
            }
            for cap in plan.caps
        ],
    }


def share_text(part: int, whole: int) -> str:
    """Return a share in percent; what is not nothing does not read as nothing."""
    share = 100 * part / whole if whole else 0.0
    return "<0.1 %" if part and share < 0.05 else f"{share:,.1f} %"


def title(plan: Plan) -> str:
    """Return what was planned, in one line."""
    return f"{plan.geometry.name}, context {plan.context:,}, batch {plan.batch:,}"


def verdict(plan: Plan) -> list[str]:
    """Return what follows from the plan, the answer first."""
    short = [_shortfall(total) for total in plan.totals if not total.fits]
    short += [_cap_shortfall(cap) for cap in plan.caps if not cap.fits]
    lacks = "; ".join(short)
    lines = ["it fits" if plan.fits else f"it does not fit: {lacks}"]
    if not plan.fits:
        change = " and ".join(plan.budget_line.splitlines())
        lines.append(f"to admit it, write in the [budget] table: {change}")
    batch = "without limit" if plan.largest_batch is None else f"{plan.largest_batch:,}"
    lines.append(f"largest batch at this context: {batch}")
    is_all = plan.longest_context == plan.geometry.max_context
    context = f"{plan.longest_context:,}{', all that the model has' if is_all else ''}"
    lines.append(f"longest context at this batch: {context}")
    not_counted = "weights and activations"
    if any(line.role is Role.ACTIVATION for line in plan.lines):
        not_counted = "weights"
    elif not any(line.role is Role.WORKSPACE for line in plan.lines):
        # nxrt has no operator for it, so its workspaces are not nxrt's to size.
        not_counted = "weights, activations and the workspaces of compressed attention"
    lines.append(f"not counted: {not_counted}, which the engine holds")
    return lines


def _shortfall(total: TierTotal) -> str:
    assert total.limit is not None  # without a limit everything fits
    text = f"{total.tier} lacks {size_text(total.nbytes - total.limit)}"
    if total.capacity is not None and total.nbytes > total.capacity:
        text += f", and this machine has {size_text(total.capacity)} in all"
    return text


def _cap_shortfall(cap: RoleCap) -> str:
    return f"role {cap.role.value} of {cap.tier} lacks {size_text(cap.nbytes - cap.limit)}"


def render(plan: Plan, console: Console) -> None:
    """Print a table and bars for each tier, then the verdict."""
    console.print(Text(title(plan), style="bold"))
    for total in plan.totals:
        console.print(_table(plan, total))
        if total.limit is not None or len(by_role(plan, total.tier)) > 1:
            console.print(_bars(plan, total, is_ascii=console.options.ascii_only))
    answer, *rest = verdict(plan)
    console.print(Text(answer, style="bold green" if plan.fits else "bold red"))
    for line in rest:
        console.print(Text(line))


def _table(plan: Plan, total: TierTotal) -> Table:
    limit = "no limit" if total.limit is None else f"limit {size_text(total.limit)}"
    table = Table(title=f"{total.tier}, {limit}", title_justify="left", show_footer=True)
    style = "bold" if total.fits else "bold red"
    for name, footer in (("role", "all"), ("holder", ""), ("what", "")):
        table.add_column(name, footer, footer_style=style)
    needed = size_text(total.nbytes)
    table.add_column("size", needed, footer_style=style, justify="right", no_wrap=True)
    for line in plan.lines:
        if line.tier == total.tier:
            table.add_row(line.role.value, line.holder, line.what, size_text(line.nbytes))
    return table


def by_role(plan: Plan, tier: Tier) -> dict[Role, int]:
    """Return the bytes of one tier by role, in the order of the plan."""
    sizes: dict[Role, int] = {}
    for line in plan.lines:
        if line.tier == tier:
            sizes[line.role] = sizes.get(line.role, 0) + line.nbytes
    return sizes


def _bars(plan: Plan, total: TierTotal, *, is_ascii: bool) -> Table:
    """Draw one bar for each role; where the total is past the limit, a mark shows the limit."""
    whole = total.nbytes if total.limit is None else total.limit
    of_what = "of what is needed" if total.limit is None else "of the limit"
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    scale = max(total.nbytes, whole, 1)
    mark = None if total.fits else _BAR_WIDTH * whole // scale
    for name, nbytes, style in _bar_rows(plan, total):
        bar = _bar(nbytes / scale, mark, is_ascii=is_ascii)
        share = f"{share_text(nbytes, whole):>8} {of_what}"
        table.add_row(name, Text(bar, style=style), share)
    table.add_row("")
    return table


def _bar_rows(plan: Plan, total: TierTotal) -> Iterator[tuple[str, int, str]]:
    for role, nbytes in by_role(plan, total.tier).items():
        yield role.value, nbytes, _ROLE_STYLES.get(role, "white")
    yield "all", total.nbytes, "green" if total.fits else "bold red"


def _bar(share: float, mark: int | None, *, is_ascii: bool) -> str:
    full, eighths = divmod(round(share * _BAR_WIDTH * 8), 8)
    if is_ascii:
        cells = "#" * round(share * _BAR_WIDTH)
    else:
        cells = "█" * full + (_EIGHTHS[eighths] if eighths else "")
    cells = cells.ljust(_BAR_WIDTH, "." if is_ascii else "·")
    if mark is not None and mark < _BAR_WIDTH:
        cells = f"{cells[:mark]}|{cells[mark + 1 :]}"
    return cells
