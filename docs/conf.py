"""Configuration of the documentation site; ``make docs`` builds it, and tests/test_site.py tests the build."""

import re
import sys
import tomllib
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # document this source tree, not an installed package

project = "Everlearn"
html_title = project
author = "The Everlearn developers"
copyright = author
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "cyclopts.sphinx_ext"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
smartquotes_action = "D"  # straight quotes, because readers copy what is inside them

html_theme = "furo"
html_math_renderer = "mathml"  # browsers typeset MathML without scripts, fonts or requests
html_copy_source = False
html_show_sourcelink = False

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lightning", "transformers"]  # extras that the build does not need
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}  # instead of a union of private names of numpy
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

# Base classes that hold the bookkeeping of one method are shown as text, without a page.
nitpick_ignore_regex = [("py:class", r"everlearn\.methods\.\w+\.\w+\.\w+")]

# Aliases of numbers with a range: signatures show the type, and error messages the range.
TYPES_BY_ALIAS = {"NonNegative": "float", "Share": "float", "Some": "int", "Count": "int"}


def setup(app):
    """Register the functions of this file with Sphinx."""
    app.add_html_math_renderer("mathml", (render_inline_math, None), (render_math_block, None))
    app.connect("source-read", adapt_source)
    # Before napoleon, which changes the indentation.
    app.connect("autodoc-process-docstring", format_formulas, priority=400)
    app.connect("autodoc-process-signature", simplify_types)
    app.connect("missing-reference", resolve_public_name)


def render_inline_math(translator, node):
    """Convert a formula within a line to MathML."""
    translator.body.append(to_mathml(node.astext(), "inline"))
    raise SkipNode


def render_math_block(translator, node):
    """Convert a displayed formula to MathML."""
    mathml = to_mathml(node.astext(), "block")
    translator.body.append(f'<div class="math" style="margin: 1rem 0; overflow-x: auto">{mathml}</div>')
    raise SkipNode


def to_mathml(formula, display):
    """Convert LaTeX to MathML at build time."""
    # The converter has no ``aligned`` and would print its ampersands.
    return convert(formula.replace("{aligned}", "{align*}"), display=display)


def adapt_source(app, docname, source):
    """Add what a page needs on the site but not in the repository: links and a table of contents."""
    source[0] = source[0].replace("](../CONTRIBUTING.md", "](contributing.md")
    # The table of methods is also the menu of their pages.
    if docname == "methods/README":
        pages = dict.fromkeys(re.findall(r"\]\((\w+)\.md\)", source[0]))
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def format_formulas(app, what, name, obj, options, lines):
    """Show indented lines of a docstring, which are formulas for a terminal, as they are written."""
    text = re.sub(r"(?m)^(\S.*)(?<!::)\n\n(?=    )", r"\1\n\n.. code-block:: text\n\n", "\n".join(lines))
    lines[:] = text.split("\n")


def simplify_types(app, what, name, obj, options, signature, returns):
    """Remove ranges of fields and default factories from a signature."""
    if signature is None:
        return None
    # Twice, because annotations may be nested.
    for _ in range(2):
        signature = re.sub(r"Annotated\[(.+?)(?:, [\w.~]*(?:Range|Search)\([^)]*\))+\]", r"\1", signature)
    signature = re.sub(rf"\b({'|'.join(TYPES_BY_ALIAS)})\b", lambda m: TYPES_BY_ALIAS[m[1]], signature)
    return signature.replace("<factory>", "...").replace("~", ""), returns


def resolve_public_name(app, env, node, contnode):
    """Link ``everlearn.core.method.Method`` to ``everlearn.Method``; leave names of other packages as text."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    if not target.startswith("everlearn."):
        return contnode
    objects = env.domains.python_domain.objects
    target_name = target.rpartition(".")[2]
    public_names = [name for name in objects if name.rpartition(".")[2] == target_name]
    if len(public_names) != 1:
        return None
    entry = objects[public_names[0]]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode)
