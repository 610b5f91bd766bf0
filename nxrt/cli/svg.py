"""What the pictures share: shapes, text, colours and pages, written as SVG by hand.

It knows nothing of what is drawn. Files refer to nothing outside themselves and run no scripts.
"""

from collections.abc import Iterable
from html import escape

from nxrt.memory.tier import Role

WIDTH, MARGIN = 960, 40
INK, FAINT, TRACK, GROUND = "#1d2733", "#66727f", "#e8ecf0", "#ffffff"
GOOD, BAD = "#1c7c4c", "#c0392b"
_DARK = {INK: "#e8edf2", FAINT: "#9aa7b4", TRACK: "#2b3440", GROUND: "#161c24"}
_DARK |= {GOOD: "#5fc795", BAD: "#ff8575"}
_PAGE_GROUND = ("#f4f6f8", "#0d1117")

Color = tuple[int, int, int]
ROLE_COLORS: dict[str, Color] = {
    Role.WEIGHTS.value: (104, 112, 122),
    Role.KV_CACHE.value: (0, 114, 178),
    Role.STATE_GROUP.value: (0, 158, 115),
    Role.ACTIVATION.value: (86, 180, 233),
    Role.WORKSPACE.value: (230, 159, 0),
    Role.STAGING.value: (204, 121, 167),
    Role.GRAPH.value: (213, 94, 0),
}
"""Told apart by people with any kind of colour vision.
Source: M. Okabe and K. Ito, "Color Universal Design", 2008."""
OTHER_COLOR: Color = (176, 184, 192)

_FONT = "font-family=\"'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\""


def mixed(color: Color, white: float = 0.0) -> str:
    """Return a colour with a share of white, from 0 to 1, as SVG writes it."""
    red, green, blue = (round(part + (255 - part) * white) for part in color)
    return f"#{red:02x}{green:02x}{blue:02x}"


def ink_on(fill: str) -> str:
    """Return black or white, whichever can be read on a colour; neither changes in the dark."""
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#fefefe" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#101418"


def printable(text: str, most: int = 120) -> str:
    """Return a name as it may be drawn: nothing that XML refuses, and not endlessly long."""
    shown = "".join(letter if letter.isprintable() else "·" for letter in text)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def rect(x: float, y: float, width: float, height: float, fill: str, *, extra: str = "") -> str:
    """Return a filled rectangle; `extra` are more attributes."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height}"'
        f' fill="{fill}"{extra}/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, extra: str = "") -> str:
    """Return a straight line."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{stroke}"{extra}/>'


def text(
    x: float,
    y: float,
    what: str,
    *,
    color: str = INK,
    size: int = 14,
    weight: str = "normal",
    anchor: str = "start",
    extra: str = "",
) -> str:
    """Return one line of text; `y` is its base line."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" font-weight="{weight}"'
        f' text-anchor="{anchor}"{extra}>{escape(printable(what, 400))}</text>'
    )


def document(name: str, height: float, body: Iterable[str]) -> str:
    """Return a whole picture of the common width, light or dark as its reader likes."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}"'
        f' width="{WIDTH}" height="{height:.0f}" role="img" {_FONT}>'
    )
    ground = f'<rect width="{WIDTH}" height="{height:.0f}" rx="10" fill="{GROUND}"/>'
    title = f"<title>{escape(printable(name))}</title>"
    return "\n".join([head, title, _dark_style(), ground, *body, "</svg>", ""])


def _dark_style() -> str:
    # A rule of a style sheet wins over the attribute of the same name.
    rules = "".join(
        f'[{attribute}="{light}"]{{{attribute}:{dark}}}'
        for light, dark in _DARK.items()
        for attribute in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"


def page(name: str, picture: str, rest: str = "") -> str:
    """Return a page that holds a picture, and markup below it."""
    light, dark = _PAGE_GROUND
    style = (
        f"body {{ margin: 2rem auto; max-width: {WIDTH}px; background: {light}; color: {INK};"
        " font-family: sans-serif; } svg { width: 100%; height: auto; }"
        " table { border-collapse: collapse; } th, td { padding: 0.2rem 1rem 0.2rem 0;"
        " text-align: left; } td.number { text-align: right; }"
        f" @media (prefers-color-scheme: dark) {{ body {{ background: {dark};"
        f" color: {_DARK[INK]}; }} }}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{escape(printable(name))}</title>\n<style>{style}</style>\n"
        f"</head>\n<body>\n{picture}{rest}</body>\n</html>\n"
    )


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str | int]]) -> str:
    """Return a table of a page, empty where it has no rows; numbers stand to the right."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return f"<h2>{escape(title)}</h2>\n<table>\n<tr>{head}</tr>\n{body}</table>\n" if body else ""


def _cell(value: str | int) -> str:
    if isinstance(value, int):
        return f'<td class="number">{value:,}</td>'
    return f"<td>{escape(printable(value, 1000))}</td>"
