"""What a CUDA text includes, found without a preprocessor.

Conditions are not evaluated: an include that might be taken is one. Too much is harmless, too
little would leave a header out of the cache key.
"""

import re
from dataclasses import dataclass

_SPACE = r"(?:[^\S\n]|/\*[\s\S]*?\*/)*"
# It begins with a literal, which is found ten times as fast as any other beginning.
_NAMED = re.compile(
    rf'include(?:_next)?{_SPACE}(?:\({_SPACE})?(?:<([^>\n]+)>|"([^"\n]+)"|([A-Za-z_]\w*))'
)
_HASH = re.compile(rf"(?:#|%:){_SPACE}$")
_CONTINUED_LINE = re.compile(r"\\[ \t]*\r?\n")
_LONGEST_DIRECTIVE = 1000


@dataclass(frozen=True)
class Include:
    """Name one header that a text may include.

    Args:
        name: as written.
        is_quoted: written in quotes, not in angle brackets.
        is_certain: the text needs it, or did if every condition held; otherwise it may be missing:
            it is only asked for, by __has_include, or stands in a line's comment.
    """

    name: str
    is_quoted: bool
    is_certain: bool = True


@dataclass(frozen=True)
class Scan:
    """Hold what a text includes.

    Args:
        includes: each once.
        macro: one that names a header, which only a preprocessor could follow; mostly empty.
    """

    includes: tuple[Include, ...] = ()
    macro: str = ""


def scan(text: str) -> Scan:
    """Return every header that a text names."""
    joined = _CONTINUED_LINE.sub("", text)
    found: dict[Include, None] = {}
    macro = ""
    for match in _NAMED.finditer(joined):
        before = _before(joined, match.start())
        is_question = before.endswith("__has_")
        directive = None if is_question else _HASH.search(before)
        if not is_question and directive is None:
            continue
        in_brackets, in_quotes, by_macro = match.groups(default="")
        is_certain = directive is not None and _is_first(before[: directive.start()])
        if by_macro and is_certain:
            macro = macro or by_macro
        elif not by_macro:
            found[Include(in_brackets or in_quotes, bool(in_quotes), is_certain)] = None
    return Scan(tuple(found), macro)


def _before(text: str, end: int) -> str:
    """Return the line up to a place; more where a comment ends in it that began above."""
    begin = text.rfind("\n", 0, end) + 1
    if "*/" in text[begin:end]:
        begin = max(0, end - _LONGEST_DIRECTIVE)
    return text[begin:end]


def _is_first(before: str) -> bool:
    """Say whether nothing but blanks and comments stand in front of a directive in its line."""
    line = before.rpartition("\n")[2].strip()
    return not line or line.endswith("*/")
