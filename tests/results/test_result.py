import importlib
import json
import os
import shutil
import subprocess
import threading

import numpy as np
import pytest
import torch
from torch import nn

from everlearn import L2, Gaussian, Method, Result, nets, results, run, streams
from everlearn.results import provenance
from everlearn.results.report.html import html
from everlearn.results.report.rows import run_rows
from everlearn.results.report.table import table
from everlearn.runtime import files

RUN_MODULE = importlib.import_module("everlearn.trainer.run")  # the package's attribute is the function

CONFIG = {"method": "L2", "fingerprints": {}, "stream": {"name": "digits"}, "scenario": "class", "seed": 0}


def result(**config):
    return Result(np.array([[1.0, 0.5], [0.4, 0.8]]), {**CONFIG, **config}, [0.5, 0.5], {"seconds": {"train": 1.5}})


def test_round_trip(tmp_path):
    path = result().save(tmp_path)
    assert path.name.startswith("digits-class-l2-seed0-")
    loaded = Result.load(path)
    assert (loaded.accuracy == result().accuracy).all() and loaded.config == CONFIG
    assert loaded.forgetting == pytest.approx(0.6)
    assert str(loaded) == "L2 (digits, class-incremental, seed 0): average accuracy 60.0 %, forgetting 60.0 %, 1.5 s"


@pytest.mark.parametrize(
    ("config", "transfer"),
    [
        ({"scenario": "task"}, 0.0),
        ({"scenario": "class"}, None),  # classes cannot be predicted before their task
        ({"scenario": "class", "stream": {"name": "s", "all_classes": True}}, 0.0),
        ({"scenario": "class", "stream": {"name": "s", "labels": "shared"}}, 0.0),
    ],
)
def test_forward_transfer_is_nan_if_classes_cannot_be_predicted_before_their_task(config, transfer):
    run_result = result(**config)
    (row,) = run_rows([run_result])
    (line,) = table([run_result]).split("\n\n")[0].splitlines()[3:]
    assert row["forward transfer"] == transfer and line.split()[-2] == ("–" if transfer is None else "0.0")
    assert run_result.forward_transfer == transfer or np.isnan(run_result.forward_transfer)


def test_the_average_over_tasks_differs_from_that_over_test_examples():
    (x, y), (x_test, y_test) = streams.digits_data()
    first = y < 8  # eight classes in the first task, two in the second
    first_test = y_test < 8
    first_task = ((x[first], y[first]), (x_test[first_test], y_test[first_test]))
    second_task = ((x[~first], y[~first]), (x_test[~first_test], y_test[~first_test]))
    stream = streams.from_tasks([first_task, second_task], scenario="class")
    num_correct = []

    class Counting(Method):
        def predict(self, model, x, task=None):
            outputs = super().predict(model, x, task)
            labels = y_test[first_test] if len(x) == first_test.sum() else y_test[~first_test]
            num_correct.append(int((outputs.argmax(-1) == labels).sum()))
            return outputs

    run_result = run(nets.mlp, Counting(), stream, epochs=10, batch_size=32)
    assert run_result.examples == [int(first_test.sum()), int((~first_test).sum())]
    assert run_result.overall_accuracy == pytest.approx(sum(num_correct[-2:]) / len(y_test))
    assert 0.45 < run_result.average_accuracy < 0.5 and 0.17 < run_result.overall_accuracy < 0.21
    assert "average accuracy 4" in str(run_result)
    assert f"({100 * run_result.overall_accuracy:.1f} % over all test examples)" in str(run_result)


def test_both_averages_are_stored_and_older_files_are_read(tmp_path):
    run_result = result()
    run_result.examples = [30, 10]
    path = run_result.save(tmp_path)
    loaded = Result.load(path)
    assert loaded.examples == [30, 10] and loaded.overall_accuracy == pytest.approx((30 * 0.4 + 10 * 0.8) / 40)
    (row,) = run_rows([loaded])
    assert row["average"] == 0.6 and row["overall"] == 0.5
    content = json.loads(path.read_text())
    del content["examples"]
    path.write_text(json.dumps(content))
    old = Result.load(path)
    assert old.examples == [] and np.isnan(old.overall_accuracy) and run_rows([old])[0]["overall"] is None
    assert html([old]) and "–" in table([old])
    for wrong in ([30], [30, 0], ["many", "few"], {"a": 1}):
        path.write_text(json.dumps({**content, "examples": wrong}))
        with pytest.raises(ValueError, match="not a valid Everlearn result"):
            Result.load(path)


