import pytest
import torch
from torch import nn

from everlearn import Batch
from everlearn.methods.expansion.balanced_finetuning import (
    balanced_indices,
    fit_classifier,
    scale_outputs_,
    transform_by_task,
)
from everlearn.runtime.randomness import generator


def test_every_group_is_drawn_equally_often():
    groups = torch.tensor([0] * 50 + [1] * 7 + [2] * 3)
    indices = balanced_indices(groups, 7, generator(0))
    assert groups[indices].bincount().tolist() == [7, 7, 7]
    counts = indices.bincount(minlength=60)
    assert counts[:50].max() == 1 and counts[50:57].tolist() == [1] * 7 and sorted(counts[57:].tolist()) == [2, 2, 3]
    assert torch.equal(indices, balanced_indices(groups, 7, generator(0)))
    assert not torch.equal(indices, balanced_indices(groups, 7, generator(1)))


def pool(n=40, width=5, classes=3):
    return Batch(torch.randn(n, width), torch.arange(n) % classes)


@pytest.mark.usefixtures("double")
def test_a_step_matches_the_formula():
    data = pool(30)
    start = nn.Linear(5, 3)
    # One epoch is one step on all examples.
    tuned = fit_classifier(start, data, data.y, 10, 1, 0, lr=0.3, temperature=4.0, decay=0.01)
    p = (start(data.x) / 4).softmax(1)
    error = (p - torch.eye(3)[data.y]) / 4 / 30
    torch.testing.assert_close(tuned.weight, start.weight - 0.3 * (error.T @ data.x + 0.01 * start.weight))
    torch.testing.assert_close(tuned.bias, start.bias - 0.3 * (error.sum(0) + 0.01 * start.bias))


@pytest.mark.usefixtures("double")
def test_temperature_is_a_learning_rate():
    """Weights tuned at temperature T, divided by T, equal those tuned at T = 1 with a rate T² times smaller."""
    data = pool()
    start = nn.Linear(5, 3)
    args = (data, data.y, 12, 20, 3)
    plain = fit_classifier(start, *args, lr=0.02, temperature=1.0, decay=0.0)
    hot = scale_outputs_(fit_classifier(scaled_copy(start, 5.0), *args, lr=0.5, temperature=5.0, decay=0.0), 1 / 5)
    torch.testing.assert_close(hot.weight, plain.weight)
    torch.testing.assert_close(hot.bias, plain.bias)


def scaled_copy(layer, factor):
    duplicate = nn.Linear(layer.in_features, layer.out_features)
    duplicate.load_state_dict(layer.state_dict())
    return scale_outputs_(duplicate, factor)


def test_small_groups_are_as_accurate_as_large_ones():
    """Two overlapping classes, one with a tenth of the examples, have equal accuracy after balancing."""
    torch.manual_seed(0)
    y = (torch.rand(4000) < 0.1).long()
    x = torch.randn(4000, 1) + 2 * y[:, None] - 1
    data = Batch(x, y)
    accuracy = {}
    for name, groups in (("balanced", y), ("unbalanced", torch.zeros_like(y))):
        tuned = fit_classifier(nn.Linear(1, 2), data, groups, 300, 60, 0, lr=0.5, temperature=1.0)
        is_correct = tuned(x).argmax(1) == y
        accuracy[name] = [is_correct[y == c].float().mean().item() for c in (0, 1)]
    assert (
        abs(accuracy["balanced"][0] - accuracy["balanced"][1])
        < 0.05
        < accuracy["unbalanced"][0] - accuracy["unbalanced"][1]
    )


def test_long_features_do_not_diverge():
    data = pool()
    start = nn.Linear(5, 3)
    data.x *= 1e4
    before = start.weight.clone()
    tuned = fit_classifier(start, data, data.y, 12, 50, 0, lr=1.0, temperature=1.0)
    assert tuned.weight.isfinite().all() and tuned.weight.abs().max() < 10
    assert torch.equal(start.weight, before)


def test_each_example_gets_the_transform_of_its_task():
    x = torch.arange(6.0)[:, None]
    t = torch.tensor([0, 1, 2, 0, 1, 2])
    transformed = transform_by_task({"a": x}, t, {0: lambda x: {"a": -x["a"]}, 1: None}, lambda x: {"a": 10 * x["a"]})
    assert transformed["a"].flatten().tolist() == [0, 1, 20, -3, 4, 50]
    assert transform_by_task(x, t, {}, None) is x
