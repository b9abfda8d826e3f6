"""Trackers are notified of a run, and do not change it."""

import sys

import numpy as np
import pytest
import torch

import everlearn
from everlearn import EWC, Method, nets, streams


class RecordingTracker:
    """A tracker that records its calls."""

    def __init__(self):
        self.events = []

    def start(self, config):
        self.events.append(("start", config["method"]))

    def log(self, numbers, step):
        self.events.append((dict(numbers), step))

    def finish(self, result):
        self.events.append(("finish", result))


def run(*trackers, stream=None, make_model=nets.mlp):
    return everlearn.run(
        make_model,
        EWC(),
        stream or streams.digits(scenario="task", tasks=3),
        epochs=2,
        batch_size=32,
        trackers=trackers,
    )


def test_run_is_logged_from_start_to_finish():
    tracker = RecordingTracker()
    result = run(tracker)
    first, *between, last = tracker.events
    assert first == ("start", "EWC") and last == ("finish", result)
    task_numbers = [numbers for numbers, _ in between if "tasks learned" in numbers]
    assert [numbers["tasks learned"] for numbers in task_numbers] == [1, 2, 3]
    for i, numbers in enumerate(task_numbers):
        accuracies = [numbers[f"accuracy/task {j + 1}"] for j in range(i + 1)]
        assert accuracies == pytest.approx(result.accuracy[i, : i + 1])
        assert numbers["accuracy/so far"] == pytest.approx(np.mean(accuracies))
    losses = [(numbers["loss"], step) for numbers, step in between if "loss" in numbers]
    assert [step for _, step in losses] == list(range(20, 20 * len(losses) + 1, 20))
    assert all(loss > 0 for loss, _ in losses)
    assert [step for _, step in between] == sorted(step for _, step in between)


def test_trackers_do_not_change_runs():
    assert np.array_equal(run(RecordingTracker()).accuracy, run().accuracy)
    tracker = RecordingTracker()
    result = run(tracker, stream=streams.digits(scenario="task", tasks=3).joint())
    (logged,) = [numbers for numbers, _ in tracker.events[1:-1] if "tasks learned" in numbers]
    assert logged["tasks learned"] == 3 and logged["accuracy/so far"] == pytest.approx(result.average_accuracy)


def test_failed_run_finishes_without_result():
    tracker = RecordingTracker()
    stream = streams.digits(scenario="task", tasks=2)
    stream[1].train.x[0] = torch.nan
    with pytest.raises(FloatingPointError):
        run(tracker, stream=stream)
    assert tracker.events[-1] == ("finish", None)


def test_lines_show_progress(capsys):
    pytest.importorskip("cyclopts")
    from everlearn.experiments.console import Lines

    run(Lines(pause=0))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[0].startswith("EWC (digits, task-incremental, seed 0): task 1 of 3, loss ")
    assert "so far" in lines[0] and lines[2].endswith("about 0 s left")
    run(Lines(pause=1000))
    assert capsys.readouterr().err == ""


def test_line_has_no_loss_before_one_is_logged(capsys):
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

    options = "--methods finetune --tasks 2 --epochs 1 --hidden 8"
    arguments = ["run", *options.split(), "--out", str(tmp_path)]
    assert start([*arguments, "--track", "tensorbord"]) == 2
    assert "Unknown tracker 'tensorbord'. Did you mean 'tensorboard'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert start([*arguments, "--track", "wandb"]) == 1
    assert "pip install 'everlearn[wandb]'" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # of other packages
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from everlearn.integrations.tensorboard import TensorBoard

    result = run(TensorBoard(tmp_path))
    (folder,) = tmp_path.iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert [event.value for event in events.Scalars("accuracy/task 1")] == pytest.approx(result.accuracy[:, 0])


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    mlflow = pytest.importorskip("mlflow")
    from everlearn.integrations.mlflow import MLflow

    result = run(MLflow("trial", (tmp_path / "ml").as_uri()))
    client = mlflow.MlflowClient((tmp_path / "ml").as_uri())
    (run_data,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert run_data.data.metrics["average accuracy"] == pytest.approx(result.average_accuracy)
    logged = [metric.value for metric in client.get_metric_history(run_data.info.run_id, "accuracy/task 1")]
    assert logged == pytest.approx(result.accuracy[:, 0]) and run_data.data.params["method"] == "EWC"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.enable_socket
def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from everlearn.integrations.wandb import WandB

    monkeypatch.chdir(tmp_path)
    everlearn.run(nets.mlp, Method(), streams.digits(tasks=2), trackers=[WandB("trial", mode="offline")])
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
