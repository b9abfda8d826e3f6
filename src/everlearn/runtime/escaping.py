"""Escape untrusted names and messages for terminals, Markdown, spreadsheets and plots."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

MARKDOWN = re.compile(r"([\\`*_\[\]<>|~$&])")
FORMULA = ("=", "+", "-", "@")  # first characters that a spreadsheet reads as a formula


def printable(text: str) -> str:
    r"""Escape the control characters of a single line: an escape sequence could rewrite the terminal.

    >>> printable("EWC\x1b[2J\nand ±")
    'EWC\\x1b[2J\\nand ±'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def printable_lines(text: str) -> str:
    r"""Escape the control characters of a message, but keep its line breaks.

    >>> printable_lines("one\ntwo\r")
    'one\ntwo\\r'
    """
    return "\n".join(map(printable, text.split("\n")))


def markdown(text: str) -> str:
    r"""Escape Markdown syntax: images, links, emphasis, formulas, HTML and table cells.

    >>> markdown("![a](http://b) | c_d <b>")
    '!\\[a\\](http://b) \\| c\\_d \\<b\\>'
    """
    return MARKDOWN.sub(r"\\\1", printable(text))


def spreadsheet(value: Any) -> Any:
    """Quote a CSV cell that a spreadsheet would read as a formula, also after leading blanks.

    >>> spreadsheet("  =cmd()"), spreadsheet("EWC"), spreadsheet(-1.5)
    ("'  =cmd()", 'EWC', -1.5)
    """
    if not isinstance(value, str):
        return value
    text = printable(value)

    # Some spreadsheets treat the full-width forms of these characters (such as U+FF1D) like the ASCII ones.
    first_character = unicodedata.normalize("NFKC", value).lstrip()[:1]
    if first_character in FORMULA:
        return f"'{text}"
    return text


def plot_label(text: str) -> str:
    r"""Escape a label for matplotlib: no formula between dollar signs.

    A leading blank is added before an underscore, because matplotlib hides labels that begin with one.

    >>> plot_label("_a $b$")
    ' _a \\$b\\$'
    """
    label = printable(text).replace("$", r"\$")
    if label.startswith("_"):
        return f" {label}"
    return label


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
