"""The documentation site: ``make docs`` builds it, tests/test_site.py builds it with warnings as errors."""

import re
import sys
import tomllib
from pathlib import Path

from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # the reference is of the code beside these pages, whatever is installed

project = html_title = "Everlearn"
author = copyright = "The Everlearn developers"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "cyclopts.sphinx_ext"]
myst_heading_anchors = 3
smartquotes_action = "D"  # straight quotes: what stands in them is often typed

html_theme = "furo"
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
    app.connect("source-read", as_a_site)
    app.connect("autodoc-process-docstring", formulas, priority=400)  # before napoleon, which moves the indentation
    app.connect("autodoc-process-signature", plain_types)
    app.connect("missing-reference", by_public_name)


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
    """``everlearn.method.Method`` is documented as ``everlearn.Method``; names of other packages stay plain text."""
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
