"""Names are words of the field: words that a reader would have to learn first are banned as identifiers."""

import ast
from pathlib import Path

import everlearn

ROOT = Path(everlearn.__file__).parent
BANNED = set(
    """
    said says told tells came heard hears awake asleep bowl owes hurries exam exams course lesson journal standing
    foreseen own here there whole now one some few every each others found made place thing things word marks
    mine ours theirs apart beside lent silent live height again gone gone_on unpulled seen_now lots doubts witnesses
    agreed same held holding answer answers asked ask left
    """.split()  # noqa: SIM905 - a list of quoted words is harder to read
)


def bound_names(tree):
    """Every name that a file binds, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno


def banned_names(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(name, line) for name, line in bound_names(tree) if name.strip("_").lower() in BANNED]


def test_no_identifier_is_a_banned_word():
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted(ROOT.rglob("*.py"))
        for name, line in banned_names(path)
    ]
    assert not found, "use a noun phrase or a word of the field:\n" + "\n".join(found)


def test_every_kind_of_binding_is_seen(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("def told(own):\n    self.said = [one for one in own]\n")
    assert [name for name, _ in banned_names(source)] == ["told", "own", "said", "one"]
