"""The documentation site: ``make docs`` builds it, tests/test_site.py builds it with warnings as errors."""

import re
import sys
import tomllib
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # the reference is of the code beside these pages, whatever is installed

project = html_title = "Everlearn"
author = copyright = "The Everlearn developers"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "cyclopts.sphinx_ext"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
smartquotes_action = "D"  # straight quotes: what stands in them is often typed

html_theme = "furo"
html_math_renderer = "mathml"  # browsers typeset MathML themselves: no script, no font, no request
html_copy_source = html_show_sourcelink = False

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lightning", "transformers"]  # extras that a reader of the site need not have
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}  # else a union of numpy's private names
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

# Kinds of numbers with a range; the signature says the kind, an error the range.
RANGED = {"NonNegative": "float", "Share": "float", "Some": "int", "Count": "int"}


def setup(app):
    """Connect the functions below."""
    app.add_html_math_renderer("mathml", (show_inline_math, None), (show_math_block, None))
    app.connect("source-read", as_a_site)
    app.connect("autodoc-process-docstring", formulas, priority=400)  # before napoleon, which moves the indentation
    app.connect("autodoc-process-signature", plain_types)
    app.connect("missing-reference", by_public_name)


def show_inline_math(translator, node):
    """Typeset a formula within a line."""
    translator.body.append(convert(node.astext()))
    raise SkipNode


def show_math_block(translator, node):
    """Typeset a formula on lines of its own."""
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise SkipNode


def as_a_site(app, docname, source):
    """What a page needs here and would be noise where the repository shows it."""
    source[0] = source[0].replace("](../CONTRIBUTING.md", "](contributing.md")
    if docname == "methods/README":  # its table is also the menu of the methods' pages
        pages = dict.fromkeys(re.findall(r"\]\((\w+)\.md\)", source[0]))
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def formulas(app, what, name, obj, options, lines):
    """Docstrings are written for a terminal: what stands indented after a blank line is a formula, line by line."""
    text = re.sub(r"(?m)^(\S.*)(?<!::)\n\n(?=    )", r"\1\n\n.. code-block:: text\n\n", "\n".join(lines))
    lines[:] = text.split("\n")


def plain_types(app, what, name, obj, options, signature, returns):
    """Signatures without the ranges that the fields of methods carry, and without dataclasses' factories."""
    if signature is None:
        return None
    for _ in range(2):  # one may stand in another
        signature = re.sub(r"Annotated\[(.+?)(?:, [\w.~]*(?:Range|Search)\([^)]*\))+\]", r"\1", signature)
    signature = re.sub(rf"\b({'|'.join(RANGED)})\b", lambda m: RANGED[m[1]], signature)
    return signature.replace("<factory>", "...").replace("~", ""), returns


def by_public_name(app, env, node, contnode):
    """Refer to ``everlearn.core.method.Method`` as ``everlearn.Method``; leave names of other packages as text."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    if not target.startswith("everlearn."):
        return contnode
    objects = env.domains.python_domain.objects
    public = [o for o in objects if o.rpartition(".")[2] == target.rpartition(".")[2]]
    if len(public) != 1:
        return None
    entry = objects[public[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode)
