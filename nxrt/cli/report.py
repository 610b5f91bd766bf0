"""What a person sees of a finished job: the selected text and a table; and the same as data.

Rendering only; every figure comes from the result.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nxrt.cli.decode import DecodeResult
from nxrt.cli.sizes import size_text
from nxrt.cli.trace import Trace
from nxrt.memory.governor import TierUsage

EXCERPT = 260
"""Word pieces shown of the text before the last position."""

_SHADES = " ░▒▓█"
_MAP_WIDTH = 56


def as_data(result: DecodeResult) -> dict[str, Any]:
    """Return everything the report says as plain JSON types."""
    cache = result.cache
    return {
        "provider": {"name": result.provider[0], "reason": result.provider[1]},
        "placements": [vars(placement) for placement in result.placements],
        "steps": {
            "total": len(result.eager_us) + len(result.replayed_us),
            "eager": _timing(result.eager_us),
            "replayed": _timing(result.replayed_us),
        },
        "rows": {"checked": result.rows_equal.size, "equal": int(result.rows_equal.sum())},
        "memory": [_tier_data(usage) for usage in result.memory],
        "released": result.released,
        "compile_cache": None if cache is None else vars(cache),
        "graph": {
            "captures": result.num_captures,
            "replays": result.num_replays,
            "nodes": result.num_graph_nodes,
            "declined": result.capture_decline,
        },
        "last_selection": [int(t) for t in result.selected[-1] if t >= 0],
    }


def _timing(elapsed_us: Sequence[float]) -> dict[str, float | int] | None:
    if not elapsed_us:
        return None
    median, p99 = np.percentile(elapsed_us, [50, 99])
    return {"count": len(elapsed_us), "median_us": float(median), "p99_us": float(p99)}


def _tier_data(usage: TierUsage) -> dict[str, Any]:
    return {
        "tier": str(usage.tier),
        "limit": usage.limit,
        "used": usage.used,
        "peak": usage.peak,
        "watermark": usage.watermark,
        "refused": usage.num_refused,
        "caps": [vars(cap) for cap in usage.caps],
        "holders": [
            {"role": h.role.value, "holder": h.holder, "used": h.used, "peak": h.peak}
            for h in usage.holders
        ],
    }


def render(result: DecodeResult, trace: Trace, console: Console) -> None:
    """Print the selection of the last step, then the tables."""
    console.print(
        _selection(
            result, trace, has_color=console.color_system is not None and not console.no_color
        )
    )
    console.print(_summary(result))
    console.print(_memory(result.memory))


def _selection(result: DecodeResult, trace: Trace, *, has_color: bool) -> RenderableType:
    position = trace.position(trace.num_steps - 1)
    chosen = result.selected[-1][result.selected[-1] >= 0]
    is_chosen = np.zeros(trace.capacity, np.bool_)
    is_chosen[chosen] = True
    begin = max(0, position + 1 - EXCERPT)
    body = Group(
        _density(is_chosen[: position + 1]),
        Text(f"\nthe last {position + 1 - begin} word pieces:\n", style="dim"),
        _marked(trace.tokens[begin : position + 1], is_chosen[begin : position + 1], has_color),
    )
    title = f"step {trace.num_steps}: {chosen.size:,} of {position + 1:,} positions selected"
    return Panel(body, title=title, title_align="left", expand=True)


def _density(is_chosen: NDArray[np.bool_]) -> Text:
    """Show where in the text the selected positions lie, old to new, darkest where densest."""
    parts = np.array_split(is_chosen, min(_MAP_WIDTH, is_chosen.size))
    densities = np.array([part.mean() for part in parts])
    levels = np.ceil(densities / max(densities.max(), 1e-9) * (len(_SHADES) - 1)).astype(int)
    shades = [_SHADES[level] for level in levels]
    return Text.assemble(("oldest ", "dim"), ("".join(shades), "green"), (" newest", "dim"))


def _marked(tokens: NDArray[np.str_], is_chosen: NDArray[np.bool_], has_color: bool) -> Text:
    """Join word pieces to text; selected ones are highlighted, or quoted «so» without color."""
    text = Text()
    for token, chosen in zip(tokens, is_chosen, strict=True):
        # A trace is somebody's file: what could steer a terminal is not passed on to it.
        piece = "".join(letter if letter.isprintable() else "·" for letter in str(token))
        if piece.startswith("##"):
            piece = piece[2:]
        elif text:
            text.append(" ")
        if not has_color:
            text.append(f"«{piece}»" if chosen else piece)
        else:
            text.append(piece, style="bold black on green" if chosen else "dim")
    return text


def _summary(result: DecodeResult) -> Table:
    table = Table(title="decode", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("provider", f"{result.provider[0]} ({result.provider[1]})")
    for placement in result.placements:
        table.add_row(placement.node, f"{placement.op}, served by {placement.plugin}")
    for name, elapsed in (("eager", result.eager_us), ("replayed", result.replayed_us)):
        table.add_row(f"{name} steps", _timing_text(elapsed))
    equal, total = int(result.rows_equal.sum()), result.rows_equal.size
    style = "green" if equal == total else "bold red"
    table.add_row("rows equal to the oracle", Text(f"{equal} of {total}", style=style))
    table.add_row("graph", _graph_text(result))
    table.add_row("compile cache", _cache_text(result))
    released = "everything was given back" if result.released else "memory is still charged"
    table.add_row("after closing", released)
    return table


def _timing_text(elapsed_us: Sequence[float]) -> str:
    timing = _timing(elapsed_us)
    if timing is None:
        return "none"
    return (
        f"{timing['count']}, median {timing['median_us']:,.0f} us, p99 {timing['p99_us']:,.0f} us"
    )


def _graph_text(result: DecodeResult) -> str:
    if result.capture_decline:
        return f"not captured: {result.capture_decline}"
    counts = f"{result.num_captures} captured, {result.num_replays} replays"
    return f"{counts}, {result.num_graph_nodes} nodes"


def _cache_text(result: DecodeResult) -> str:
    cache = result.cache
    if cache is None:
        return "not used"
    return (
        f"{cache.compilations} compiled, {cache.disk_hits} from disk,"
        f" {cache.memory_hits} from memory, {cache.rejected_entries} rejected"
    )


def _memory(memory: Sequence[TierUsage]) -> Table:
    table = Table(title="memory, after the last step", title_justify="left")
    for name in ("tier", "role", "holder"):
        table.add_column(name, overflow="fold")
    for name in ("now", "peak", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for usage in memory:
        tier = str(usage.tier)
        for holder in usage.holders:
            now, peak = _bytes(holder.used), _bytes(holder.peak)
            table.add_row(tier, holder.role.value, Text(holder.holder), now, peak, "")
        for cap in usage.caps:
            axis, _, name = cap.cap.partition(" ")
            role, who = (name, "all") if axis == "role" else ("all", name)
            who = cap.cap if axis == "request" else who
            table.add_row(tier, role, Text(who), *map(_bytes, (cap.used, cap.peak, cap.limit)))
        if usage.watermark is not None:
            is_reached = "reached" if usage.peak >= usage.watermark else "not reached"
            table.add_row(tier, "watermark", is_reached, "", "", _bytes(usage.watermark))
        limit = "none" if usage.limit is None else _bytes(usage.limit)
        total = (tier, "all", "all", _bytes(usage.used), _bytes(usage.peak), limit)
        table.add_row(*total, style="bold", end_section=True)
    return table


def _bytes(nbytes: int) -> str:
    return size_text(nbytes, digits=1)
