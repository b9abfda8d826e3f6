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
from everlearn.results.report.rows import runs
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
        ({"scenario": "class"}, None),  # the classes of a task may not be named before it begins
        ({"scenario": "class", "stream": {"name": "s", "all_classes": True}}, 0.0),
        ({"scenario": "class", "stream": {"name": "s", "labels": "shared"}}, 0.0),
    ],
)
def test_forward_transfer_only_where_it_could_be_another_number(config, transfer):
    some = result(**config)
    (row,) = runs([some])
    (line,) = table([some]).split("\n\n")[0].splitlines()[3:]
    assert row["forward transfer"] == transfer and line.split()[-2] == ("–" if transfer is None else "0.0")
    assert some.forward_transfer == transfer or np.isnan(some.forward_transfer)


def test_the_average_over_tasks_and_over_test_examples_are_two_numbers():
    (x, y), (x_test, y_test) = streams.digits_data()
    few, test = y < 8, y_test < 8  # eight classes, then two
    stream = streams.from_tasks(
        [((x[few], y[few]), (x_test[test], y_test[test])), ((x[~few], y[~few]), (x_test[~test], y_test[~test]))],
        scenario="class",
    )
    counts = []

    class Counting(Method):
        def predict(self, model, x, task=None):
            out = super().predict(model, x, task)
            labels = y_test[test] if len(x) == test.sum() else y_test[~test]
            counts.append(int((out.argmax(-1) == labels).sum()))
            return out

    found = run(nets.mlp, Counting(), stream, epochs=10, batch_size=32)
    assert found.examples == [int(test.sum()), int((~test).sum())]
    assert found.overall_accuracy == pytest.approx(sum(counts[-2:]) / len(y_test))
    assert 0.45 < found.average_accuracy < 0.5 and 0.17 < found.overall_accuracy < 0.21
    assert "average accuracy 4" in str(
        found
    ) and f"({100 * found.overall_accuracy:.1f} % over all test examples)" in str(found)


def test_both_averages_are_kept_and_older_files_still_read(tmp_path):
    some = result()
    some.examples = [30, 10]
    path = some.save(tmp_path)
    loaded = Result.load(path)
    assert loaded.examples == [30, 10] and loaded.overall_accuracy == pytest.approx((30 * 0.4 + 10 * 0.8) / 40)
    (row,) = runs([loaded])
    assert row["average"] == 0.6 and row["overall"] == 0.5
    content = json.loads(path.read_text())
    del content["examples"]
    path.write_text(json.dumps(content))
    old = Result.load(path)
    assert old.examples == [] and np.isnan(old.overall_accuracy) and runs([old])[0]["overall"] is None
    assert html([old]) and "–" in table([old])
    for wrong in ([30], [30, 0], ["many", "few"], {"a": 1}):
        path.write_text(json.dumps({**content, "examples": wrong}))
        with pytest.raises(ValueError, match="not a whole Everlearn result"):
            Result.load(path)


def test_what_nobody_measured_stays_unknown(tmp_path):
    some = Result(np.array([[1.0, np.nan], [0.4, 0.8]]), CONFIG, [], {})
    loaded = Result.load(some.save(tmp_path))
    assert np.isnan(loaded.accuracy[0, 1]) and loaded.forgetting == 0.6 and "60.0" in table([loaded])
    assert '"matrix":[[1.0,null],[0.4,0.8]]' in html([loaded])


def test_every_configuration_has_its_own_file(tmp_path):
    names = {results.file_name({**CONFIG, "training": {"epochs": e}, "seed": s}) for e in range(3) for s in range(3)}
    assert len(names) == 9


def test_a_run_that_is_there_is_read_not_done(tmp_path, small_net, small_stream, monkeypatch):
    first = run(small_net, Method(), small_stream(), out=tmp_path)
    assert len(results.load(tmp_path)) == 1
    monkeypatch.setattr(RUN_MODULE, "StreamTraining", lambda *a: pytest.fail("trained again"))
    again = run(small_net, Method(), small_stream(), out=tmp_path)
    assert again.provenance == first.provenance and (again.accuracy == first.accuracy).all()


