"""The command `everlearn update`: options, exit codes and messages."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import everlearn
from everlearn import Method, Result
from everlearn.updating import class_names, load, update
from tests.updating.deployments import (
    SHUFFLED,
    current_version,
    digits,
    make_model,
    read_files,
    write_csv,
    write_npz,
)

pytest.importorskip("cyclopts")
from everlearn.cli.app import app, start


@pytest.mark.parametrize("method", ["ewc", "er"])
def test_command_updates_three_times(method, deployment, capsys):
    Path("three_updates_factory.py").write_text(
        "from everlearn import nets\n\ndef make_model():\n    return nets.mlp((1, 8, 8), 4, hidden=(64,))\n"
    )
    write_npz(deployment / "old.npz", digits(0, 1, 2, 3))
    options = (
        "update --model three_updates_factory:make_model --weights model.safetensors --state state "
        "--threads 1 --epochs 5"
    )
    for number in (1, 2, 3):
        write_npz(deployment / f"new{number}.npz", digits(0, 1, 2, 3, shift=number))
        old_options = ["--old", "old.npz"] if number == 1 else []
        update_options = ["--data", f"new{number}.npz", "--method", method, "--tolerance", "60", *old_options]
        assert start([*options.split(), *update_options]) == 0
        text = capsys.readouterr().out
        assert f"Update {number} with {'EWC' if method == 'ewc' else 'ER'}: accepted." in text
        assert f"update {number} (new{number}.npz)" in text and "old skills (old.npz)" in text
        assert current_version() == number
        version = Path("state") / f"update-{number:04d}"
        assert (version / "model.safetensors").read_bytes() == Path("model.safetensors").read_bytes()
        assert (version / "report.txt").read_text() == text
    result = Result.load(version / "result.json")
    assert result.accuracy.shape == (4, 4) and not np.isnan(np.tril(result.accuracy)).any()
    assert np.isnan(result.accuracy[0, 2]) and not np.isnan(result.accuracy[1, 2]), "unmeasured accuracies are NaN"
    assert not np.isnan(result.forgetting) and "</html>" in (version / "report.html").read_text()
    model = load(make_model, "model.safetensors")
    test = digits(0, 1, 2, 3, shift=3)[1]
    assert everlearn.evaluate(model, Method(), test) == pytest.approx([result.accuracy[3, 3]])
    assert result.accuracy[3, 3] > result.accuracy[2, 3] and result.accuracy[3, 0] > 0.5


def test_exit_code_of_refusal(deployment, capsys):
    Path("refusal_factory.py").write_text("from everlearn import nets\nmake = lambda: nets.mlp(64, 4, hidden=(64,))\n")
    write_npz(deployment / "old.npz", digits(0, 1, 2, 3))
    write_npz(deployment / "new.npz", digits(4, 5))
    files_before = read_files(deployment)
    options = (
        "update --model refusal_factory:make --weights model.safetensors --state state --data new.npz --method finetune"
    )
    assert start([*options.split(), "--old", "old.npz", "--threads", "1"]) == 3
    assert "points less, at most 2 less are allowed" in capsys.readouterr().out
    assert read_files(deployment) == files_before and not Path("state/current.json").exists()
    assert start([*options.split(), "--old", "old.npz", "--tolerance", "100", "--dry-run"]) == 0
    assert "Dry run: nothing is written." in capsys.readouterr().out and read_files(deployment) == files_before


def test_commands_of_documentation_are_valid():
    page = (Path(__file__).parents[2] / "docs/updating.md").read_text(encoding="utf-8")
    commands = page.replace("\\\n", " ").splitlines()
    lines = [line.split(" > ")[0] for line in commands if line.startswith("everlearn update --")]
    for line in lines:
        _, bound, _ = app.parse_args(line.split()[1:], exit_on_error=False, print_error=False)
        assert bound.kwargs["options"].model == "shop.models:make_model"
    assert len(lines) == 5


@pytest.mark.slow
def test_files_in_working_folder_do_not_shadow_libraries(deployment):
    """The factory is imported from the working folder, but no module that shadows a library."""
    Path("user_models.py").write_text(
        "from everlearn import nets\nimport user_layers\n\ndef make():\n    return nets.mlp(64, 4, hidden=(64,))\n"
    )
    Path("user_layers.py").write_text("")
    Path("pyarrow").mkdir()
    for name in ("pyarrow/__init__.py", "pyarrow/parquet.py", "colorsys.py", "unrelated_module.py"):
        Path(name).write_text(f"open('ran', 'a').write({name!r})\n")
    write_npz(deployment / "new.npz", digits(0, 1))
    code = """if True:
        import sys
        from everlearn.cli.app import start
        sys.path[:] = [p for p in sys.path if p]
        options = "update --model user_models:make --weights model.safetensors --state state --method er --threads 1"
        assert start([*options.split(), "--epochs", "1", "--data", "new.npz", "--tolerance", "100"]) == 0
        import colorsys
        import pyarrow
        try:
            import unrelated_module
        except ModuleNotFoundError:
            print("not found")
    """
    process = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0 and process.stdout.endswith("not found\n"), process.stderr
    assert not Path("ran").exists()
    command = "-m everlearn update --model user_models:make --weights model.safetensors --state state --method er"
    process = subprocess.run(
        [sys.executable, *command.split(), "--data", "new.parquet"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1 and not Path("ran").exists(), process.stderr


OMITTED = object()
DEFAULT_OPTIONS = {
    "--model": "command_factory:make",
    "--weights": "model.safetensors",
    "--state": "state",
    "--data": "new.npz",
    "--method": "er",
    "--threads": "1",
    "--epochs": "1",
}


@pytest.fixture
def run_command(deployment):
    Path("command_factory.py").write_text(
        "from everlearn import nets\nimport torch\nmake = lambda: nets.mlp(64, 4, hidden=(64,))\nbad = lambda: 1 / 0\n"
        "needy = lambda inputs: None\nnumber = 3\nmodel = torch.nn.Linear(1, 1)\n"
    )
    Path("failing_factory.py").write_text("1 / 0")
    Path("factory_with_missing_import.py").write_text("import missing_module")
    write_npz(deployment / "new.npz", digits(0, 1))
    write_npz(deployment / "all.npz", digits(0, 1, 2, 3))

    def run(**options):
        given_options = {"--" + name.replace("_", "-"): value for name, value in options.items()}
        arguments = ["update"]
        for name, value in (DEFAULT_OPTIONS | given_options).items():
            if value is OMITTED:
                continue
            arguments.append(name)
            if value is not None:
                arguments.append(value)
        return start(arguments)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"model": "make"}, 2, "package.module:function"),
        ({"model": "missing_factory:make"}, 2, "There is no module 'missing_factory', neither installed nor in"),
        ({"model": "command_factory:mak"}, 2, "command_factory has no 'mak'. Did you mean 'make'?"),
        ({"model": "command_factory:number"}, 2, "command_factory:number is a int"),
        ({"model": "command_factory:model"}, 2, "command_factory:model is a Linear"),
        ({"model": "failing_factory:make"}, 1, "cannot be imported: ZeroDivisionError"),
        ({"model": "factory_with_missing_import:make"}, 1, "missing_module"),
        ({"model": "command_factory:bad"}, 1, "command_factory:bad() failed: ZeroDivisionError"),
        ({"model": "command_factory:needy"}, 1, "missing 1 required positional argument: 'inputs'"),
        ({"method": "ewcc"}, 2, "Unknown method 'ewcc'"),
        ({"method": "packnet"}, 1, "predicts with more than the model's weights"),
        ({"set": "ewc.strength=1"}, 2, "--set ewc: no such method is used here (er)"),
        ({"set": "er.capacity=0"}, 2, "ER.capacity: got 0, allowed: 1 or more"),
        ({"tolerance": "-1"}, 2, "tolerance: got '-1'"),
        ({"momentum": "0.9"}, 2, "momentum: adam has none to set"),
        ({"device": "nowhere"}, 2, "device 'nowhere' cannot be used"),
        ({"data": "none.npz"}, 1, "There is no file or folder none.npz"),
        ({"weights": "none.safetensors"}, 1, "There is no file none.safetensors"),
        ({"y": "label"}, 1, "has no array 'label'; it has x, y, x_test, y_test"),
        ({"lr": "1e30", "optimizer": "sgd"}, 1, "The loss is"),
        ({"method": "ranpac"}, 1, "this first update has none of 2, 3, for which the model has outputs"),
        ({"method": "fecam"}, 1, "FeCAM predicts with more than the model's weights"),
        ({"method": "ranpac", "set": "ranpac.dimension=2000000", "data": "all.npz"}, 1, "choose a smaller dimension"),
        ({"forget": "new.npz"}, 2, "Give either new data to learn, --data FILE, or learned rows to forget"),
    ],
)
def test_exit_codes_and_messages(options, code, message, run_command, capsys):
    assert run_command(**options) == code
    error = capsys.readouterr().err
    assert message in error and error.startswith("everlearn: ") and "Traceback" not in error
    assert not Path("state/current.json").exists()


def test_valid_command(run_command, capsys):
    Path("names.txt").write_text("zero\none\ntwo\nthree\n")
    assert run_command(classes="names.txt", set="er.capacity=50", optimizer="sgd", momentum="0.9", lr="0.01") == 0
    assert class_names("model.safetensors") == ["zero", "one", "two", "three"]
    facts = json.loads(Path("state/update-0001/facts.json").read_text())
    assert facts["training"]["optimizer"] == "SGD" and facts["method"]["fields"].startswith("ER(capacity=50")
    assert run_command(classes="names.txt", set="er.capacity=50") == 0 and "nothing to do" in capsys.readouterr().out


def test_classes_are_learned_and_rows_forgotten(run_command, deployment, capsys):
    write_npz(deployment / "four.npz", digits(4, 5))
    assert run_command(method="ranpac", set="ranpac.dimension=100", data="four.npz", old="all.npz") == 0
    assert "Update 1 with RanPAC(dimension=100): accepted." in capsys.readouterr().out
    (x, y), _ = digits(4, 5)
    np.savez("rows.npz", x=x[:7].numpy(), y=y[:7].numpy())
    only_forget = {"data": OMITTED, "epochs": OMITTED, "method": OMITTED, "forget": "rows.npz"}
    assert run_command(**only_forget, dry_run=None) == 0 and current_version() == 1
    assert run_command(**only_forget, versions="1") == 0
    report = capsys.readouterr().out
    assert "Update 2 with RanPAC(dimension=100): forgot 7 rows." in report and current_version() == 2
    assert [path.name for path in Path("state").glob("update-*")] == ["update-0002"]
    for options, code, message in [
        ({"epochs": "3", "tolerance": "1"}, 2, "--tolerance, --epochs: not used with --forget, leave it out."),
        ({"data": "four.npz"}, 2, "Give either new data"),
        ({"forget": "none.npz"}, 1, "There is no file or folder none.npz"),
        ({"forget": "new.npz"}, 1, "rows to forget are not among those that updates have learned"),
        ({"state": "nowhere"}, 1, "There is no update in nowhere, so nothing can be forgotten"),
    ]:
        files_before = read_files(deployment)
        assert run_command(**only_forget | options) == code
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
        assert read_files(deployment) == files_before


def test_method_is_read_from_state(run_command, deployment, capsys):
    assert run_command(method="") == 2
    error = capsys.readouterr().err
    assert "A first update needs a method (--method), later ones use that of the first: er-ace, derpp" in error
    assert run_command(method="er+ewc", set="er.capacity=50", lr="0.002") == 0
    write_npz(deployment / "next.npz", digits(2, 3))
    assert run_command(method="", set="er.capacity=50", data="next.npz") == 2
    assert "--set er: name the method too" in capsys.readouterr().err
    assert run_command(method="", data="next.npz", tolerance="100") == 0
    assert "Update 2 with ER(capacity=50) + EWC: accepted" in capsys.readouterr().out
    with pytest.raises(ValueError, match="A first update needs a method"):
        update(make_model, "model.safetensors", "elsewhere", digits(0, 1), accept_weights=True)


def test_columns_are_read_from_file(run_command, deployment, capsys):
    write_csv(deployment / "new.csv", digits(0, 1, 2, 3), order=SHUFFLED)
    write_csv(deployment / "old.csv", digits(0, 1, 2, 3, shift=0), order=SHUFFLED)
    options = {"data": "new.csv", "old": "old.csv", "y": "kind", "tolerance": "100", "dry_run": None}
    assert run_command(**options) == 0
    captured = capsys.readouterr()
    assert "Warning: Before this update the model classifies only" in captured.out and "UserWarning" not in captured.err
    Path("columns.txt").write_text("\n".join(f"p{i}" for i in range(64)))
    assert run_command(**options | {"x": "columns.txt"}) == 0
    assert "Warning" not in capsys.readouterr().out


def test_keyboard_interrupt(run_command, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("everlearn.updating.update"), "train_update", stop)
    assert run_command() == 130
    assert "those of before or of after" in capsys.readouterr().err
