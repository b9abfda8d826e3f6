"""The user's own tasks: how their labels and the scenario meet."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import everlearn
from everlearn import Gaussian, Method, nets, streams
from everlearn.streams import from_tasks

X, Y = torch.rand(12, 3), torch.arange(12) % 3
DIGITS, CLOTHES = ((X, Y), (X[:6], Y[:6])), ((X + 1, Y + 1), (X[:6] + 1, Y[:6] + 1))  # labels 0 1 2 and 1 2 3


def pairs_of(stream):
    return [((t.train.x, t.train.y), (t.test.x, t.test.y)) for t in stream]


def test_task_incremental_tasks_that_reuse_labels_have_outputs_of_their_own():
    pairs = pairs_of(streams.digits("domain"))  # every task's digits are called 0 and 1
    settings = {"epochs": 10, "batch_size": 32}
    accuracy = {
        s: everlearn.run(nets.mlp, Method(), from_tasks(pairs, scenario=s), **settings).accuracy
        for s in ("task", "domain")
    }
    split = everlearn.run(nets.mlp, Method(), streams.digits("task"), **settings).accuracy
    assert (accuracy["task"] == split).all() and split[-1].mean() > 0.98
    assert accuracy["domain"][-1].mean() < 0.9


@pytest.mark.parametrize("kind", ["arrays", "datasets", "loaders"])
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_labels_in_common_are_renumbered_whatever_the_data_are(kind, scenario):
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
            found = torch.cat([b.y for b in task.examples(5, split)])
            assert found.tolist() == (y - y.min() + first).tolist()
            assert task.original_labels(found).tolist() == y.tolist()
    assert stream[0].allowed[1].tolist() == (
        [False] * 3 + [True] * 3 if scenario == "task" else [True] * 3 + [False] * 3
    )


def test_one_class_or_two_is_the_users_to_say():
    with pytest.raises(
        ValueError, match=r"digits and clothes have labels in common \(1, 2\).*labels='shared'.*labels='own'"
    ):
        from_tasks([DIGITS, CLOTHES], scenario="class", names=["digits", "clothes"])
    again = from_tasks([DIGITS, CLOTHES], scenario="class", labels="shared")
    assert again.outputs == 4 and again[1].train.y.equal(Y + 1) and again[1].allowed.all()
    assert "(labels 1 2 3)" in str(from_tasks([DIGITS, CLOTHES], scenario="class", labels="own"))


def test_labels_that_do_not_meet_stay():
    apart = [DIGITS, ((X, Y + 3), (X, Y + 3))]
    for scenario, labels in (("task", None), ("class", None), ("task", "own"), ("class", "own"), ("class", "shared")):
        stream = from_tasks(apart, scenario=scenario, labels=labels)
        assert stream.outputs == 6 and stream[1].train.y.equal(Y + 3)
        assert stream[1].original_labels(stream[1].train.y).equal(Y + 3)


def test_one_head_for_all_tasks_where_it_is_asked_for():
    stream = from_tasks([DIGITS, CLOTHES], scenario="task", labels="shared")
    assert stream.outputs == 4 and stream[1].allowed.tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]


def test_all_tasks_as_one_read_back_too():
    joint = from_tasks([DIGITS, CLOTHES], scenario="task").joint()[0]
    batch = next(joint.batches(24))
    assert joint.original_labels(batch.y).equal(torch.where(batch.t == 0, batch.y, batch.y - 2))


def test_ready_made_streams_say_what_their_outputs_stand_for():
    assert streams.digits("domain")[2].labels == {0: 4, 1: 5}
    assert streams.permuted((X, Y), (X, Y), tasks=2, scenario="class")[1].labels == {3: 0, 4: 1, 5: 2}
    assert streams.digits("class")[2].labels == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scenario": "domain", "labels": "own"}, "Domain-incremental tasks share their labels"),
        ({"labels": "mine"}, "labels: got 'mine', allowed: 'own', 'shared'"),
        ({"outputs": 4}, "need 6 outputs, not 4"),
        ({"classes": [[0, 1, 2], [1, 2]]}, "The label 3 is not one of the task's: it has 1, 2"),
    ],
)
def test_what_labels_cannot_be(given, message):
    with pytest.raises(ValueError, match=message):
        from_tasks([DIGITS, CLOTHES], **given)


def test_a_label_that_was_not_named_is_refused_where_it_comes():
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    with pytest.raises(ValueError, match=r"The label 2 is not one of the task's: it has 0, 1"):
        list(from_tasks([(loader, loader)] * 2, classes=[[0, 1], [0, 1]])[1].batches(4))
    floats = [(X, Y / 2)]
    with pytest.raises(TypeError, match="must be integers"):
        list(from_tasks([(floats, floats)] * 2, classes=[[0, 1, 2]] * 2)[1].batches(4))


def test_targets_that_are_no_classes_are_left_alone():
    stream = from_tasks([((X, X), (X, X))] * 2, scenario="domain", likelihood=Gaussian())
    assert stream[1].train.y.equal(X) and stream[1].labels == {}


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
@pytest.mark.parametrize("lowest", [-1, -100])
def test_negative_labels_are_refused_where_a_stream_is_made(scenario, lowest):
    wrong = Y.where(Y > 0, lowest)
    message = f"Task 1 has the label {lowest}: classes are numbered from 0"
    for pair in [
        ((X, wrong), None),
        ((X, Y), (X, wrong)),
        ((X.numpy(), wrong.numpy()), None),
        (TensorDataset(X, wrong), None),
    ]:
        with pytest.raises(ValueError, match=message):
            from_tasks([((X, Y), None), pair], scenario=scenario)
    with pytest.raises(ValueError, match=message):
        from_tasks([((X, Y), None)] * 2, scenario=scenario, classes=[[0, 1, 2], [lowest, 1, 2]])
