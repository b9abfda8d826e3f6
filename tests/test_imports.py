"""Imports between rooms follow one order, and importing everlearn is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import everlearn

ROOT = Path(everlearn.__file__).parent
# A room may import itself and the rooms of the lines above its own; rooms in one line do not import each other.
ROOMS = [
    {"runtime"},
    {"core"},
    {"memory", "curvature", "surgery"},
    {"optim", "nets"},
    {"methods"},
    {"results"},
    {"trainer"},
    {"sources"},
    {"streams"},
    {"integrations"},
    {"experiments"},
    {"tuning", "updating"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def imported_rooms(path):
    """The rooms that a file imports, by either statement and at any depth, but for the type checker."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in list(tree.body):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            tree.body.remove(node)
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports by a relative path"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "everlearn":
                assert len(parts) > 1, f"{path}:{node.lineno} imports the entire package"
                yield parts[1], node.lineno


def test_rooms_import_only_lower_rooms():
    rooms = set()
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        rooms.add(room)
        for imported_room, line in imported_rooms(path):
            assert imported_room == room or LEVEL[imported_room] < LEVEL[room], (
                f"{path}:{line}: {room} may not import {imported_room}"
            )
    assert rooms == set(LEVEL), "add a new room to ROOMS"


def test_both_import_statements_are_recognized(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("import everlearn.cli.app\ndef f():\n    from everlearn.trainer import run\n")
    assert [room for room, _ in imported_rooms(source)] == ["cli", "trainer"]


def test_importing_everlearn_loads_only_its_dependencies():
    code = (
        "import sys, torch, tqdm.auto; before = set(sys.modules); from everlearn import *; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded_modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    allowed = {"everlearn", "torch", "numpy", "safetensors", "filelock", "tqdm", *sys.stdlib_module_names}
    assert set(loaded_modules) <= allowed
    assert not {"cyclopts", "pydantic", "yaml", "torch._dynamo"} & set(loaded_modules)


def test_every_public_name_is_imported_on_first_use():
    code = (
        "import sys, everlearn; assert 'torch' not in sys.modules; "
        "missing = set(everlearn.__all__) - set(dir(everlearn)); "
        "from everlearn import *; print(*missing, *set(everlearn.__all__) - set(globals()))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == []
    with pytest.raises(AttributeError, match="module 'everlearn' has no attribute 'EVC'"):
        everlearn.EVC  # noqa: B018
    assert all(getattr(everlearn.methods, name) is getattr(everlearn, name) for name in everlearn.methods.__all__)
