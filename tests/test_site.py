"""Test that the site builds without warnings, needs no network, typesets formulas and documents all public names."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

import everlearn

ROOT = Path(__file__).parents[1]
SPHINX_BUILD = "import sys; from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"
URL_ATTRIBUTES = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class RequestParser(HTMLParser):
    """Collects the URLs that a browser requests when it opens a page."""

    def __init__(self):
        super().__init__()
        self.urls = []

    def handle_starttag(self, tag, attributes):
        self.urls += [value for name, value in attributes if name == URL_ATTRIBUTES.get(tag)]


@pytest.mark.slow
def test_the_site(tmp_path):  # a single test, because the build takes most of the time
    arguments = ["-W", "--keep-going", "-n", "-q", "-d", tmp_path / "trees", ROOT / "docs", tmp_path / "html"]
    command = [sys.executable, "-c", SPHINX_BUILD, *map(str, arguments)]
    build = subprocess.run(command, check=False, capture_output=True, text=True)
    assert not build.returncode and not build.stderr, build.stderr
    pages = {p.relative_to(tmp_path / "html").as_posix(): p.read_text("utf-8") for p in tmp_path.rglob("*.html")}

    for name, text in pages.items():
        parser = RequestParser()
        parser.feed(text)
        assert not [url for url in parser.urls if re.match(r"(\w+:)?//", url)], f"{name} needs the network"
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text("utf-8")), f"{style} needs the network"

    # LaTeX that the converter does not know stays in the page.
    for name, text in pages.items():
        formulas = re.findall(r"<math.*?</math>", text, re.DOTALL)
        assert not [f for f in formulas if "\\" in f or "<mi>&</mi>" in f], f"{name} has a formula that is not typeset"
        assert formulas or not re.fullmatch(r"methods/(ewc|si|mas|l2|lwf)\.html", name), f"{name} has no formula"

    reference = "".join(text for name, text in pages.items() if name.startswith("api/"))
    public = [name for name in everlearn.__all__ if not isinstance(getattr(everlearn, name), ModuleType)]
    assert not [name for name in public if f'id="everlearn.{name}"' not in reference], "missing in docs/api"
    assert "Annotated[" not in reference and "&lt;factory&gt;" not in reference, "signatures are for people"