def test_missing_accuracies_stay_missing(tmp_path):
    incomplete = Result(np.array([[1.0, np.nan], [0.4, 0.8]]), CONFIG, [], {})
    loaded = Result.load(incomplete.save(tmp_path))
    assert np.isnan(loaded.accuracy[0, 1]) and loaded.forgetting == 0.6 and "60.0" in table([loaded])
    assert '"matrix":[[1.0,null],[0.4,0.8]]' in html([loaded])


def test_every_configuration_has_a_separate_file(tmp_path):
    names = {results.file_name({**CONFIG, "training": {"epochs": e}, "seed": s}) for e in range(3) for s in range(3)}
    assert len(names) == 9


def test_a_finished_run_is_loaded_instead_of_repeated(tmp_path, small_net, small_stream, monkeypatch):
    first = run(small_net, Method(), small_stream(), out=tmp_path)
    assert len(results.load(tmp_path)) == 1
    monkeypatch.setattr(RUN_MODULE, "StreamTraining", lambda *a: pytest.fail("trained again"))
    loaded = run(small_net, Method(), small_stream(), out=tmp_path)
    assert loaded.provenance == first.provenance and (loaded.accuracy == first.accuracy).all()


@pytest.mark.parametrize("change", ["force", "seed", "method", "epochs", "model", "data", "optimizer"])
def test_a_changed_run_is_executed(change, tmp_path, small_net, small_stream):
    def execute(net=small_net, method=None, stream=None, **settings):
        return run(net, method or Method(), stream or small_stream(), out=tmp_path, **settings)

    first = execute()
    changed_runs = {
        "force": lambda: execute(force=True),
        "seed": lambda: execute(seed=1),
        "method": lambda: execute(method=L2()),
        "epochs": lambda: execute(epochs=2),
        "model": lambda: execute(net=small_net(64, 6)),
        "data": lambda: execute(
            stream=streams.split(*streams.digits_data(), tasks=3, class_order=range(6), scenario="task")
        ),
        "optimizer": lambda: execute(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.2)),
    }
    changed = changed_runs[change]()
    assert changed.cost["seconds"] != first.cost["seconds"]
    assert len(results.load(tmp_path)) == (1 if change == "force" else 2)


def test_a_result_equals_the_one_loaded_from_its_file(tmp_path, small_net, small_stream):
    created = run(small_net, L2(), small_stream(), out=tmp_path)
    (loaded,) = results.load(tmp_path)
    assert created.config == loaded.config


def test_configuration_and_provenance_are_recorded(tmp_path, small_net, small_stream):
    run(small_net, L2(2.0), small_stream(), out=tmp_path, epochs=2, seed=3)
    (path,) = results.result_files(tmp_path)
    stored = json.loads(path.read_text())
    assert stored["config"]["method"] == "L2(strength=2.0)" and stored["config"]["seed"] == 3
    assert stored["config"]["training"]["epochs"] == 2
    assert stored["config"]["training"]["groups"][0]["lr"] == 0.001
    assert {"python", "torch", "numpy", "everlearn"} <= set(stored["provenance"]["versions"])
    assert "commit" in stored["provenance"]


X = torch.rand(30, 4)
Y = torch.arange(30) % 2


class DictModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x["a"])


def small_mlp():
    return nets.mlp(4, 2, hidden=(4,))


def custom_run(train=None, net=None, **settings):
    """Return a function that runs one task with this data and model and saves the result in a folder."""
    train = (X, Y) if train is None else train
    test = train if net else (X, Y)
    stream = streams.from_tasks([(train, test)], scenario="domain", outputs=2, **settings)
    return lambda out: run(net or small_mlp, Method(), stream, out=out)