@pytest.mark.parametrize("change", ["force", "seed", "method", "epochs", "model", "data", "optimizer"])
def test_another_run_is_done(change, tmp_path, small_net, small_stream):
    def go(net=small_net, method=None, stream=None, **settings):
        return run(net, method or Method(), stream or small_stream(), out=tmp_path, **settings)

    first = go()
    other = {
        "force": lambda: go(force=True),
        "seed": lambda: go(seed=1),
        "method": lambda: go(method=L2()),
        "epochs": lambda: go(epochs=2),
        "model": lambda: go(net=small_net(64, 6)),
        "data": lambda: go(
            stream=streams.split(*streams.digits_data(), tasks=3, class_order=range(6), scenario="task")
        ),
        "optimizer": lambda: go(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.2)),
    }[change]()
    assert other.cost["seconds"] != first.cost["seconds"]
    assert len(results.load(tmp_path)) == (1 if change == "force" else 2)


def test_a_result_just_made_is_the_one_read_back(tmp_path, small_net, small_stream):
    made = run(small_net, L2(), small_stream(), out=tmp_path)
    (read,) = results.load(tmp_path)
    assert made.config == read.config


def test_the_facts_are_recorded(tmp_path, small_net, small_stream):
    run(small_net, L2(2.0), small_stream(), out=tmp_path, epochs=2, seed=3)
    (path,) = results.result_files(tmp_path)
    stored = json.loads(path.read_text())
    assert stored["config"]["method"] == "L2(strength=2.0)" and stored["config"]["seed"] == 3
    assert stored["config"]["training"]["epochs"] == 2
    assert stored["config"]["training"]["groups"][0]["lr"] == 0.001
    assert {"python", "torch", "numpy", "everlearn"} <= set(stored["made"]["versions"])
    assert "commit" in stored["made"]


X, Y = torch.rand(30, 4), torch.arange(30) % 2


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x["a"])


def own(train=None, net=None, **settings):
    train = (X, Y) if train is None else train
    test = train if net else (X, Y)
    stream = streams.from_tasks([(train, test)], scenario="domain", outputs=2, **settings)
    return lambda out: run(net or (lambda: nets.mlp(4, 2, hidden=(4,))), Method(), stream, out=out)


def regression(variance):
    pair = X, X[:, :2]
    stream = streams.from_tasks([(pair, pair)], scenario="domain", likelihood=Gaussian(variance))
    return lambda out: run(lambda: nets.mlp(4, 2, hidden=(4,)), Method(), stream, out=out)


def scheduled(factor):
    def schedule(optimizer, steps):
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor)

    stream = streams.from_tasks([((X, Y), (X, Y))], scenario="domain")
    return lambda out: run(lambda: nets.mlp(4, 2), Method(), stream, out=out, scheduler=schedule)


def halved(factor):
    class Half(Method):
        def before_step(self, model):
            for p in model.parameters():
                p.grad *= factor

    return lambda out: run(nets.mlp, Half(), streams.digits(), out=out)


class Scaled(nn.Module):
    """A model with more to it than its saved tensors and its repr."""

    def __init__(self, scale=1.0, heads=1, mask=1.0, frozen=False):
        super().__init__()
        self.attend, self.head, self.scale = nn.MultiheadAttention(4, heads), nn.Linear(4, 2), scale
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

    return own((X, Y), net=Net)


def scaled(**given):
    return own((X, Y), net=lambda: Scaled(**given))


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
        (own(torch.utils.data.TensorDataset(X, Y)), own(torch.utils.data.TensorDataset(X, 1 - Y))),
        (own(({"a": X}, Y), net=Named), own(({"a": X + 1}, Y), net=Named)),
        (own(transform=lambda x: x * 1.0), own(transform=lambda x: x * 2.0)),
        (own([(X, Y)]), own([(X, 1 - Y)])),
        (regression(1.0), regression(100.0)),
        (scheduled(0.5), scheduled(0.1)),
        (halved(0.5), halved(0.1)),
    ],
    ids=[
        *("attribute", "heads", "buffer that is not saved", "frozen", "class attribute", "property", "static method"),
        *("dataset", "dict inputs", "transform", "batches", "likelihood", "scheduler", "a method's code"),
    ],
)
def test_whatever_decides_the_result_decides_whether_it_is_done(first, second, tmp_path):
    for go in (first, second, first, second):
        go(tmp_path)
    assert len(results.load(tmp_path)) == 2


def test_what_cannot_be_told_apart_is_done_again(tmp_path, monkeypatch):
    def once():
        yield X, Y

    trained = []
    course = RUN_MODULE.StreamTraining
    monkeypatch.setattr(RUN_MODULE, "StreamTraining", lambda *a: trained.append(1) or course(*a))
    for _ in range(2):
        stream = streams.from_tasks([(once(), (X, Y))], scenario="domain", outputs=2)
        result = run(lambda: nets.mlp(4, 2), Method(), stream, out=tmp_path)
    assert result.config["fingerprints"]["data"] is None and len(trained) == 2


