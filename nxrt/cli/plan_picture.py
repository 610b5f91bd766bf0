"""The picture of a plan: a stacked bar for each tier, drawn as SVG by hand, alone or in a page.

Rendering only; every figure comes from the plan.
"""

from collections.abc import Iterator
from pathlib import Path

from nxrt.cli.plan import share_text, title, verdict
from nxrt.cli.sizes import size_text
from nxrt.cli.svg import (
    BAD,
    FAINT,
    GOOD,
    GROUND,
    INK,
    MARGIN,
    OTHER_COLOR,
    ROLE_COLORS,
    TRACK,
    WIDTH,
    document,
    ink_on,
    mixed,
    page,
    rect,
    text,
)
from nxrt.cli.svg import line as svg_line
from nxrt.errors import InvalidInputError
from nxrt.planning.planner import Plan, PlanLine, TierTotal

SUFFIXES = (".svg", ".html")

_BAR_WIDTH, _BAR_HEIGHT = WIDTH - 2 * MARGIN, 46
_TOP, _TIER_HEAD, _LEGEND_GAP, _LEGEND_STEP, _TIER_GAP, _FOOT_STEP = 104, 36, 30, 24, 34, 22
_LETTER_WIDTH = 7.0
"""Pixels of an average letter at 12 px, to decide whether a label fits into its segment."""

_MOST_WHITE = 0.7
"""How much white the last line of a role gets; the first gets none."""

_DEFS = (
    '<defs><pattern id="past" width="8" height="8" patternUnits="userSpaceOnUse"'
    ' patternTransform="rotate(45)">'
    f'<rect width="3" height="8" fill="{BAD}"/></pattern></defs>'
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
    picture = as_html(plan) if path.suffix == ".html" else as_svg(plan)
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        found = f"{path}: {error.strerror or error}"
        raise InvalidInputError("--picture", found=found, accepted="a writable file") from error


def as_html(plan: Plan) -> str:
    """Return a page that holds the picture."""
    return page(_name(plan), as_svg(plan))


def as_svg(plan: Plan) -> str:
    """Return the picture."""
    body: list[str] = []
    y = _TOP
    for total in plan.totals:
        lines = _lines_by_role(plan, total)
        body += _tier(total, lines, y)
        y += _TIER_HEAD + _BAR_HEIGHT + _LEGEND_GAP + _LEGEND_STEP * len(lines) + _TIER_GAP
    for index, answer in enumerate(verdict(plan)[1:]):
        color = INK if index == 0 and not plan.fits else FAINT
        body.append(text(MARGIN, y, answer, color=color, size=13))
        y += _FOOT_STEP
    return document(_name(plan), y + 12, [_DEFS, *_heading(plan), *body])


def _name(plan: Plan) -> str:
    return f"nxrt plan: {title(plan)}"


def _heading(plan: Plan) -> Iterator[str]:
    answer = verdict(plan)[0]
    color = GOOD if plan.fits else BAD
    yield text(MARGIN, 46, title(plan), size=22, weight="bold")
    yield f'<circle cx="{MARGIN + 6}" cy="69" r="6" fill="{color}"/>'
    yield text(MARGIN + 20, 74, answer, color=color, size=14, weight="bold")


def _lines_by_role(plan: Plan, total: TierTotal) -> list[tuple[PlanLine, str]]:
    """Return the lines of one tier with a colour for each, the lines of one role side by side."""
    lines = [line for line in plan.lines if line.tier == total.tier]
    colored = []
    for role in dict.fromkeys(line.role for line in lines):
        of_role = [line for line in lines if line.role is role]
        for index, line in enumerate(of_role):
            white = _MOST_WHITE * index / max(len(of_role) - 1, 1)
            color = mixed(ROLE_COLORS.get(role.value, OTHER_COLOR), white)
            colored.append((line, color))
    return colored


def _tier(total: TierTotal, lines: list[tuple[PlanLine, str]], y: int) -> Iterator[str]:
    whole = total.nbytes if total.limit is None else total.limit
    scale = max(total.nbytes, whole, 1)
    bar_y = y + _TIER_HEAD
    needed = size_text(total.nbytes)
    share = "" if total.limit is None else f", {share_text(total.nbytes, whole)} of the limit"
    yield text(MARGIN, y + 4, str(total.tier), size=16, weight="bold")
    yield text(MARGIN + 92, y + 4, f"{needed}{share}", color=FAINT, size=14)
    yield rect(MARGIN, bar_y, _BAR_WIDTH, _BAR_HEIGHT, TRACK)
    yield from _segments(lines, scale, bar_y)
    if total.limit is None:
        yield text(WIDTH - MARGIN, y + 4, "no limit", color=FAINT, anchor="end")
    else:
        yield from _limit(total.limit, scale, bar_y, is_past=not total.fits)
    for index, (line, color) in enumerate(lines):
        row_y = bar_y + _BAR_HEIGHT + _LEGEND_GAP + _LEGEND_STEP * index
        yield from _legend(line, color, share_text(line.nbytes, whole), row_y)


def _segments(lines: list[tuple[PlanLine, str]], scale: int, y: int) -> Iterator[str]:
    x = float(MARGIN)
    for line, color in lines:
        width = _BAR_WIDTH * line.nbytes / scale
        yield rect(x, y, width, _BAR_HEIGHT, color)
        label = f"{line.holder}, {size_text(line.nbytes)}"
        if len(label) * _LETTER_WIDTH + 20 < width:
            yield text(x + 10, y + _BAR_HEIGHT / 2 + 4, label, color=ink_on(color), size=12)
        x += width


def _limit(limit: int, scale: int, y: int, *, is_past: bool) -> Iterator[str]:
    x = MARGIN + _BAR_WIDTH * limit / scale
    color = BAD if is_past else INK
    if is_past:
        width = MARGIN + _BAR_WIDTH - x
        yield rect(x, y, width, _BAR_HEIGHT, GROUND, extra=' fill-opacity="0.55"')
        yield rect(x, y, width, _BAR_HEIGHT, "url(#past)", extra=' fill-opacity="0.75"')
    dashes = ' stroke-width="2" stroke-dasharray="5 3"'
    yield svg_line(x, y - 10, x, y + _BAR_HEIGHT + 8, color, extra=dashes)
    anchor = "end" if x > WIDTH / 2 else "start"
    label = f"limit {size_text(limit)}"
    yield text(x, y - 16, label, color=color, size=12, weight="bold", anchor=anchor)


def _legend(line: PlanLine, color: str, share: str, y: int) -> Iterator[str]:
    yield rect(MARGIN, y - 11, 14, 14, color, extra=' rx="3"')
    yield text(MARGIN + 24, y, line.role.value, size=13, weight="bold")
    what = f"{line.holder}: {line.what}"
    yield text(MARGIN + 124, y, what, size=13)
    yield text(WIDTH - MARGIN - 84, y, size_text(line.nbytes), size=13, anchor="end")
    yield text(WIDTH - MARGIN, y, share, color=FAINT, size=13, anchor="end")