def regression(variance):
    pair = X, X[:, :2]
    stream = streams.from_tasks([(pair, pair)], scenario="domain", likelihood=Gaussian(variance))
    return lambda out: run(small_mlp, Method(), stream, out=out)


def scheduled(factor):
    def schedule(optimizer, steps):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor)

    stream = streams.from_tasks([((X, Y), (X, Y))], scenario="domain")
    return lambda out: run(lambda: nets.mlp(4, 2), Method(), stream, out=out, scheduler=schedule)


def scaled_gradients(factor):
    class ScaledGradients(Method):
        def before_step(self, model):
            for p in model.parameters():
                p.grad *= factor

    return lambda out: run(nets.mlp, ScaledGradients(), streams.digits(), out=out)


class Scaled(nn.Module):
    """Model that depends on more than its saved tensors and its repr."""

    def __init__(self, scale=1.0, heads=1, mask=1.0, frozen=False):
        super().__init__()
        self.attend = nn.MultiheadAttention(4, heads)
        self.head = nn.Linear(4, 2)
        self.scale = scale
        self.register_buffer("mask", torch.tensor(mask), persistent=False)
        self.head.bias.requires_grad_(not frozen)

    def forward(self, x):
        return torch.tanh(self.head(self.attend(x, x, x, need_weights=False)[0])) * self.scale * self.mask


def with_class(slope=1.0, shift=0.0, factor=1.0):
    class Base(nn.Module):
        slant = slope

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        @property
        def shifted(self):
            return shift

        @staticmethod
        def times(x):
            return x * factor

        def forward(self, x):
            return self.times(torch.tanh(self.layer(x)) * self.slant + self.shifted)

    class Net(Base):
        pass

    return custom_run((X, Y), net=Net)


def scaled(**settings):
    return custom_run((X, Y), net=lambda: Scaled(**settings))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (scaled(), scaled(scale=-30.0)),
        (scaled(heads=1), scaled(heads=2)),
        (scaled(), scaled(mask=0.0)),
        (scaled(), scaled(frozen=True)),
        (with_class(), with_class(slope=-30.0)),
        (with_class(), with_class(shift=3.0)),
        (with_class(), with_class(factor=-3.0)),
        (custom_run(torch.utils.data.TensorDataset(X, Y)), custom_run(torch.utils.data.TensorDataset(X, 1 - Y))),
        (custom_run(({"a": X}, Y), net=DictModel), custom_run(({"a": X + 1}, Y), net=DictModel)),
        (custom_run(transform=lambda x: x * 1.0), custom_run(transform=lambda x: x * 2.0)),
        (custom_run([(X, Y)]), custom_run([(X, 1 - Y)])),
        (regression(1.0), regression(100.0)),
        (scheduled(0.5), scheduled(0.1)),
        (scaled_gradients(0.5), scaled_gradients(0.1)),
    ],
    ids=[
        *("attribute", "heads", "buffer that is not saved", "frozen", "class attribute", "property", "static method"),
        *("dataset", "dict inputs", "transform", "batches", "likelihood", "scheduler", "a method's code"),
    ],
)
def test_everything_that_determines_the_result_identifies_the_run(first, second, tmp_path):
    for execute in (first, second, first, second):
        execute(tmp_path)
    assert len(results.load(tmp_path)) == 2


def test_a_run_on_data_without_a_fingerprint_is_repeated(tmp_path, monkeypatch):
    def batches():
        yield X, Y

    trained = []
    stream_training = RUN_MODULE.StreamTraining
    monkeypatch.setattr(RUN_MODULE, "StreamTraining", lambda *a: trained.append(1) or stream_training(*a))
    for _ in range(2):
        stream = streams.from_tasks([(batches(), (X, Y))], scenario="domain", outputs=2)
        result = run(lambda: nets.mlp(4, 2), Method(), stream, out=tmp_path)
    assert result.config["fingerprints"]["data"] is None and len(trained) == 2