@pytest.mark.parametrize("thing", [threading.Lock, lambda: (i for i in "ab")])
def test_a_model_with_something_unreadable_in_it_is_found_again(thing, tmp_path, monkeypatch):
    class Net(nn.Linear):
        lock = threading.Lock()

        def __init__(self):
            super().__init__(4, 2)
            self.thing = thing()

    trained = []
    course = RUN_MODULE.StreamTraining
    monkeypatch.setattr(RUN_MODULE, "StreamTraining", lambda *a: trained.append(1) or course(*a))
    for _ in range(2):
        result = own((X, Y), net=Net)(tmp_path)
    assert result.config["fingerprints"]["model"] is not None and len(trained) == 1


def test_results_saved_later_do_not_overwrite_each_other(tmp_path):
    for shift in (0, 1):
        own((X + shift, Y))(None).save(tmp_path)
    assert len(results.load(tmp_path)) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"accuracy": [[1]]}', b"[]", b"\xff\xfe", b'{"format": 1, "accuracy": "x"}']
)
def test_a_corrupt_file_is_named_and_a_run_replaces_it(content, tmp_path, small_net, small_stream):
    run(small_net, Method(), small_stream(), out=tmp_path)
    (path,) = results.result_files(tmp_path)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a whole Everlearn result .*: move it away; a run is done again"):
        results.load(tmp_path)
    with pytest.warns(UserWarning, match="is damaged or not a result: the run is repeated, and replaces it"):
        run(small_net, Method(), small_stream(), out=tmp_path)
    assert len(results.load(tmp_path)) == 1


def test_folders_that_are_not_there_or_empty_or_closed(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        results.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="holds no results"):
        results.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Cannot write to the folder"):
        run(nets.mlp, Method(), streams.digits(), out=tmp_path / "file" / "folder")
    with pytest.raises(OSError, match="it is a file"):
        run(nets.mlp, Method(), streams.digits(), out=tmp_path / "file")


def test_a_result_under_the_name_of_another_run_is_not_taken_for_it(tmp_path, small_net, small_stream):
    run(small_net, Method(), small_stream(), out=tmp_path)
    other = run(small_net, L2(), small_stream(), out=tmp_path / "other")
    [path] = results.result_files(tmp_path)
    path.write_bytes(results.result_files(tmp_path / "other")[0].read_bytes())
    with pytest.warns(UserWarning, match="is the result of another run"):
        again = run(small_net, Method(), small_stream(), out=tmp_path)
    assert again.config["method"] == "finetune" and other.config["method"].startswith("L2")


@pytest.mark.skipif(shutil.which("git") is None or os.name != "posix", reason="needs git and a shell")
def test_a_repository_is_looked_at_and_nothing_of_it_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    script, ran = tmp_path / "script", tmp_path / "ran"
    script.write_text(f"#!/bin/sh\necho $1 >> '{ran}'\n[ \"$1\" = clean ] && cat\nexit 0\n")
    script.chmod(0o755)
    (tmp_path / "data.txt").write_text("1")
    (tmp_path / ".gitattributes").write_text("*.txt filter=own")
    git("init", "-q", ".")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    git("config", "filter.own.clean", f"{script} clean")
    git("config", "filter.own.required", "true")
    git("config", "core.fsmonitor", f"{script} fsmonitor")
    (tmp_path / ".git" / "hooks" / "post-index-change").write_text(script.read_text())
    (tmp_path / ".git" / "hooks" / "post-index-change").chmod(0o755)
    (tmp_path / "data.txt").write_text("1")  # the same, at another time: git looks into it
    os.utime(tmp_path / "data.txt", (1, 1))
    provenance._commit.cache_clear()
    assert provenance.provenance()["commit"] == commit
    (tmp_path / "data.txt").write_text("2")
    provenance._commit.cache_clear()
    assert provenance.provenance()["commit"] == f"{commit} (changed)"
    assert not ran.exists(), ran.read_text()
    git("status")
    assert ran.exists(), "git itself does run it"


def test_a_broken_write_leaves_the_old_file_and_no_part(tmp_path, monkeypatch):
    path = result().save(tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write(path, b"new")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_one_process_at_a_time(tmp_path):
    with files.exclusive_lock(tmp_path / "lock") as first, files.exclusive_lock(tmp_path / "lock") as second:
        assert first and not second
    with files.exclusive_lock(tmp_path / "lock") as third:
        assert third
