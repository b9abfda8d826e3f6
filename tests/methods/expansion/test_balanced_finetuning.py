import pytest
import torch
from torch import nn

from everlearn import Batch
from everlearn.methods.expansion.balanced_finetuning import balanced, fitted, scaled, viewed
from everlearn.runtime.randomness import generator


def test_every_group_has_its_share():
    groups = torch.tensor([0] * 50 + [1] * 7 + [2] * 3)
    places = balanced(groups, 7, generator(0))
    assert groups[places].bincount().tolist() == [7, 7, 7]
    times = places.bincount(minlength=60)
    assert times[:50].max() == 1 and times[50:57].tolist() == [1] * 7 and sorted(times[57:].tolist()) == [2, 2, 3]
    assert torch.equal(places, balanced(groups, 7, generator(0)))
    assert not torch.equal(places, balanced(groups, 7, generator(1)))


def pool(n=40, width=5, classes=3):
    return Batch(torch.randn(n, width), torch.arange(n) % classes)


@pytest.mark.usefixtures("double")
def test_a_step_by_hand():
    data, start = pool(30), nn.Linear(5, 3)
    made = fitted(
        start, data, data.y, 10, 1, 0, lr=0.3, temperature=4.0, decay=0.01
    )  # one epoch is one step, all examples
    p = (start(data.x) / 4).softmax(1)
    wrong = (p - torch.eye(3)[data.y]) / 4 / 30
    torch.testing.assert_close(made.weight, start.weight - 0.3 * (wrong.T @ data.x + 0.01 * start.weight))
    torch.testing.assert_close(made.bias, start.bias - 0.3 * (wrong.sum(0) + 0.01 * start.bias))


@pytest.mark.usefixtures("double")
def test_temperature_is_a_learning_rate():
    """What is learned at temperature T, divided by T, is what T = 1 learns with a rate T² times smaller."""
    data, start = pool(), nn.Linear(5, 3)
    args = (data, data.y, 12, 20, 3)
    plain = fitted(start, *args, lr=0.02, temperature=1.0, decay=0.0)
    hot = scaled(fitted(_times(start, 5.0), *args, lr=0.5, temperature=5.0, decay=0.0), 1 / 5)
    torch.testing.assert_close(hot.weight, plain.weight)
    torch.testing.assert_close(hot.bias, plain.bias)


def _times(layer, by):
    other = nn.Linear(layer.in_features, layer.out_features)
    other.load_state_dict(layer.state_dict())
    return scaled(other, by)


def test_it_is_fair_to_small_groups():
    """Two classes that overlap, one with a tenth of the examples: balanced, both are right equally often."""
    torch.manual_seed(0)
    y = (torch.rand(4000) < 0.1).long()
    x = torch.randn(4000, 1) + 2 * y[:, None] - 1
    data, right = Batch(x, y), {}
    for name, groups in (("balanced", y), ("as they are", torch.zeros_like(y))):
        made = fitted(nn.Linear(1, 2), data, groups, 300, 60, 0, lr=0.5, temperature=1.0)
        hit = made(x).argmax(1) == y
        right[name] = [hit[y == c].float().mean().item() for c in (0, 1)]
    assert abs(right["balanced"][0] - right["balanced"][1]) < 0.05 < right["as they are"][0] - right["as they are"][1]


def test_long_features_do_not_diverge():
    data, start = pool(), nn.Linear(5, 3)
    data.x *= 1e4
    before = start.weight.clone()
    made = fitted(start, data, data.y, 12, 50, 0, lr=1.0, temperature=1.0)
    assert made.weight.isfinite().all() and made.weight.abs().max() < 10
    assert torch.equal(start.weight, before)


def test_each_task_has_its_own_view():
    x, t = torch.arange(6.0)[:, None], torch.tensor([0, 1, 2, 0, 1, 2])
    seen = viewed({"a": x}, t, {0: lambda x: {"a": -x["a"]}, 1: None}, lambda x: {"a": 10 * x["a"]})
    assert seen["a"].flatten().tolist() == [0, 1, 20, -3, 4, 50]
    assert viewed(x, t, {}, None) is x