@pytest.mark.parametrize("make_attribute", [threading.Lock, lambda: (i for i in "ab")])
def test_a_model_with_unreadable_attributes_is_recognized(make_attribute, tmp_path, monkeypatch):
    class Net(nn.Linear):
        lock = threading.Lock()

        def __init__(self):
            super().__init__(4, 2)
            self.attribute = make_attribute()

    trained = []
    stream_training = RUN_MODULE.StreamTraining
    monkeypatch.setattr(RUN_MODULE, "StreamTraining", lambda *a: trained.append(1) or stream_training(*a))
    for _ in range(2):
        result = custom_run((X, Y), net=Net)(tmp_path)
    assert result.config["fingerprints"]["model"] is not None and len(trained) == 1


def test_results_of_different_data_do_not_overwrite_each_other(tmp_path):
    for shift in (0, 1):
        custom_run((X + shift, Y))(None).save(tmp_path)
    assert len(results.load(tmp_path)) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"accuracy": [[1]]}', b"[]", b"\xff\xfe", b'{"format": 1, "accuracy": "x"}']
)
def test_a_damaged_file_is_named_and_replaced_by_a_run(content, tmp_path, small_net, small_stream):
    run(small_net, Method(), small_stream(), out=tmp_path)
    (path,) = results.result_files(tmp_path)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a valid Everlearn result .*: move it away, and the run is repeated"):
        results.load(tmp_path)
    with pytest.warns(UserWarning, match="is damaged or not a result: the run is repeated, and replaces it"):
        run(small_net, Method(), small_stream(), out=tmp_path)
    assert len(results.load(tmp_path)) == 1


def test_missing_empty_and_read_only_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        results.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="holds no results"):
        results.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Cannot write to the folder"):
        run(nets.mlp, Method(), streams.digits(), out=tmp_path / "file" / "folder")
    with pytest.raises(OSError, match="it is a file"):
        run(nets.mlp, Method(), streams.digits(), out=tmp_path / "file")


def test_a_result_under_the_name_of_another_run_is_not_used(tmp_path, small_net, small_stream):
    run(small_net, Method(), small_stream(), out=tmp_path)
    l2_result = run(small_net, L2(), small_stream(), out=tmp_path / "other")
    [path] = results.result_files(tmp_path)
    path.write_bytes(results.result_files(tmp_path / "other")[0].read_bytes())
    with pytest.warns(UserWarning, match="is the result of another run"):
        repeated = run(small_net, Method(), small_stream(), out=tmp_path)
    assert repeated.config["method"] == "finetune" and l2_result.config["method"].startswith("L2")


@pytest.mark.skipif(shutil.which("git") is None or os.name != "posix", reason="needs git and a shell")
def test_the_commit_is_read_without_running_code_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)

    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *author, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    script = tmp_path / "script"
    log = tmp_path / "log"
    script.write_text(f"#!/bin/sh\necho $1 >> '{log}'\n[ \"$1\" = clean ] && cat\nexit 0\n")
    script.chmod(0o755)
    (tmp_path / "data.txt").write_text("1")
    (tmp_path / ".gitattributes").write_text("*.txt filter=custom")
    git("init", "-q", ".")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    git("config", "filter.custom.clean", f"{script} clean")
    git("config", "filter.custom.required", "true")
    git("config", "core.fsmonitor", f"{script} fsmonitor")
    (tmp_path / ".git" / "hooks" / "post-index-change").write_text(script.read_text())
    (tmp_path / ".git" / "hooks" / "post-index-change").chmod(0o755)
    (tmp_path / "data.txt").write_text("1")  # the same content with a different time, so that git reads it
    os.utime(tmp_path / "data.txt", (1, 1))
    provenance._commit.cache_clear()
    assert provenance.provenance()["commit"] == commit
    (tmp_path / "data.txt").write_text("2")
    provenance._commit.cache_clear()
    assert provenance.provenance()["commit"] == f"{commit} (changed)"
    assert not log.exists(), log.read_text()
    git("status")
    assert log.exists(), "git itself runs the script"


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    path = result().save(tmp_path)
    old_content = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write(path, b"new")
    assert path.read_bytes() == old_content and list(tmp_path.iterdir()) == [path]


def test_a_lock_has_one_holder(tmp_path):
    with files.exclusive_lock(tmp_path / "lock") as first, files.exclusive_lock(tmp_path / "lock") as second:
        assert first and not second
    with files.exclusive_lock(tmp_path / "lock") as third:
        assert third
