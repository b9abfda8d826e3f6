"""Hooks belong to a method: they are removed, copied and restored by owner."""

import copy
import io
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from everlearn import (
    EWC,
    HAT,
    PNN,
    ExpandableRepresentation,
    ExpandNet,
    Freeze,
    GenerativeReplay,
    LwF,
    Method,
    PackNet,
    Task,
    nets,
    streams,
    train,
)
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


# Methods and why they cannot be chained, in either order.
CONFLICTS = [
    (Freeze, PNN, "PNN trains a new network in each task"),
    (lambda: Freeze("statistics"), PNN, "PNN trains a new network in each task"),
    (Freeze, ExpandableRepresentation, "ExpandableRepresentation trains a new network in each task"),
    (Freeze, lambda: Freeze("statistics"), "each would undo the other"),
    (LwF, HAT, "the teacher is a copy of the model's weights, and HAT predicts with more"),
    (LwF, PNN, "the teacher is a copy of the model's weights, and PNN predicts with more"),
    (GenerativeReplay, ExpandNet, "the teacher is a copy of the model's weights, and ExpandNet predicts with more"),
]


@pytest.mark.parametrize(("make_first", "make_second", "reason"), CONFLICTS)
def test_methods_that_would_disturb_each_other_are_refused_by_name(make_first, make_second, reason):
    first = make_first()
    second = make_second()
    names = f"{type(first).__name__} and {type(second).__name__} cannot be chained: {reason}"
    for chained in [(first, second), (EWC(), second, first)]:
        with pytest.raises(ValueError, match=names):
            sum(chained[1:], chained[0])


def batchnorm_net(stream):
    torch.manual_seed(0)
    return nets.cnn(stream.inputs, stream.outputs, channels=(4, 8))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("make", [HAT, PackNet, ExpandNet])
def test_statistics_stay_those_of_the_first_task_beside_a_method_with_hooks(make, is_reversed):
    stream = streams.digits("task")
    model = batchnorm_net(stream)
    method = make()
    freeze = Freeze("statistics")
    chain = freeze + method if is_reversed else method + freeze
    train(model, chain, stream[0], optimizer=sgd)
    x = stream[0].test.x[:20]
    old_outputs = chain.predict(model, x, 0)
    old_buffers = {name: v.clone() for name, v in model.named_buffers()}
    train(model, chain, stream[1], optimizer=sgd)
    assert all(torch.equal(v, old_buffers[name]) for name, v in model.named_buffers())
    assert torch.equal(chain.predict(model, x, 0), old_outputs)

    # A copy and a saved model compute the same, with the hooks of both methods.
    with torch.no_grad():
        expected = model.eval()(x)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(x), expected)
    for owner in (make.__name__, "Freeze"):
        assert count_hooks(loaded, owner) == count_hooks(model, owner)

    # Each method removes its own hooks.
    num_hooks = count_hooks(model, None)
    num_freeze_hooks = count_hooks(model, "Freeze")
    assert num_freeze_hooks == 2, "one for each BatchNorm"
    freeze.detach(model)
    assert count_hooks(model, None) == num_hooks - num_freeze_hooks
    method.detach(model)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("make", [HAT, PackNet, ExpandNet, Freeze])
def test_a_detached_copy_leaves_the_locks_of_the_original(make):
    stream = streams.digits("task")
    model = batchnorm_net(stream)
    method = make()
    train(model, method, stream[0], optimizer=sgd)
    x = stream[0].test.x[:20]
    body = {name: p.detach().clone() for name, p in model.state_dict().items() if not name.startswith("4.")}
    old_outputs = method.predict(model, x, 0)

    task = stream[1]
    task.steps = 10
    method.begin_task(model, task)
    model_copy = copy.deepcopy(model)
    method.detach(model_copy)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model_copy.modules())
    assert all(p.requires_grad for p in model_copy.parameters())
    optimizer = sgd([*model.parameters(), *method.parameters()])
    for batch in task.batches(32):
        loss = method.loss(model.train(), batch)
        optimizer.zero_grad()
        loss.backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
    method.end_task(model, task)
    if make is Freeze:
        assert all(torch.equal(v, model.state_dict()[name]) for name, v in body.items())
    else:
        assert torch.equal(method.predict(model, x, 0), old_outputs)


def test_freezing_the_features_beside_added_units_changes_nothing():
    stream = streams.digits("task")
    x = stream[0].test.x[:20]
    outputs = []
    for make in (ExpandNet, lambda: ExpandNet() + Freeze(), lambda: Freeze() + ExpandNet()):
        model = batchnorm_net(stream)
        method = make()
        for task in stream.tasks[:3]:
            torch.manual_seed(0)
            train(model, method, task, optimizer=sgd)
        outputs.append(torch.stack([method.predict(model, x, k) for k in range(3)]))
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])


@pytest.mark.parametrize("make", [lambda: LwF(warmup=4) + Freeze(), lambda: Freeze() + LwF(warmup=4)])
@pytest.mark.parametrize("num_steps", [2, 6])
def test_a_chain_of_freezing_methods_resumes_within_a_task(make, num_steps):
    stream = streams.digits("class")

    def run_steps(model, method, optimizer, batches):
        for batch in batches:
            loss = method.loss(model.train(), batch)
            optimizer.zero_grad()
            loss.backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)

    model = batchnorm_net(stream)
    method = make()
    for task in stream.tasks[:2]:
        train(model, method, task, optimizer=sgd)
    method.begin_task(model, stream[2])
    batches = list(stream[2].batches(16))[:8]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_steps(model, method, optimizer, batches[:num_steps])

    resumed_model = batchnorm_net(stream)
    resumed_method = make()
    resumed_model.load_state_dict(model.state_dict())
    resumed_method.load_state_dict(method.state_dict())
    resumed_method.begin_task(resumed_model, stream[2])
    resumed_optimizer = torch.optim.SGD(resumed_model.parameters(), lr=0.1)

    run_steps(model, method, optimizer, batches[num_steps:])
    run_steps(resumed_model, resumed_method, resumed_optimizer, batches[num_steps:])
    for name, value in model.state_dict().items():
        assert torch.equal(resumed_model.state_dict()[name], value), name
