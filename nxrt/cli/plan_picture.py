"""The picture of a plan: a stacked bar for each tier, drawn as SVG by hand, alone or in a page.

Rendering only; every figure comes from the plan.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from nxrt.cli.plan import share_text, title, verdict
from nxrt.cli.sizes import size_text
from nxrt.errors import InvalidInputError
from nxrt.memory.tier import Role
from nxrt.planning.planner import Plan, PlanLine, TierTotal

SUFFIXES = (".svg", ".html")

_WIDTH, _MARGIN = 960, 40
_BAR_WIDTH, _BAR_HEIGHT = _WIDTH - 2 * _MARGIN, 46
_TOP, _TIER_HEAD, _LEGEND_GAP, _LEGEND_STEP, _TIER_GAP, _FOOT_STEP = 104, 36, 30, 24, 34, 22
_LETTER_WIDTH = 7.0
"""Pixels of an average letter at 12 px, to decide whether a label fits into its segment."""

_INK, _FAINT, _TRACK, _GOOD, _BAD = "#1d2733", "#66727f", "#e8ecf0", "#1c7c4c", "#c0392b"
_COLORS = {
    Role.KV_CACHE: (47, 98, 168),
    Role.STATE_GROUP: (28, 125, 122),
    Role.WORKSPACE: (214, 137, 16),
    Role.STAGING: (125, 88, 172),
    Role.GRAPH: (190, 70, 110),
}
_OTHER_COLOR = (110, 120, 130)
_MOST_WHITE = 0.7
"""How much white the last line of a role gets; the first gets none."""

_FONT = "font-family=\"'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\""
_DEFS = (
    '<defs><pattern id="past" width="8" height="8" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)">'
    f'<rect width="3" height="8" fill="{_BAD}"/></pattern></defs>'
)


def check_picture_path(path: Path) -> None:
    """Refuse a file that is neither .svg nor .html. Raises InvalidInputError."""
    if path.suffix not in SUFFIXES:
        accepted = f"a file that ends with {' or '.join(SUFFIXES)}"
        raise InvalidInputError("--picture", found=repr(str(path)), accepted=accepted)


def write_picture(plan: Plan, path: Path) -> None:
    """Write the picture; a file that is there is replaced.

    Raises:
        InvalidInputError: the suffix is not known, or the file cannot be written.
    """
    check_picture_path(path)
    text = as_html(plan) if path.suffix == ".html" else as_svg(plan)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        found = f"{path}: {error.strerror or error}"
        raise InvalidInputError("--picture", found=found, accepted="a writable file") from error


def as_html(plan: Plan) -> str:
    """Return a page that holds the picture."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>nxrt plan: {escape(title(plan))}</title>\n"
        "<style>body { margin: 2rem auto; max-width: 960px; background: #f4f6f8; }"
        " svg { width: 100%; height: auto; }</style>\n"
        f"</head>\n<body>\n{as_svg(plan)}</body>\n</html>\n"
    )


def as_svg(plan: Plan) -> str:
    """Return the picture."""
    body: list[str] = []
    y = _TOP
    for total in plan.totals:
        lines = _lines_by_role(plan, total)
        body += _tier(total, lines, y)
        y += _TIER_HEAD + _BAR_HEIGHT + _LEGEND_GAP + _LEGEND_STEP * len(lines) + _TIER_GAP
    for index, line in enumerate(verdict(plan)[1:]):
        color = _INK if index == 0 and not plan.fits else _FAINT
        body.append(_text(_MARGIN, y, line, color=color, size=13))
        y += _FOOT_STEP
    height = y + 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" role="img" {_FONT}>'
    )
    ground = f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#ffffff"/>'
    name = f"<title>nxrt plan: {escape(title(plan))}</title>"
    return "\n".join([head, name, _DEFS, ground, *_heading(plan), *body, "</svg>", ""])


def _heading(plan: Plan) -> Iterator[str]:
    answer = verdict(plan)[0]
    color = _GOOD if plan.fits else _BAD
    yield _text(_MARGIN, 46, title(plan), size=22, weight="bold")
    yield f'<circle cx="{_MARGIN + 6}" cy="69" r="6" fill="{color}"/>'
    yield _text(_MARGIN + 20, 74, answer, color=color, size=14, weight="bold")


