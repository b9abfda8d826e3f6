"""Hooks belong to a method: they are removed, copied and restored by owner."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from everlearn import HAT, PNN, ExpandNet, Method, Task
from everlearn.surgery.hooks import make_hook, remove_hooks, without_hooks


def scale_outputs(factor, module, args, outputs):
    return factor * outputs


@dataclass(eq=False)
class Scaled(Method):
    """Scale the model's outputs by a hook."""

    factor: float = 2.0

    def begin_task(self, model, task):
        remove_hooks(model, "Scaled")
        model.register_forward_hook(make_hook("Scaled", scale_outputs, self.factor))

    def detach(self, model):
        remove_hooks(model, "Scaled")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def tasks():
    torch.manual_seed(1)
    return [Task((torch.randn(20, 4), torch.randint(3, (20,))), id=k, steps=3) for k in range(2)]


def train_two_tasks(method, model):
    for task in tasks():
        method.begin_task(model, task)
        optimizer = torch.optim.SGD([*model.parameters(), *method.parameters()], lr=0.1)
        for batch in task.batches(8):
            loss = method.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)
        method.end_task(model, task)


def count_hooks(model, owner):
    removed = remove_hooks(copy.deepcopy(model), owner)
    return len(removed)


def test_methods_with_hooks_can_be_chained_and_detached_one_by_one():
    model = net()
    pnn = PNN()
    scaled = Scaled()
    train_two_tasks(pnn + scaled, model)
    x = torch.randn(5, 4)
    with_both = model(x)
    assert count_hooks(model, "PNN") and count_hooks(model, "Scaled") == 1

    # A copy has the hooks of both methods.
    torch.testing.assert_close(copy.deepcopy(model)(x), with_both)

    scaled.detach(model)
    assert not count_hooks(model, "Scaled") and count_hooks(model, "PNN")
    torch.testing.assert_close(2 * model(x), with_both)
    pnn.detach(model)
    assert not remove_hooks(model)
    assert not torch.allclose(2 * model(x), with_both), "the lateral connections are removed"


def test_hooks_of_all_methods_are_restored():
    model = net()
    train_two_tasks(PNN() + Scaled(), model)
    x = torch.randn(5, 4)
    expected = model(x)
    with without_hooks(model):
        assert not remove_hooks(model)
    torch.testing.assert_close(model(x), expected)


def test_a_saved_chain_is_loaded_with_its_hooks():
    model = net()
    chain = PNN() + Scaled()
    train_two_tasks(chain, model)
    x = torch.randn(5, 4)
    expected = chain.predict(model, x, torch.full((5,), 1))

    loaded_model = net()
    loaded = PNN() + Scaled()
    loaded_model.load_state_dict(model.state_dict())
    loaded.load_state_dict(chain.state_dict())
    torch.testing.assert_close(loaded.predict(loaded_model, x, torch.full((5,), 1)), expected)


@pytest.mark.parametrize(("first", "second"), [(PNN, HAT), (ExpandNet, PNN)])
def test_conflicts_are_refused_by_name_when_a_chain_is_created(first, second):
    with pytest.raises(ValueError, match=f"{first.__name__} and {second.__name__} both define predict"):
        first() + second()
