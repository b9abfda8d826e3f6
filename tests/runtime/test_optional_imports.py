"""A missing package of any extra gives the same sentence."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

import everlearn
from everlearn.runtime.optional_imports import import_optional
from everlearn.sources import folders, svhn, tables

ROOT = Path(__file__).parents[2]
DEVELOPMENT_EXTRAS = {"docs", "peers", "test", "dev"}
ELSEWHERE = {"accelerate"}  # imported by transformers, which reports it itself


def plot():
    everlearn.curvature.histogram(everlearn.curvature.Diagonal({"w": torch.ones(3)}))


def tune():
    tuning = importlib.import_module("everlearn.tuning")
    tuning.tune(everlearn.nets.mlp, everlearn.EWC(), everlearn.streams.digits(valid=0.1))


def make_tracker(name):
    return lambda: importlib.import_module("everlearn.experiments.console").TRACKERS[name]()


def run_on(cluster):
    run = SimpleNamespace(grid=SimpleNamespace(device="cpu"))
    executors = importlib.import_module("everlearn.experiments.executors")
    return lambda: list(executors.outcomes([run], cluster=cluster))


def import_again(module):
    """Import a module of Everlearn as if for the first time."""

    def call():
        loaded = sys.modules.pop(module, None)
        try:
            importlib.import_module(module)
        finally:
            if loaded is not None:
                sys.modules[module] = loaded

    return call


# What needs each package, by (extra, package): the module of the package, and a call that imports it.
NEEDS = {
    ("cli", "pydantic"): ("pydantic", import_again("everlearn.experiments.options")),
    ("cli", "pyyaml"): ("yaml", import_again("everlearn.experiments.parsing")),
    ("plot", "matplotlib"): ("matplotlib.figure", plot),
    ("tensorboard", "tensorboard"): ("tensorboard", make_tracker("tensorboard")),
    ("mlflow", "mlflow-skinny"): ("mlflow", make_tracker("mlflow")),
    ("wandb", "wandb"): ("wandb", make_tracker("wandb")),
    ("lightning", "lightning"): ("lightning.pytorch", import_again("everlearn.integrations.lightning")),
    ("huggingface", "transformers"): ("transformers", import_again("everlearn.integrations.huggingface")),
    ("tune", "optuna"): ("optuna", tune),
    ("ray", "ray"): ("ray", run_on("ray")),
    ("slurm", "submitit"): ("submitit", run_on("slurm")),
    ("data", "pillow"): ("PIL", lambda: folders.read_image(Path("image.png"))),
    ("data", "pyarrow"): ("pyarrow.parquet", lambda: tables._read_parquet(Path("table.parquet"))),
    ("data", "scipy"): ("scipy.io", lambda: svhn.read_mat(Path("images.mat"), ("X",))),
}


def check_sentence(text, extra, package):
    package = {"mlflow-skinny": "mlflow"}.get(package, package)
    pattern = rf"[A-Z-].* needs {package}, which is not installed \(.+\): pip install 'everlearn\[{extra}\]'\."
    assert re.fullmatch(pattern, text, re.IGNORECASE), text


@pytest.mark.parametrize(("extra", "package"), NEEDS)
def test_missing_package_names_its_extra(extra, package, monkeypatch):
    module, call = NEEDS[extra, package]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as raised:
        call()
    check_sentence(str(raised.value), extra, package)


@pytest.mark.parametrize(
    ("package", "module"), [("cyclopts", "cyclopts"), ("pydantic", "pydantic"), ("pyyaml", "yaml")]
)
def test_command_names_its_extra(package, module):
    code = f"import sys; sys.modules[{module!r}] = None; from everlearn.cli import main; main()"
    process = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert process.returncode == 1 and not process.stdout
    prefix, sentence = process.stderr.strip().split(" ", 1)
    assert prefix == "everlearn:"
    check_sentence(sentence, "cli", package)


def test_every_package_of_every_extra_is_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {
        (extra, Requirement(line).name)
        for extra, lines in extras.items()
        for line in lines
        if extra not in DEVELOPMENT_EXTRAS and Requirement(line).name not in {"everlearn", *ELSEWHERE}
    }
    assert packages == {*NEEDS, ("cli", "cyclopts")}


def test_nothing_else_handles_missing_packages():
    """Only modules of the standard library that some systems lack are imported in a try statement."""
    handlers = []
    for path in Path(everlearn.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Try) and any(isinstance(line, ast.Import | ast.ImportFrom) for line in node.body):
                handlers += [(path.name, alias.name) for line in node.body for alias in line.names]
    assert handlers == [("cost.py", "resource")]


def test_missing_dependency_of_an_installed_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"^This needs no_such_dependency, which is not installed"):
        import_optional("half_installed", "data", "This")