def _lines_by_role(plan: Plan, total: TierTotal) -> list[tuple[PlanLine, str]]:
    """Return the lines of one tier with a colour for each, the lines of one role side by side."""
    lines = [line for line in plan.lines if line.tier == total.tier]
    colored = []
    for role in dict.fromkeys(line.role for line in lines):
        of_role = [line for line in lines if line.role is role]
        for index, line in enumerate(of_role):
            white = _MOST_WHITE * index / max(len(of_role) - 1, 1)
            colored.append((line, _mixed(role, white)))
    return colored


def _mixed(role: Role, white: float) -> str:
    red, green, blue = (
        round(part + (255 - part) * white) for part in _COLORS.get(role, _OTHER_COLOR)
    )
    return f"#{red:02x}{green:02x}{blue:02x}"


def _tier(total: TierTotal, lines: list[tuple[PlanLine, str]], y: int) -> Iterator[str]:
    whole = total.nbytes if total.limit is None else total.limit
    scale = max(total.nbytes, whole, 1)
    bar_y = y + _TIER_HEAD
    needed = size_text(total.nbytes)
    share = "" if total.limit is None else f", {share_text(total.nbytes, whole)} of the limit"
    yield _text(_MARGIN, y + 4, str(total.tier), size=16, weight="bold")
    yield _text(_MARGIN + 92, y + 4, f"{needed}{share}", color=_FAINT, size=14)
    yield _rect(_MARGIN, bar_y, _BAR_WIDTH, _BAR_HEIGHT, _TRACK)
    yield from _segments(lines, scale, bar_y)
    if total.limit is None:
        yield _text(_WIDTH - _MARGIN, y + 4, "no limit", color=_FAINT, anchor="end")
    else:
        yield from _limit(total.limit, scale, bar_y, is_past=not total.fits)
    for index, (line, color) in enumerate(lines):
        row_y = bar_y + _BAR_HEIGHT + _LEGEND_GAP + _LEGEND_STEP * index
        yield from _legend(line, color, share_text(line.nbytes, whole), row_y)


def _segments(lines: list[tuple[PlanLine, str]], scale: int, y: int) -> Iterator[str]:
    x = float(_MARGIN)
    for line, color in lines:
        width = _BAR_WIDTH * line.nbytes / scale
        yield _rect(x, y, width, _BAR_HEIGHT, color)
        label = f"{line.holder}, {size_text(line.nbytes)}"
        if len(label) * _LETTER_WIDTH + 20 < width:
            yield _text(x + 10, y + _BAR_HEIGHT / 2 + 4, label, color="#ffffff", size=12)
        x += width


def _limit(limit: int, scale: int, y: int, *, is_past: bool) -> Iterator[str]:
    x = _MARGIN + _BAR_WIDTH * limit / scale
    color = _BAD if is_past else _INK
    if is_past:
        width = _MARGIN + _BAR_WIDTH - x
        yield _rect(x, y, width, _BAR_HEIGHT, "#ffffff", extra=' fill-opacity="0.55"')
        yield _rect(x, y, width, _BAR_HEIGHT, "url(#past)", extra=' fill-opacity="0.75"')
    yield (
        f'<line x1="{x:.1f}" y1="{y - 10}" x2="{x:.1f}" y2="{y + _BAR_HEIGHT + 8}"'
        f' stroke="{color}" stroke-width="2" stroke-dasharray="5 3"/>'
    )
    anchor = "end" if x > _WIDTH / 2 else "start"
    label = f"limit {size_text(limit)}"
    yield _text(x, y - 16, label, color=color, size=12, weight="bold", anchor=anchor)


def _legend(line: PlanLine, color: str, share: str, y: int) -> Iterator[str]:
    yield _rect(_MARGIN, y - 11, 14, 14, color, extra=' rx="3"')
    yield _text(_MARGIN + 24, y, line.role.value, size=13, weight="bold")
    what = f"{line.holder}: {line.what}"
    yield _text(_MARGIN + 124, y, what, size=13)
    yield _text(_WIDTH - _MARGIN - 84, y, size_text(line.nbytes), size=13, anchor="end")
    yield _text(_WIDTH - _MARGIN, y, share, color=_FAINT, size=13, anchor="end")


def _rect(x: float, y: float, width: float, height: float, fill: str, *, extra: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height}"'
        f' fill="{fill}"{extra}/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    color: str = _INK,
    size: int = 14,
    weight: str = "normal",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" font-weight="{weight}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )
