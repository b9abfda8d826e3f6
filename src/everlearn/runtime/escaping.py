"""Names and messages of others, as text that a terminal, a document, a spreadsheet or a picture takes for nothing else."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

MARKDOWN = re.compile(r"([\\`*_\[\]<>|~$&])")
FORMULA = ("=", "+", "-", "@")  # what a spreadsheet takes for the beginning of a formula


def printable(text: str) -> str:
    r"""A text of one line without control characters: an escape sequence could rewrite what a terminal shows.

    >>> printable("EWC\x1b[2J\nand ±")
    'EWC\\x1b[2J\\nand ±'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def printable_lines(text: str) -> str:
    r"""The same for a message that may have several lines.

    >>> printable_lines("one\ntwo\r")
    'one\ntwo\\r'
    """
    return "\n".join(map(printable, text.split("\n")))


def markdown(text: str) -> str:
    r"""A text that Markdown shows as it is: no image, link, emphasis, formula, HTML or cell of its own.

    >>> markdown("![a](http://b) | c_d <b>")
    '!\\[a\\](http://b) \\| c\\_d \\<b\\>'
    """
    return MARKDOWN.sub(r"\\\1", printable(text))


def spreadsheet(value: Any) -> Any:
    """A cell of a CSV file that no spreadsheet takes for a formula, also where blanks come first.

    >>> spreadsheet("  =cmd()"), spreadsheet("EWC"), spreadsheet(-1.5)
    ("'  =cmd()", 'EWC', -1.5)
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    # Wide forms of these signs (U+FF1D and its like) count as the signs themselves in some spreadsheets.
    beginning = unicodedata.normalize("NFKC", value).lstrip()[:1]
    return f"'{text}" if beginning in FORMULA else text


def plot_label(text: str) -> str:
    r"""A text that matplotlib shows as it is: no formula between dollar signs, and not left out for a leading underscore.

    >>> plot_label("_a $b$")
    ' _a \\$b\\$'
    """
    label = printable(text).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
