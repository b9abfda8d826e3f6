import gc
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from everlearn import ER, Batch, Method, Task
from everlearn.core.data_source import Arrays, Batches, Items, as_source, join
from everlearn.curvature import fisher

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10) % 3


class Noisy(Dataset):
    """A dataset with random augmentation by torch, numpy and random."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        import random

        return torch.tensor([i, torch.rand(()), np.random.rand(), random.random()], dtype=torch.float32), i % 2


class EmptyIterable(IterableDataset):
    def __iter__(self):
        return iter([])


def all_inputs(task, size=4, **kwargs):
    return torch.cat([b.x for b in task.batches(size, **kwargs)])


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        [X, Y],
        (X, Y.tolist()),
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), batch_size=4),
        [(X[:5], Y[:5]), (X[5:], Y[5:])],
        [(X[:5].numpy(), Y[:5].numpy()), (X[5:].numpy(), Y[5:].numpy())],
    ],
    ids=["tensors", "numpy", "list", "list of labels", "dataset", "loader", "batches", "numpy batches"],
)
def test_a_task_accepts_common_data_types(data):
    task = Task(data, data, id=3)
    for split in ("train", "test"):
        batches = list(task.examples(4, split))
        assert torch.equal(torch.cat([b.x for b in batches]), X)
        assert torch.equal(torch.cat([b.y for b in batches]), Y)
        assert all((b.t == 3).all() for b in batches)
    rows = torch.cat([torch.cat([b.x, b.y[:, None]], 1) for b in task.batches(4)])
    assert torch.equal(rows[rows[:, 0].argsort()], torch.cat([X, Y[:, None]], 1))


def test_inputs_may_be_unlabelled_or_named():
    assert next(Task(X).examples(4)).y is None
    task = Task(({"ids": X, "mask": X > 3}, Y))
    batch = next(task.batches(4))
    assert set(batch.x) == {"ids", "mask"} and len(batch) == 4
    assert [len(part) for part in batch.chunk(3)] == [2, 1, 1]


def test_numpy_floats_take_torchs_default_and_tensors_stay():
    assert as_source((X.numpy().astype(np.float64), Y)).x.dtype == torch.float32
    assert as_source((X.double(), Y)).x.dtype == torch.float64


def test_arrays_are_indexed_by_batch_not_by_example():
    class Counting:
        def __init__(self):
            self.calls = 0

        def __call__(self, x):
            self.calls += 1
            return x

    view = Counting()
    list(Task(Arrays(X, Y, view=view)).batches(5))
    assert view.calls == 2


@pytest.mark.parametrize("seed", [0, 1])
def test_the_number_of_workers_changes_nothing(seed):
    results = []
    for workers in (0, 1, 2):
        task = Task(Items(Noisy(), workers))
        before = torch.get_rng_state()
        results.append(all_inputs(task, 4, epochs=2, seed=seed))
        assert torch.equal(before, torch.get_rng_state()), "loading must not touch the model's random numbers"
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert results[0][:, 1:].unique().numel() == 72, "every draw is different"


def test_order_depends_on_seed_task_and_epoch_alone():
    a = Task((X, Y), id=0)
    b = Task((X, Y), id=0)
    torch.rand(100)
    assert torch.equal(all_inputs(a, epochs=2), all_inputs(b, epochs=2))
    first, second = all_inputs(a, epochs=2).split(10)
    assert not torch.equal(first, second)
    assert not torch.equal(all_inputs(a), all_inputs(a, seed=1))
    assert not torch.equal(all_inputs(a), all_inputs(Task((X, Y), id=1)))


def test_a_shuffling_loader_follows_the_seed():
    task = Task(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True))
    assert torch.equal(all_inputs(task, seed=1), all_inputs(task, seed=1))
    assert not torch.equal(all_inputs(task, seed=1), all_inputs(task, seed=2))


def test_iterations_cross_epochs_and_stop():
    batches = list(Task((X, Y)).batches(4, iterations=7))
    assert [b.epoch for b in batches] == [0, 0, 0, 1, 1, 1, 2]
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2, 4]
    assert Task((X, Y)).planned_steps(4, epochs=3) == 9
    assert Task(b for b in [(X, Y)]).planned_steps(4) is None


def test_joined_tasks_keep_rows_together():
    parts = [Arrays(X, Y, view=lambda x: x + 100), Arrays(X, Y), Arrays(X[:3], Y[:3])]
    source = join(parts, [0, 1, 2])
    assert len(source) == 23
    order = torch.randperm(23)
    x, y, t = (torch.cat(v) for v in zip(*source.batches(7, order, 0), strict=True))
    expected = torch.cat([X + 100, X, X[:3]]), torch.cat([Y, Y, Y[:3]]), torch.tensor([0] * 10 + [1] * 10 + [2] * 3)
    assert all(torch.equal(a, b[order]) for a, b in zip((x, y, t), expected, strict=True))


def test_joined_datasets():
    source = join([Items(TensorDataset(X, Y)), Items(TensorDataset(X, Y))], [4, 5])
    x, _, t = (torch.cat(v) for v in zip(*source.batches(8, None, 0), strict=True))
    assert torch.equal(x, torch.cat([X, X])) and torch.equal(t, torch.tensor([4] * 10 + [5] * 10))
    with pytest.raises(TypeError, match="when all are arrays or all are Datasets; these are Batches, Items"):
        join([Items(TensorDataset(X, Y)), Batches([(X, Y)])], [0, 1])


def test_a_subset_does_not_keep_all_rows_alive():
    all_rows = torch.zeros(1000, 100)
    reference = weakref.ref(all_rows)
    part = Arrays(all_rows, torch.zeros(1000)).subset(torch.arange(3))
    del all_rows
    gc.collect()
    assert reference() is None and len(part) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:4]), r"differ in length: \[4, 10\]"),
        ("digits", "Cannot learn from a str"),
        (3, "Cannot learn from a int"),
        (EmptyIterable(), "wrap it, DataLoader"),
    ],
)
def test_unsupported_data_is_refused(data, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Task(data)


def test_a_generator_is_read_once():
    task = Task(b for b in [(X, Y)])
    with pytest.raises(ValueError, match="a generator can be read once only"):
        list(task.batches(4, epochs=2))


def test_iterations_read_no_additional_batch():
    reads = []

    def endless():
        while True:
            reads.append(1)
            yield X, Y

    assert len(list(Task(endless()).batches(4, iterations=3))) == 3 and len(reads) == 3


def test_unsupported_batches_are_refused():
    with pytest.raises(TypeError, match=r"must be a pair \(x, y\) or a dict with labels, got a set"):
        list(Task([{1, 2}]).batches(4))


def test_labels_are_taken_from_a_dict():
    batch, unlabelled = Task([{"a": X, "labels": Y}, {"a": X}]).batches(4)
    assert torch.equal(batch.x["a"], X) and torch.equal(batch.y, Y) and set(batch.x) == {"a"}
    assert unlabelled.y is None


def test_lists_of_numbers_are_tensors():
    model = torch.nn.Linear(2, 3)
    expected = fisher(model, (X, Y), "true").values["weight"]
    rows = X.tolist()
    labels = Y.tolist()
    for data in (
        (rows, labels),
        (rows, Y),
        [(rows, labels)],
        [{"input": rows, "labels": labels}],
        (X.double().numpy(), Y.int()),
    ):
        torch.testing.assert_close(fisher(model, data, "true").values["weight"], expected)
    torch.testing.assert_close(fisher(model, rows).values["weight"], fisher(model, X).values["weight"])
    torch.testing.assert_close(Method().predict(model, rows), model(X))
    with pytest.raises(TypeError, match="rows of one length"):
        as_source(([[1.0], [1.0, 2.0]], [0, 1]))


@pytest.mark.parametrize(
    "labels", [Y.int(), Y.short(), Y.to(torch.int8), Y.tolist(), Y.int().numpy()], ids=lambda y: str(type(y))
)
def test_a_batch_accepts_labels_of_common_types(labels):
    model = torch.nn.Linear(2, 3)
    for x in (X, X.tolist(), X.numpy()):
        torch.testing.assert_close(
            Method().loss(model, Batch(x, labels)), torch.nn.functional.cross_entropy(model(X), Y)
        )
    method = ER(4)
    method.loss(model, Batch(X, labels))
    method.loss(model, Batch(X, Y)).backward()
    with pytest.raises(TypeError, match="Class labels must be integers"):
        Batch(X, [0.5] * len(X))
