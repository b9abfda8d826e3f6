import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("cyclopts")
from everlearn import METHODS, results
from everlearn.cli.app import start
from everlearn.streams import STREAMS

FAST = ["--epochs", "1", "--hidden", "16", "--threads", "1"]


def run(*arguments, out=None):
    return start(["run", *FAST, *arguments, *(["--out", str(out)] if out else [])])


def test_streams_scenarios_methods_and_seeds_form_grid(tmp_path, capsys):
    arguments = [
        "--scenario",
        "task,class",
        "--methods",
        "finetune,l2+freeze,joint",
        "--seeds",
        "2",
        "--set",
        "l2.strength=0.5",
    ]
    assert run(*arguments, out=tmp_path) == 0
    loaded_results = results.load(tmp_path)
    assert len(loaded_results) == 12
    assert {result.config["method"] for result in loaded_results} == {"finetune", "L2(strength=0.5) + Freeze", "joint"}
    text = capsys.readouterr().out
    assert "[12/12] joint" in text and "digits, task-incremental" in text and "±" in text


def test_finished_runs_are_skipped_unless_forced(tmp_path):
    def training_seconds():
        return {
            path.name: json.loads(path.read_text())["cost"]["seconds"]["train"]
            for path in results.result_files(tmp_path)
        }

    run(out=tmp_path)
    first_seconds = training_seconds()
    run(out=tmp_path)
    assert training_seconds() == first_seconds
    run("--force", out=tmp_path)
    assert set(training_seconds()) == set(first_seconds) and training_seconds() != first_seconds


def test_dry_run_only_lists_runs(tmp_path, capsys):
    assert run("--dry-run", "--methods", "l2", "--seeds", "2", out=tmp_path / "x") == 0
    assert capsys.readouterr().out.splitlines() == [
        "1. digits, class-incremental, L2, seed 0",
        "2. digits, class-incremental, L2, seed 1",
    ]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("settings", ["l2.strength: 0.5", "l2: {strength: 0.5}"])
