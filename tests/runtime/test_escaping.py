"""Names with special characters in terminals, spreadsheets, Markdown and pages."""

import csv
import io
import re
import unicodedata

import pytest
from markdown_it import MarkdownIt

pytest.importorskip("cyclopts")
from everlearn.cli.app import start
from everlearn.results.report.html import html
from everlearn.results.report.overview import overview
from everlearn.results.report.rows import as_csv, as_markdown
from everlearn.results.report.table import table
from everlearn.runtime.escaping import markdown, printable, spreadsheet
from tests.results.report.test_html import result

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\t\u202eCWE"


def test_terminal_escapes_are_shown_as_text(tmp_path, capsys):
    unusual = result(ESCAPES, stream=ESCAPES, **{ESCAPES: 1.0})
    assert CONTROL.search(ESCAPES)
    for shown in (table([unusual]), overview([unusual]), str(unusual), as_markdown([unusual]), as_csv([unusual])):
        assert not CONTROL.search(shown) and "0;owned" in shown
    assert "\x1b" not in html([unusual], ESCAPES).split("<script", 1)[0].split("<body>", 1)[1]
    unusual.save(tmp_path)
    (tmp_path / f"{ESCAPES[:5]}.json").write_text("{")
    assert start(["report", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert not CONTROL.search(printed.out + printed.err) and "\\x1b]0;o.json is not a valid" in printed.err


@pytest.mark.parametrize("lead", ["", " ", "\t", "\r", "\n", "\u00a0 ", "\u3000"], ids=ascii)
@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\uff1d"], ids=ascii)
def test_no_cell_is_a_formula(lead, sign):
    name = f"{lead}{sign}HYPERLINK(1)"
    row = next(csv.DictReader(io.StringIO(as_csv([result(name, stream=name, scenario=name)]))))
    for column in ("method", "stream", "scenario"):
        assert unicodedata.normalize("NFKC", row[column]).lstrip()[0] not in "=+-@" and "HYPERLINK" in row[column]
    assert spreadsheet(-1.5) == -1.5 and spreadsheet("EWC - a") == "EWC - a"


@pytest.mark.parametrize(
    "name", ["![x](http://a.b/c.png)", "<img src=x>", "a|b", "**bold** _i_ `c`", "[a](b)", "a\n## b", "$$x$$", "\\|"]
)
def test_markdown_shows_names_literally(name):
    rendered = MarkdownIt("commonmark").enable("table")
    text = as_markdown([result(name, stream=name)])
    tokens = [child for token in rendered.parse(text) for child in (token.children or [])]
    assert {token.type for token in tokens} <= {"text", "text_special"}
    cells = [token.content for token in rendered.parse(text) if token.type == "inline"]
    kinds = [token.type for token in rendered.parse(text)]
    assert kinds.count("td_open") == kinds.count("th_open") > 5, "names add no cells"
    assert sum(markdown(name) in cell or name in cell for cell in cells) >= 1
    assert printable(name) in "".join(token.content for token in tokens)
