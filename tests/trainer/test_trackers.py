"""Who listens to a run hears what happens, and changes nothing."""

import sys

import numpy as np
import pytest
import torch

import everlearn
from everlearn import EWC, Method, nets, streams


class Notes:
    """A tracker that remembers."""

    def __init__(self):
        self.heard = []

    def start(self, config):
        self.heard.append(("start", config["method"]))

    def log(self, numbers, step):
        self.heard.append((dict(numbers), step))

    def finish(self, result):
        self.heard.append(("finish", result))


def run(*trackers, stream=None, make=nets.mlp):
    return everlearn.run(
        make, EWC(), stream or streams.digits(scenario="task", tasks=3), epochs=2, batch_size=32, trackers=trackers
    )


def test_a_run_is_told_from_start_to_finish():
    notes = Notes()
    result = run(notes)
    first, *between, last = notes.heard
    assert first == ("start", "EWC") and last == ("finish", result)
    after = [numbers for numbers, _ in between if "tasks learned" in numbers]
    assert [n["tasks learned"] for n in after] == [1, 2, 3]
    for i, numbers in enumerate(after):
        told = [numbers[f"accuracy/task {j + 1}"] for j in range(i + 1)]
        assert told == pytest.approx(result.accuracy[i, : i + 1]) and numbers["accuracy/so far"] == pytest.approx(
            np.mean(told)
        )
    losses = [(numbers["loss"], step) for numbers, step in between if "loss" in numbers]
    assert [step for _, step in losses] == list(range(20, 20 * len(losses) + 1, 20)) and all(v > 0 for v, _ in losses)
    assert [s for _, s in between] == sorted(s for _, s in between)


def test_listening_changes_nothing_and_joint_training_is_one_row():
    assert np.array_equal(run(Notes()).accuracy, run().accuracy)
    notes = Notes()
    result = run(notes, stream=streams.digits(scenario="task", tasks=3).joint())
    (told,) = [numbers for numbers, _ in notes.heard[1:-1] if "tasks learned" in numbers]
    assert told["tasks learned"] == 3 and told["accuracy/so far"] == pytest.approx(result.average_accuracy)


def test_a_run_that_fails_is_finished_without_a_result():
    notes, stream = Notes(), streams.digits(scenario="task", tasks=2)
    stream[1].train.x[0] = torch.nan
    with pytest.raises(FloatingPointError):
        run(notes, stream=stream)
    assert notes.heard[-1] == ("finish", None)


def test_lines_say_where_a_run_is(capsys):
    pytest.importorskip("cyclopts")
    from everlearn.experiments.console import Lines

    run(Lines(pause=0))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[0].startswith("EWC (digits, task-incremental, seed 0): task 1 of 3, loss ")
    assert "so far" in lines[0] and lines[2].endswith("about 0 s left")
    run(Lines(pause=1000))
    assert capsys.readouterr().err == ""


def test_a_line_says_no_loss_before_one_is_told(capsys):
    pytest.importorskip("cyclopts")
    from everlearn.experiments.console import Lines

    config = {
        "method": "EWC",
        "scenario": "task",
        "seed": 0,
        "score": "accuracy",
        "stream": {"name": "digits", "tasks": 2},
    }
    lines = Lines(pause=0)
    lines.start(config)
    lines.log({"tasks learned": 1, "accuracy/so far": 0.5}, 7)
    lines.log({"loss": 0.25}, 20)
    lines.log({"tasks learned": 2, "accuracy/so far": 0.5}, 27)
    first, second = capsys.readouterr().err.splitlines()
    assert "task 1 of 2, so far" in first and "nan" not in first
    assert "task 2 of 2, loss 0.25, so far" in second


def test_unknown_and_missing_trackers(tmp_path, capsys, monkeypatch):
    pytest.importorskip("cyclopts")
    from everlearn.cli.app import start

    words = ["run", "--methods", "finetune", "--tasks", "2", "--epochs", "1", "--hidden", "8", "--out", str(tmp_path)]
    assert start([*words, "--track", "tensorbord"]) == 2
    assert "Unknown tracker 'tensorbord'. Did you mean 'tensorboard'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert start([*words, "--track", "wandb"]) == 1
    assert "pip install 'everlearn[wandb]'" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from everlearn.integrations.tensorboard import TensorBoard

    result = run(TensorBoard(tmp_path))
    (folder,) = tmp_path.iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [e.value for e in events.Scalars("accuracy/task 1")] == pytest.approx(result.accuracy[:, 0])


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs packages that mlflow-skinny has not
    mlflow = pytest.importorskip("mlflow")
    from everlearn.integrations.mlflow import MLflow

    result = run(MLflow("trial", (tmp_path / "ml").as_uri()))
    client = mlflow.MlflowClient((tmp_path / "ml").as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert kept.data.metrics["average accuracy"] == pytest.approx(result.average_accuracy)
    told = [m.value for m in client.get_metric_history(kept.info.run_id, "accuracy/task 1")]
    assert told == pytest.approx(result.accuracy[:, 0]) and kept.data.params["method"] == "EWC"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.enable_socket
def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from everlearn.integrations.wandb import WandB

    monkeypatch.chdir(tmp_path)
    everlearn.run(nets.mlp, Method(), streams.digits(tasks=2), trackers=[WandB("trial", mode="offline")])
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