def test_command_line_overrides_yaml_file(settings, tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    file.write_text(f"methods: [l2, finetune]\nscenario: domain\nset:\n  {settings}\nseeds: 3\nbatch-size: 64\n")
    assert start(["run", str(file), "--seeds", "1", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1. digits, domain-incremental, L2(strength=0.5), seed 0",
        "2. digits, domain-incremental, finetune, seed 0",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--methods", "fintune"], "Unknown method 'fintune'. Did you mean 'finetune'?"),
        (["run", "--stream", "digit"], "Unknown stream 'digit'. Did you mean 'digits'?"),
        (["run", "--scenario", "clas"], "Unknown scenario 'clas'. Did you mean 'class'?"),
        (["run", "--set", "l2.strenth=1", "--methods", "l2"], "l2 has no field 'strenth'. Did you mean 'strength'?"),
        (
            ["run", "--set", "l2.strength=big", "--methods", "l2"],
            "l2.strength: got 'big', allowed: a valid number or 'auto'",
        ),
        (["run", "--set", "finetune.x=1"], "finetune has no field 'x'. It has no fields."),
        (["run", "--set", "strength=1"], "METHOD.FIELD=VALUE"),
        (
            ["run", "--set", "l2.strength=1", "--methods", "finetune"],
            "Fields of l2 are set, which is not among the methods to run",
        ),
        (["run", "--epochs", "0"], "epochs: got '0', allowed: greater than or equal to 1"),
        (["run", "--epochs", "many"], "epochs: got 'many', allowed: a valid integer"),
        (["run", "--optimizer", "sdg"], "optimizer: got 'sdg', allowed: 'sgd', 'adam', 'adamw' or 'rmsprop'"),
        (["run", "--momentum", "0.9"], "momentum: adam has none to set"),
        (["run", "--hidden", "wide"], "hidden: got 'wide', allowed: widths"),
        (["run", "--device", "gpu7"], "device 'gpu7' cannot be used here"),
        (["run", "--methods", ""], "methods: got nothing"),
        (["run", "--scenario", ","], "scenario: got nothing"),
        (["run", "--optimizer", "adam", "--momentum", "1", "--dry-run"], "momentum: adam has none to set"),
        (["run", "--methods", "l2", "--set", "l2.strength=-1"], "L2.strength: got -1.0, allowed: 0 or more"),
        (["run", "--device", "meta"], "device 'meta' cannot be used here"),
        (["run", "--epoch", "3"], "Did you mean --epochs"),
        (["run", "--clip", "inf"], "clip: got 'inf', allowed: a finite number"),
        (["run", "--clip", "nan"], "clip: got 'nan', allowed: a finite number"),
        (["run", "--weight-decay", "inf"], "weight_decay: got 'inf', allowed: a finite number"),
        (["run", "--optimizer", "sgd", "--momentum", "inf"], "momentum: got 'inf', allowed: a finite number"),
        (["run", "--checkpoint-minutes", "inf"], "checkpoint_minutes: got 'inf', allowed: a finite number"),
        (["rum"], "run"),
        (["show", "ewcc"], "Unknown method 'ewcc'"),
        (["compare", "--seeds", "0"], "seeds: got '0', allowed: greater than or equal to 1"),
        (["compare", "--seeds", "1.5"], "seeds: got '1.5'"),
        (["run", "--methods", "l2+joint"], "not chained with another method"),
    ],
)
def test_invalid_arguments_exit_with_code_2(arguments, message, capsys):
    assert start(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("everlearn: ") and "Traceback" not in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("methds: l2", "unknown key 'methds'. Did you mean 'methods'?"),
        ("epochs: many", "epochs: got 'many'"),
        ("- a\n- b", "must hold 'key: value' lines"),
        ("a: [", "Cannot read"),
        ("clip: .inf", "clip: got inf, allowed: a finite number"),
        ("methods: " + "[" * 2000 + "]" * 2000, "its lists are nested too deeply"),
        ("methods: ewc\n# " + "x" * 2**19, "characters, allowed: 262,144"),
        ("methods: &a [*a]", "its aliases stand for more than 10,000 values"),
        (
            "x0: &x0 [l2, l2]\n"
            + "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 30))
            + "methods: *x29",
            "its aliases stand for more than 10,000 values",
        ),
        (
            "x0: &x0 {a: 1}\n"
            + "".join(f"x{i}: &x{i} {{<<: [{', '.join([f'*x{i - 1}'] * 9)}]}}\n" for i in range(1, 30)),
            "its aliases stand for more than 10,000 values",
        ),
    ],
)
def test_invalid_yaml_file_is_named(content, message, tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    file.write_text(content)
    assert start(["run", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error and str(file) in error


def test_yaml_aliases_are_allowed(tmp_path, capsys):
    (tmp_path / "plan.yaml").write_text("methods: &names [l2, ewc]\nset:\n  l2: &s {strength: 2.0}\n  ewc: *s\n")
    assert start(["run", str(tmp_path / "plan.yaml"), "--dry-run"]) == 0
    assert "L2(strength=2.0)" in capsys.readouterr().out


def test_alias_bomb_in_setting_is_refused(capsys):
    bomb = "[&a [1, 2], " + ", ".join(f"&{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(20)) + "]"
    assert start(["run", "--methods", "ewc", "--set", f"ewc.strength={bomb}"]) == 2
    assert "ewc.strength: cannot read" in capsys.readouterr().err


def test_missing_yaml_file(tmp_path, capsys):
    assert start(["run", str(tmp_path / "no.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_unwritable_folder_fails_before_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(out=tmp_path / "file" / "runs") == 1
    assert "Cannot write to the folder" in capsys.readouterr().err


def test_failed_run_is_reported_and_others_continue(tmp_path, capsys):
    assert run("--methods", "l2,finetune", "--set", "l2.strength=1e300", out=tmp_path) == 1
    error = capsys.readouterr().err
    assert "L2(strength=1e+300), seed 0 failed: The loss is" in error
    assert [result.config["method"] for result in results.load(tmp_path)] == ["finetune"]


def test_joint_training_takes_as_many_steps_as_other_methods(tmp_path):
    assert run("--methods", "finetune,joint", "--iterations", "3", out=tmp_path) == 0
    steps = {result.config["method"]: result.config["training"]["iterations"] for result in results.load(tmp_path)}
    assert steps == {"finetune": 3, "joint": 3 * 5}


def test_report(tmp_path, capsys):
    run("--seeds", "2", out=tmp_path)
    capsys.readouterr()
    assert start(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "digits, class-incremental (accuracy in %, mean ± std over seeds; average: over tasks, overall:"
    )
    assert lines[3].startswith("joint") and lines[4].startswith("finetune")
    next(iter(results.result_files(tmp_path))).write_text("{")
    assert start(["report", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "not a valid Everlearn result" in output.err and "finetune" in output.out
    assert start(["report", str(tmp_path / "nowhere")]) == 1
    assert "There is no folder" in capsys.readouterr().err


def test_list_and_show(capsys):
    assert start(["list"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in [*METHODS, *STREAMS, "mlp"])
    for name in METHODS:
        assert start(["show", name]) == 0
        text = capsys.readouterr().out
        assert any(formula in text for formula in ("L = ", "g̃ = ", "W = ", "W_c = ", "W, b")) or "logit_c = " in text
        assert text.startswith(f"{name} (")
    assert start(["show", "joint"]) == 0 and "Merge all tasks into one" in capsys.readouterr().out
    start(["show", "l2"])
    assert (
        "searched from 0.0001 to 1000 = 'auto'\n      weight of the penalty: \"auto\" measures it"
        in capsys.readouterr().out
    )


def test_layers_of_equal_width(tmp_path):
    start(["run", "--epochs", "1", "--hidden", "8,8", "--methods", "finetune", "--out", str(tmp_path)])
    assert results.load(tmp_path)[0].cost["parameters"][0] == 64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10


def test_online_streams_are_trained_for_one_epoch(tmp_path):
    assert (
        start(["run", "--stream", "online-digits", "--methods", "finetune", "--hidden", "16", "--out", str(tmp_path)])
        == 0
    )
    assert results.load(tmp_path)[0].config["training"]["epochs"] == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["compare", "--help"], ["--version"]])
def test_help(arguments, capsys):
    assert start(arguments) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_compare_shows_every_method(tmp_path, capsys):
    assert start(["compare", "--epochs", "1", "--scenario", "class", "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert "class-incremental" in capsys.readouterr().out
    assert len(results.load(tmp_path)) == len(METHODS) + 1


def test_compare_shows_every_scenario(tmp_path, capsys):
    options = ["--epochs", "1", "--methods", "finetune,ewc", "--seeds", "2", "--workers", "1", "--out", str(tmp_path)]
    assert start(["compare", *options]) == 0
    printed = capsys.readouterr()
    header = printed.out.splitlines()[1].split()
    assert header == ["method", "task-incremental", "domain-incremental", "class-incremental", "s"]
    assert "12 runs with 1 worker: about 10 s." in printed.err
    assert len(results.load(tmp_path)) == 3 * 2 * 2

    # A second time, results are read.
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert start(["compare", *options]) == 0
    repeated = capsys.readouterr()
    assert repeated.out == printed.out and "already has" in repeated.err
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}


def test_workers_may_be_one_per_core(monkeypatch):
    from everlearn.cli.options import CompareOptions, TuneGrid
    from everlearn.experiments.options import Grid
    from everlearn.runtime.processes import count_cores

    cores = len(os.sched_getaffinity(0))
    assert Grid(workers="auto").workers == TuneGrid(workers="auto").workers == count_cores() == cores
    assert CompareOptions().workers == CompareOptions.model_construct().workers == cores
    assert Grid(workers="3").workers == Grid(workers=3).workers == 3 and Grid().workers == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert count_cores() == 1


def test_unknown_number_of_workers_is_refused(capsys):
    assert start(["run", "--workers", "many"]) == 2
    assert "workers: got 'many'" in capsys.readouterr().err
    assert start(["compare", "--workers", "0"]) == 2
    assert start(["compare", "--scenario", "clas"]) == 2
    assert "Did you mean 'class'?" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupt_keeps_finished_runs(tmp_path):
    arguments = ["run", *FAST, "--seeds", "500", "--out", str(tmp_path)]
    restore_default_signal = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in background jobs
    command = [sys.executable, "-m", "everlearn", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=restore_default_signal)  # noqa: PLW1509
    deadline = time.time() + 60
    while len(list(tmp_path.glob("*.json"))) < 2 and time.time() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and error.endswith("repeat the command to resume.\n")
    assert len(results.load(tmp_path)) >= 2


@pytest.mark.slow
def test_terminal_shows_runs_tasks_and_steps(tmp_path, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    assert start(["run", "--methods", "ewc,er", "--epochs", "40", "--hidden", "20", "--out", str(tmp_path)]) == 0
    progress = sys.stderr.getvalue()
    for expected in ("runs:", "EWC:", "task 0:", "run/s", "task/s", "step/s", "epoch=", "loss=", "so far"):
        assert expected in progress, expected
    assert "[2/2] ER" in capsys.readouterr().out
