"""Imports flow one way, and importing is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import everlearn

ROOT = Path(everlearn.__file__).parent
# Each may import what stands before it, and its own package.
ORDER = [
    "extras", "orphans", "stdio", "escaping", "distributed", "params", "running_statistics", "forward", "seeds", "atomic", "fingerprint", "cost", "metrics", "result_format", "data", "likelihood", "batch", "stream", "traits", "memory", "curvature", "optim", "heads", "nets", "fields", "loops", "attachment", "method",
    "penalty", "replay", "teacher", "tracing", "growth", "locks", "isolation", "columns", "extractors", "balance", "beside", "merging", "splitting", "watching", "expanding", "methods", "advice", "results", "checks", "trainer", "integrations", "sources", "streams", "report", "tuning", "updating", "cli",
]  # fmt: skip


def imports(path):
    tree = ast.parse(path.read_text())
    for block in [
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]:
        tree.body.remove(block)  # words for the type checker, not imports
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("everlearn"):
            names = [node.module] if node.module != "everlearn" else [f"everlearn.{a.name}" for a in node.names]
            yield from (name.split(".")[1] for name in names if "." in name)


def test_imports_flow_one_way():
    seen = set()
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        seen.add(own)
        for other in imports(path):
            assert other == own or ORDER.index(other) < ORDER.index(own), f"{path.name} may not import {other}"
    assert seen == set(ORDER), "a new part needs its place in the order"


def test_the_core_imports_only_its_dependencies():
    code = (
        "import sys, torch, tqdm.auto; before = set(sys.modules); import everlearn; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    allowed = {"everlearn", "torch", "numpy", "safetensors", "tqdm", *sys.stdlib_module_names}
    assert set(new) <= allowed
    assert not {"cyclopts", "pydantic", "yaml", "torch._dynamo"} & set(new)
