import pytest
import torch

from everlearn import Batch, Categorical, Stream, Task, allowed_classes, streams

X = torch.rand(8, 3)
Y = torch.arange(8) % 4


def test_the_scenario_defines_allowed_classes():
    classes = [[0, 1], [2, 3]]
    assert allowed_classes("task", classes, 0).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert allowed_classes("class", classes, 0).tolist() == [[1, 1, 0, 0]] * 2
    assert allowed_classes("class", classes, 1).tolist() == [[1, 1, 1, 1]] * 2
    assert allowed_classes("domain", classes, 0) is None
    with pytest.raises(ValueError, match="Unknown scenario 'time': it is one of task, domain, class"):
        allowed_classes("time", classes, 0)


def test_a_batch_is_scored_with_its_allowed_classes():
    table = allowed_classes("task", [[0, 1], [2, 3]], 0)
    batch = Batch(X[:2], torch.tensor([1, 2]), torch.tensor([0, 1]), table)
    outputs = torch.tensor([[0.0, 1.0, 9.0, 9.0], [9.0, 9.0, 1.0, 0.0]])
    assert batch.score(outputs).tolist() == [1, 1]
    second_batch = batch.like(X[:1], torch.tensor([3]), torch.tensor([1]))
    assert second_batch.allowed is table and second_batch.score(outputs[:1]).tolist() == [0]


def test_micro_batches_concatenate_to_the_batch():
    batch = Batch(X, Y, torch.zeros(8, dtype=torch.long))
    parts = batch.chunk(3)
    assert [len(p) for p in parts] == [3, 3, 2]
    assert torch.equal(torch.cat([p.x for p in parts]), X) and torch.equal(torch.cat([p.y for p in parts]), Y)
    assert [len(p) for p in batch.chunk(20)] == [1] * 8


def test_training_and_evaluation_have_separate_transforms():
    task = Task((X, Y), (X, Y), transform=lambda x: x + torch.rand(1), eval_transform=lambda x: x * 2)
    torch.manual_seed(0)
    rng_state = torch.get_rng_state()
    inputs = [next(task.batches(8)).x for _ in range(2)]
    assert torch.equal(inputs[0], inputs[1]), "augmentation depends on the seed"
    assert torch.equal(rng_state, torch.get_rng_state()), "and leaves the global random state unchanged"
    assert not torch.equal(*(b.x.sort(0).values for b in task.batches(8, epochs=2)))
    for split in ("train", "test"):
        assert torch.equal(next(task.examples(8, split)).x, X * 2)


def test_a_batch_without_labels_has_no_loss():
    with pytest.raises(ValueError, match="has no labels"):
        Batch(X).loss(torch.zeros(8, 4))


def test_missing_data_raise_an_error():
    with pytest.raises(ValueError, match="has no test data"):
        next(Task((X, Y)).examples(4, "test"))
    with pytest.raises(ValueError, match="at least one task"):
        Stream([], "task")


@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
def test_joint_has_every_example_of_every_task(scenario):
    stream = streams.permuted((X, Y), (X, Y), tasks=3, scenario=scenario)
    joint = stream.joint()
    assert len(joint) == 1 and joint.test_tasks is stream.test_tasks
    batch = next(joint[0].batches(100))
    task_batches = [next(t.batches(100)) for t in stream]
    sorted_rows = lambda b: sorted(torch.cat([b.x, b.y[:, None], b.t[:, None]], 1).tolist())
    assert sorted_rows(batch) == sorted(row for b in task_batches for row in sorted_rows(b))
    if scenario == "task":
        assert torch.equal(batch.allowed_rows, torch.stack([stream[0].allowed[t] for t in batch.t]))
    if scenario == "class":
        assert batch.allowed_rows.all()


def test_labels_are_converted_to_the_dtype_of_the_likelihood():
    assert Task((X, Y.to(torch.uint8))).train.y.dtype == torch.int64
    assert isinstance(Task((X, Y)).likelihood, Categorical)


def test_adding_batches_concatenates_them():
    first = Batch({"a": torch.zeros(2, 3)}, torch.tensor([0, 1]), torch.tensor([4, 4]), epoch=3)
    joined = first + Batch({"a": torch.ones(1, 3)}, torch.tensor([2]), torch.tensor([1]))
    assert joined.x["a"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3]
    assert joined.y.tolist() == [0, 1, 2] and joined.t.tolist() == [4, 4, 1] and joined.epoch == 3
