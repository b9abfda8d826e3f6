"""What lists the methods is written from METHODS and their traits, so that a new method is four files."""

import ast
import os
import runpy
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import everlearn
from everlearn import Traits

ROOT = Path(__file__).parents[1]

METHOD = '''"""Small steps: protect old tasks by a smaller learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from everlearn.core.hyperparameters import NonNegative
from everlearn.core.method import Method
from everlearn.core.traits import Traits


@dataclass(eq=False)
class SmallSteps(Method):
    """Small steps (our example): scale gradients down after the first task.

        L = L_task,   g ← factor · g

    Args:
        factor: of the gradients of later tasks.
    """

    traits = Traits(family="regularization", pro="no memory", con="learns slowly")

    factor: NonNegative = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_tasks = 0

    def before_step(self, model: nn.Module) -> None:
        """Scale the gradients."""
        if self.num_tasks:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad *= self.factor

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Count the tasks."""
        self.num_tasks += 1
'''
ROW = '        "small-steps": "everlearn.methods.regularization.small_steps:SmallSteps",\n'
TEST = """import torch

from everlearn import SmallSteps


def test_later_tasks_have_smaller_gradients():
    model = torch.nn.Linear(2, 1)
    method = SmallSteps(factor=0.5)
    for expected in (1.0, 0.5):
        model.weight.grad = torch.ones(1, 2)
        method.before_step(model)
        assert model.weight.grad.tolist() == [[expected, expected]]
        method.end_task(model, None)
"""
PAGE = "# Small steps\n\n`SmallSteps(factor=0.1)`, `--methods small-steps`\n"


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds this source tree to it
    return runpy.run_path(str(ROOT / "docs/tables.py"))


def test_what_lists_methods_is_up_to_date(tables):
    for file, text in tables["render_files"]().items():
        assert (ROOT / file).read_text(encoding="utf-8") == text, f"{file} is out of date: run make tables"


def test_rows_of_needs_and_costs(tables):
    cells = tables["needs_and_costs"]
    unmeasured = Traits(family="heads", pro="", con="", needs_task=True, zero_forgetting=True)
    assert cells(unmeasured)[:7] == ["yes", "infers", "infers", "yes", "no", "yes", "yes"]
    assert cells(unmeasured)[7:] == ["no", "not measured", "not measured"]
    costs = {"step": 2.0, "step_growth": 0.5, "copies": (-1.0, 1.0)}
    replay = Traits(family="replay", pro="", con="", keeps_examples=True, weak={"class": "weak"}, **costs)
    assert cells(replay)[:3] == ["yes", "yes", "no"]
    assert cells(replay)[-2:] == ["N - 1 and examples", "2 + 0.5 (N - 3)"]
    settings = {"keeps_examples": True, "copies": (0.0,), "without_boundaries": {"every": 1}}
    online = Traits(family="replay", pro="", con="", **settings)
    assert cells(online)[-4:] == ["no, with `every`", "no", "examples", "not measured"]
    costs = {"step": 0.0, "copies": (0.5,), "copies_scale": False}
    head = Traits(family="heads", pro="", con="", needs_pretrained="it learns no features", **costs)
    assert cells(head)[-3:] == ["yes", "statistics, here 0.5", "0"]


def test_what_cannot_be_written_is_refused(tables):
    with pytest.raises(SystemExit, match=r"has 121 characters, allowed: 120. Shorten the first line of the docstring"):
        tables["replace_blocks"]("README.md", {"methods": ["x" * 121]})
    with pytest.raises(SystemExit, match="should occur once each"):
        tables["replace_blocks"]("README.md", {"streams": []})


def test_the_stub_names_what_is_imported():
    tree = ast.parse((ROOT / "src/everlearn/methods/__init__.pyi").read_text(encoding="utf-8"))
    modules = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            modules |= {alias.name: node.module for alias in node.names}
    del modules["LazyTable"]
    for name, module in modules.items():
        assert getattr(everlearn.methods, name) is getattr(import_module(module), name)
    (names,) = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    assert sorted(names) == sorted(everlearn.methods.__all__) == sorted([*modules, "METHODS"])


@pytest.mark.slow
def test_a_new_method_is_four_files(tmp_path):
    for folder in ("src", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("README.md", "pyproject.toml", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / file, tmp_path)

    (tmp_path / "src/everlearn/methods/regularization/small_steps.py").write_text(METHOD, encoding="utf-8")
    registry = tmp_path / "src/everlearn/methods/__init__.py"
    last_row = '        "lwf": "everlearn.methods.regularization.lwf:LwF",\n'
    text = registry.read_text(encoding="utf-8")
    assert last_row in text
    registry.write_text(text.replace(last_row, last_row + ROW), encoding="utf-8")
    (tmp_path / "tests/methods/regularization/test_small_steps.py").write_text(TEST, encoding="utf-8")
    (tmp_path / "docs/methods/small_steps.md").write_text(PAGE, encoding="utf-8")

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
        command = [sys.executable, *arguments]
        process = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    assert run("docs/tables.py").count("updated ") == 5
    assert run("docs/tables.py") == "", "nothing is left to update"
    rows = {
        "README.md": "`lwf`, `small-steps`",
        "docs/methods/README.md": "| [`small-steps`](small_steps.md) | `SmallSteps` | scale gradients down after",
        "docs/choosing.md": "| `small-steps` | yes | yes | yes | no | no | yes | yes | no | not measured |",
        "docs/api/methods.rst": ".. autoclass:: everlearn.SmallSteps\n   :show-inheritance:\n\nReplay\n------",
        "src/everlearn/methods/__init__.pyi": "regularization.small_steps import SmallSteps\n",
    }
    for file, row in rows.items():
        assert row in (tmp_path / file).read_text(encoding="utf-8"), file

    assert "small-steps         Small steps (our example): scale gradients down" in run("-m", "everlearn", "list")
    assert "factor: float, 0 or more = 0.1" in run("-m", "everlearn", "show", "small-steps")
    advice = " ".join(run("-m", "everlearn", "advise", "--scenario", "domain").split())
    assert "small-steps (SmallSteps) for no memory against learns slowly costs the time of a step is not" in advice

    # Tests of all methods include it, and tests of the present ones hold without a change.
    files = ["tests/test_contract.py", "tests/core/test_traits.py", "tests/methods/regularization/test_small_steps.py"]
    files += ["tests/test_tables.py", "tests/experiments/test_advice.py"]
    run("-m", "pytest", "-n", "0", "-q", "-k", "small-steps or small_steps or up_to_date or stub or fit", *files)
