"""Streams of user-defined tasks: labels and outputs in every scenario."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import everlearn
from everlearn import Gaussian, Method, nets, streams
from everlearn.streams import from_tasks

X, Y = torch.rand(12, 3), torch.arange(12) % 3
DIGITS = ((X, Y), (X[:6], Y[:6]))  # labels 0, 1, 2
CLOTHES = ((X + 1, Y + 1), (X[:6] + 1, Y[:6] + 1))  # labels 1, 2, 3


def pairs_of(stream):
    return [((task.train.x, task.train.y), (task.test.x, task.test.y)) for task in stream]


def test_task_incremental_tasks_with_common_labels_have_separate_outputs():
    pairs = pairs_of(streams.digits("domain"))  # the labels of every task are 0 and 1
    settings = {"epochs": 10, "batch_size": 32}
    accuracy = {
        scenario: everlearn.run(nets.mlp, Method(), from_tasks(pairs, scenario=scenario), **settings).accuracy
        for scenario in ("task", "domain")
    }
    expected = everlearn.run(nets.mlp, Method(), streams.digits("task"), **settings).accuracy
    assert (accuracy["task"] == expected).all() and expected[-1].mean() > 0.98
    assert accuracy["domain"][-1].mean() < 0.9


@pytest.mark.parametrize("kind", ["arrays", "datasets", "loaders"])
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_common_labels_are_renumbered_for_all_kinds_of_data(kind, scenario):
    wrap = {
        "arrays": lambda pair: pair,
        "datasets": lambda pair: TensorDataset(*pair),
        "loaders": lambda pair: DataLoader(TensorDataset(*pair), batch_size=4),
    }[kind]
    tasks = [tuple(map(wrap, pair)) for pair in (DIGITS, CLOTHES)]
    stream = from_tasks(tasks, scenario=scenario, classes=[[0, 1, 2], [1, 2, 3]], labels="own")
    assert stream.outputs == 6 and stream.settings["classes"] == [[0, 1, 2], [1, 2, 3]]
    for task, pair, first in zip(stream, (DIGITS, CLOTHES), (0, 3), strict=True):
        for split, (_, y) in zip(("train", "test"), pair, strict=True):
            labels = torch.cat([batch.y for batch in task.examples(5, split)])
            assert labels.tolist() == (y - y.min() + first).tolist()
            assert task.original_labels(labels).tolist() == y.tolist()
    assert stream[0].allowed[1].tolist() == (
        [False] * 3 + [True] * 3 if scenario == "task" else [True] * 3 + [False] * 3
    )


def test_common_labels_need_explicit_choice():
    with pytest.raises(
        ValueError, match=r"digits and clothes have labels in common \(1, 2\).*labels='shared'.*labels='own'"
    ):
        from_tasks([DIGITS, CLOTHES], scenario="class", names=["digits", "clothes"])
    shared = from_tasks([DIGITS, CLOTHES], scenario="class", labels="shared")
    assert shared.outputs == 4 and shared[1].train.y.equal(Y + 1) and shared[1].allowed.all()
    assert "(labels 1 2 3)" in str(from_tasks([DIGITS, CLOTHES], scenario="class", labels="own"))


def test_disjoint_labels_are_unchanged():
    disjoint = [DIGITS, ((X, Y + 3), (X, Y + 3))]
    for scenario, labels in (("task", None), ("class", None), ("task", "own"), ("class", "own"), ("class", "shared")):
        stream = from_tasks(disjoint, scenario=scenario, labels=labels)
        assert stream.outputs == 6 and stream[1].train.y.equal(Y + 3)
        assert stream[1].original_labels(stream[1].train.y).equal(Y + 3)


def test_shared_head_for_all_tasks():
    stream = from_tasks([DIGITS, CLOTHES], scenario="task", labels="shared")
    assert stream.outputs == 4 and stream[1].allowed.tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]


def test_joint_task_maps_to_original_labels():
    joint = from_tasks([DIGITS, CLOTHES], scenario="task").joint()[0]
    batch = next(joint.batches(24))
    assert joint.original_labels(batch.y).equal(torch.where(batch.t == 0, batch.y, batch.y - 2))


def test_streams_map_outputs_to_original_labels():
    assert streams.digits("domain")[2].labels == {0: 4, 1: 5}
    assert streams.permuted((X, Y), (X, Y), tasks=2, scenario="class")[1].labels == {3: 0, 4: 1, 5: 2}
    assert streams.digits("class")[2].labels == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenario": "domain", "labels": "own"}, "Domain-incremental tasks share their labels"),
        ({"labels": "mine"}, "labels: got 'mine', allowed: 'own', 'shared'"),
        ({"outputs": 4}, "need 6 outputs, not 4"),
        ({"classes": [[0, 1, 2], [1, 2]]}, "The label 3 is not one of the task's: it has 1, 2"),
    ],
)
def test_invalid_labels_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        from_tasks([DIGITS, CLOTHES], **options)


def test_label_without_output_is_refused_when_loaded():
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    with pytest.raises(ValueError, match=r"The label 2 is not one of the task's: it has 0, 1"):
        list(from_tasks([(loader, loader)] * 2, classes=[[0, 1], [0, 1]])[1].batches(4))
    floats = [(X, Y / 2)]
    with pytest.raises(TypeError, match="must be integers"):
        list(from_tasks([(floats, floats)] * 2, classes=[[0, 1, 2]] * 2)[1].batches(4))


def test_regression_targets_are_unchanged():
    stream = from_tasks([((X, X), (X, X))] * 2, scenario="domain", likelihood=Gaussian())
    assert stream[1].train.y.equal(X) and stream[1].labels == {}


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
@pytest.mark.parametrize("lowest", [-1, -100])
def test_negative_labels_are_refused(scenario, lowest):
    negative_labels = Y.where(Y > 0, lowest)
    message = f"Task 1 has the label {lowest}: classes are numbered from 0"
    for pair in [
        ((X, negative_labels), None),
        ((X, Y), (X, negative_labels)),
        ((X.numpy(), negative_labels.numpy()), None),
        (TensorDataset(X, negative_labels), None),
    ]:
        with pytest.raises(ValueError, match=message):
            from_tasks([((X, Y), None), pair], scenario=scenario)
    with pytest.raises(ValueError, match=message):
        from_tasks([((X, Y), None)] * 2, scenario=scenario, classes=[[0, 1, 2], [lowest, 1, 2]])
