"""The documentation site builds without a warning, needs no network to be read, and leaves no public name out."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

import everlearn

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"  # what sphinx-build runs
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Requests(HTMLParser):
    """What a browser fetches by itself when it opens a page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name == FETCHED.get(tag)]


@pytest.mark.slow
def test_the_site(tmp_path):  # one test, because the build takes most of its time
    arguments = ["-W", "--keep-going", "-n", "-q", "-d", tmp_path / "trees", ROOT / "docs", tmp_path / "html"]
    built = subprocess.run(
        [sys.executable, "-c", BUILD, *map(str, arguments)], check=False, capture_output=True, text=True
    )
    assert not built.returncode and not built.stderr, built.stderr
    pages = {p.relative_to(tmp_path / "html").as_posix(): p.read_text("utf-8") for p in tmp_path.rglob("*.html")}

    for name, text in pages.items():
        requests = Requests()
        requests.feed(text)
        assert not [url for url in requests.found if re.match(r"(\w+:)?//", url)], f"{name} needs the network"
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text("utf-8")), f"{style} needs the network"

    reference = "".join(text for name, text in pages.items() if name.startswith("api/"))
    public = [name for name in everlearn.__all__ if not isinstance(getattr(everlearn, name), ModuleType)]
    assert not [name for name in public if f'id="everlearn.{name}"' not in reference], "missing in docs/api"
    assert "Annotated[" not in reference and "&lt;factory&gt;" not in reference, "signatures are for people"
