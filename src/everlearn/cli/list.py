"""The command ``everlearn list``: everything that has a name, read from the source files without importing torch."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib import resources

from everlearn.experiments.published_tables import read_table, table_names
from everlearn.methods import METHODS


def print_lists() -> None:
    """Print the methods, streams, models and published tables."""
    registries = {
        "Methods": {**METHODS.targets, "joint": "everlearn.core.stream:Stream.joint"},
        "Streams": _read_registry("everlearn.streams", "STREAMS"),
        "Models": _read_registry("everlearn.nets", "NETS"),
    }
    for title, registry in registries.items():
        print(f"{title}:")
        for name, target in registry.items():
            print(f"  {name:19s} {_summary_line(target)}")
        print()

    print("Published tables, for 'everlearn reproduce':")
    for name in table_names():
        table = read_table(name)
        print(f"  {name:19s} {table.title} ({table.source})")
    print()
    print("'everlearn show METHOD' describes a method; 'a+b' chains two methods.")


def _read_registry(package: str, table: str) -> dict[str, str]:
    """Read a table of functions from the source of a package: the module and function of each name.

    Streams and models have the names of their modules, so that the package cannot import them later.

    >>> _read_registry("everlearn.nets", "NETS")["mlp"]
    'everlearn.nets.mlp:mlp'
    """
    tree = _parse_module(package)
    imports = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            imports.update({alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names})

    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table and isinstance(node.value, ast.Dict):
            names = [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return dict(zip(names, [imports[ast.unparse(value)] for value in node.value.values], strict=True))
    raise LookupError(f"{package} has no table {table}.")


def _summary_line(target: str) -> str:
    """Read the first line of the docstring of a class or function, given as ``package.module:name``.

    >>> _summary_line("everlearn.nets.mlp:mlp")
    'Create a multi-layer perceptron: linear layers with ReLU between them. Images are flattened.'
    """
    module, _, path = target.partition(":")
    body = _parse_module(module).body
    docstring = None
    for name in path.split("."):
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                docstring = ast.get_docstring(node)
                body = node.body
                break
    return inspect.cleandoc(docstring or "").partition("\n")[0]


@cache
def _parse_module(name: str) -> ast.Module:
    """Parse the source of a module of this package."""
    *folders, module = name.split(".")[1:]
    folder = resources.files("everlearn").joinpath(*folders)
    file = folder / f"{module}.py"
    if not file.is_file():
        file = folder / module / "__init__.py"
    return ast.parse(file.read_text(encoding="utf-8"))
