"""SLCA equals a naive loop with learning rates by parameter group, and works in loops and streams of all kinds."""

import copy
import io
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import everlearn
from everlearn import (
    DER,
    ER,
    EWC,
    L2,
    MAS,
    SI,
    SLCA,
    Batch,
    Freeze,
    GenerativeReplay,
    LwF,
    Method,
    NearestMean,
    PackNet,
    Task,
    nets,
    streams,
)
from everlearn.core.likelihood import Gaussian
from everlearn.runtime.randomness import derive
from everlearn.surgery.heads import grow_output
from everlearn.trainer.checkpoints import CheckpointEvery
from tests.helpers import parameter_vector, train_tasks

SETTINGS = {"epochs": 3, "samples": 16, "lr": 0.05, "shrinkage": 0.3, "variance": 1e-3, "seed": 5}
OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, weight_decay=0.1),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5),
}


def make_tasks(num_tasks=3, num_per_class=30):
    """Draw tasks of two classes each."""
    random = torch.Generator().manual_seed(0)
    tasks = []
    for k in range(num_tasks):
        y = 2 * k + torch.arange(2 * num_per_class) % 2
        centers = 2 * torch.randn(2, 6, generator=random, dtype=torch.float64)
        x = centers[y - 2 * k] + torch.randn(len(y), 6, generator=random, dtype=torch.float64)
        tasks.append((x, y))
    return tasks


def make_net(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def train(model, method, task, make_optimizer, epochs=2):
    """Train in a loop that calls the hooks."""
    x, y = task
    method.begin_task(model, None)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for _ in range(epochs):
        for rows in torch.arange(len(x)).split(10):
            loss = method.loss(model, Batch(x[rows], y[rows]))
            optimizer.zero_grad()
            loss.backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)
    method.end_task(model, task)


class NaiveSLCA:
    """The authors' rules, written down naively: a head for each task, frozen after it, and a copy for alignment."""

    def __init__(self, share=0.01, temperature=0.1):
        self.share = share
        self.temperature = temperature
        self.heads = []
        self.gaussians = []  # task, mean, covariance of each class

    def learn(self, features, head, task, make_optimizer):
        """Train on a task; return weights and biases of all heads after alignment."""
        x, y = task
        current_task = len(self.heads)
        optimizer = make_optimizer([{"params": features.parameters()}, {"params": head.parameters()}])
        optimizer.param_groups[0]["lr"] *= self.share
        for _ in range(2):
            for rows in torch.arange(len(x)).split(10):
                loss = F.cross_entropy(head(features(x[rows])), y[rows] - 2 * current_task)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.heads.append(head)
        with torch.no_grad():
            for c in y.unique():
                vectors = features(x[y == c])
                covariance = torch.cov(vectors.T) + 1e-3 * torch.eye(8, dtype=torch.float64)
                self.gaussians.append((current_task, vectors.mean(0), covariance))
        if current_task == 0:
            return self.heads
        return self.align(current_task)

    def align(self, current_task):
        heads = copy.deepcopy(self.heads)
        velocities = [[torch.zeros_like(p) for p in head.parameters()] for head in heads]
        random = torch.Generator().manual_seed(derive(5, "SLCA", current_task + 1))
        for epoch in range(3):
            lr = 0.05 * 0.5 * (1 + math.cos(math.pi * epoch / 3))
            inputs, labels = [], []
            for c, (t, mean, covariance) in enumerate(self.gaussians):
                scale = 0.7 + 0.3 * (t + 1) / (current_task + 1)
                noise = torch.randn(16, 8, generator=random, dtype=torch.float64)
                inputs += [scale * mean + torch.linalg.cholesky(covariance) @ row for row in noise]
                labels += [c] * 16
            order = torch.randperm(len(inputs), generator=random).tolist()
            for start in range(0, len(order), 16):
                loss = torch.zeros((), dtype=torch.float64)
                for i in order[start : start + 16]:
                    logits = [head(inputs[i]) for head in heads]
                    norm = sum(z.norm() + 1e-7 for z in logits) / len(logits)
                    loss = loss - (torch.cat(logits) / norm / self.temperature).log_softmax(0)[labels[i]] / 16
                for head, velocity in zip(heads, velocities, strict=True):
                    gradients = torch.autograd.grad(loss, list(head.parameters()), retain_graph=True)
                    with torch.no_grad():
                        for p, v, g in zip(head.parameters(), velocity, gradients, strict=True):
                            v.mul_(0.9).add_(g + 5e-4 * p)
                            p.sub_(lr * v)
        return heads


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_equals_a_naive_loop_with_a_head_for_each_task(optimizer):
    model = make_net()
    method = SLCA(**SETTINGS)
    naive = NaiveSLCA()
    naive_features = copy.deepcopy(model[:2])
    for k, task in enumerate(make_tasks()):
        grow_output(model, 2 * k + 2)
        new_head = nn.Linear(8, 2).double()
        with torch.no_grad():
            new_head.weight.copy_(model[2].weight[2 * k :])
            new_head.bias.copy_(model[2].bias[2 * k :])

        train(model, method, task, OPTIMIZERS[optimizer])
        heads = naive.learn(naive_features, new_head, task, OPTIMIZERS[optimizer])
        torch.testing.assert_close(parameter_vector(model[:2]), parameter_vector(naive_features), rtol=0, atol=1e-10)
        torch.testing.assert_close(model[2].weight, torch.cat([h.weight for h in heads]), rtol=0, atol=1e-9)
        torch.testing.assert_close(model[2].bias, torch.cat([h.bias for h in heads]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_scaled_updates_equal_a_smaller_learning_rate(name, share):
    task = make_tasks()[0]
    model = make_net()
    train(model, SLCA(share), task, OPTIMIZERS[name], epochs=5)

    def make_groups(parameters):
        optimizer = OPTIMIZERS[name]([{"params": parameters[:2]}, {"params": parameters[2:]}])
        optimizer.param_groups[0]["lr"] *= share
        return optimizer

    reference = make_net()
    train(reference, Method(), task, make_groups, epochs=5)
    torch.testing.assert_close(parameter_vector(model), parameter_vector(reference), rtol=0, atol=1e-12)


def test_share_zero_equals_a_backbone_frozen_by_the_user():
    model, frozen_model = make_net(6), make_net(6)
    frozen_model[0].requires_grad_(False)
    initial = copy.deepcopy(model[0].state_dict())
    for learned in (model, frozen_model):
        method = SLCA(share=0.0)
        for task in make_tasks():
            train(learned, method, task, OPTIMIZERS["momentum"])
        assert all(torch.equal(value, initial[key]) for key, value in learned[0].state_dict().items())
    assert torch.equal(parameter_vector(model), parameter_vector(frozen_model))


def test_a_pretrained_model_learns_new_digits():
    stream = streams.digits("class")
    (x, y), _ = streams.digits_data()
    torch.manual_seed(0)
    pretrained = nets.mlp((1, 8, 8), 10, hidden=(100,))
    shifted = Task((x.roll(1, -1), y))  # a related task
    everlearn.train(pretrained, Method(), shifted, epochs=10, batch_size=32)

    accuracies = {}
    for method in (Method(), SLCA()):
        model = copy.deepcopy(pretrained)
        nn.init.zeros_(model[-1].weight)
        result = everlearn.run(model, method, stream, epochs=10, batch_size=32)
        accuracies[type(method).__name__] = result.average_accuracy
    assert accuracies["Method"] < 0.25 and accuracies["SLCA"] > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["task", "domain", "class"])
def test_all_scenarios(scenario):
    stream = streams.digits(scenario)
    result = everlearn.run(nets.mlp, SLCA(epochs=20), stream, epochs=5, batch_size=32)
    assert result.average_accuracy > {"task": 0.9, "domain": 0.6, "class": 0.6}[scenario]


def test_the_loss_has_the_classes_of_the_current_task_only():
    (x, y), (x_next, y_next), _ = make_tasks()
    model, method = make_net(4), SLCA()
    method.end_task(model, (x, y))
    expected = F.cross_entropy(model(x_next)[:, 2:], y_next - 2)
    torch.testing.assert_close(method.loss(model, Batch(x_next, y_next)), expected)

    # A class that comes again is no longer masked.
    again = torch.cat([y_next[:-1], y[:1]])
    expected = F.cross_entropy(model(x_next)[:, [2, 3, 0]], torch.where(again > 1, again - 2, 2))
    torch.testing.assert_close(method.loss(model, Batch(x_next, again)), expected)
    torch.testing.assert_close(
        method.loss(model, Batch(x_next[:5], again[:5])),
        F.cross_entropy(model(x_next[:5])[:, [2, 3, 0]], again[:5] - 2),
    )


def test_gaussians_have_mean_and_covariance_of_the_features():
    model, method = make_net(6), SLCA(variance=1e-12, shrinkage=0.5)
    tasks = make_tasks()
    for task in tasks:
        method.end_task(model, task)
    for gaussian in method._gaussians():
        x, y = tasks[gaussian.label // 2]
        features = model[:2](x[y == gaussian.label]).detach()
        covariance = gaussian.factor @ gaussian.factor.T
        torch.testing.assert_close(gaussian.mean, features.mean(0) * (0.5 + 0.5 * (gaussian.label // 2 + 1) / 3))
        torch.testing.assert_close(covariance, torch.cov(features.T), rtol=0, atol=1e-9)


def test_one_example_fewer_examples_than_features_and_classes_without_examples():
    model, method = make_net(9), SLCA(epochs=50)
    (x, y), (x_next, y_next), _ = make_tasks()
    untouched = model[2].weight[4:].clone()
    method.end_task(model, (x[:1], y[:1]))
    method.end_task(model, (x_next[:6], y_next[:6]))
    assert method.class_tasks.tolist() == [1, 0, 2, 2]
    assert parameter_vector(model).isfinite().all()
    assert torch.equal(model[2].weight[4:], untouched)
    assert model(x[:1]).argmax() == 0 and (model(x_next[:6])[:, [0, 2, 3]].argmax(1) == y_next[:6] - 1).all()


def test_random_states_are_not_changed():
    model, method = make_net(4), SLCA()
    state = torch.get_rng_state()
    for task in make_tasks(2):
        method.end_task(model, task)
    assert torch.equal(state, torch.get_rng_state())
    same_model, same_method = make_net(4), SLCA()
    torch.manual_seed(7)
    for task in make_tasks(2):
        same_method.end_task(same_model, task)
    assert torch.equal(model[2].weight, same_model[2].weight)


def test_parts_of_a_task_are_one_task():
    x, y = make_tasks(1)[0]
    model, method = make_net(), SLCA()
    initial = model[2].weight.clone()
    for part in (slice(0, 30), slice(30, 60)):
        method.end_task(model, Task((x[part], y[part]), id=0))
    assert method.num_tasks == 1 and method.statistics["counts"].tolist() == [30, 30]
    assert torch.equal(model[2].weight, initial)


def test_an_attached_loop_equals_a_loop_of_hooks():
    model, attached_model = make_net(6), make_net(6)
    method, attached_method = SLCA(), SLCA()
    for x, y in make_tasks():
        train(model, method, (x, y), OPTIMIZERS["momentum"], epochs=1)
        attached_method.begin_task(attached_model, None)
        optimizer = OPTIMIZERS["momentum"](attached_model.parameters())
        with attached_method.attach(attached_model, optimizer) as attached:
            for rows in torch.arange(len(x)).split(10):
                outputs = attached_model(x[rows])
                loss = attached.loss(F.cross_entropy(outputs, y[rows]), x[rows], y[rows], outputs)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        attached_method.end_task(attached_model, (x, y))
    torch.testing.assert_close(parameter_vector(attached_model), parameter_vector(model))


@pytest.mark.slow
def test_runs_resume_bit_for_bit_within_a_task(tmp_path, monkeypatch):
    stream = streams.digits("class")
    settings = {"epochs": 1, "batch_size": 64}
    expected = everlearn.run(nets.mlp, SLCA(share=0.1), stream, **settings)

    class Interrupted(Exception):
        pass

    original = SLCA.after_step
    calls = []

    def interrupt(self, model):
        calls.append(1)
        if len(calls) == 8:
            raise Interrupted
        original(self, model)

    monkeypatch.setattr(SLCA, "after_step", interrupt)
    settings |= {"out": tmp_path, "checkpoint": CheckpointEvery(minutes=0)}
    with pytest.raises(Interrupted):
        everlearn.run(nets.mlp, SLCA(share=0.1), stream, **settings)
    result = everlearn.run(nets.mlp, SLCA(share=0.1), stream, **settings)
    assert (result.accuracy == expected.accuracy).all()


def test_two_processes_equal_one(run_two_processes):
    def learn():
        model, method = make_net(6), SLCA(share=0.0)
        train_tasks(model, method, [Task(task, id=k) for k, task in enumerate(make_tasks())], batch_size=5)
        return method.statistics, parameter_vector(model)

    statistics, _ = learn()
    (first_statistics, first_weights), (second_statistics, second_weights) = run_two_processes(learn)
    assert torch.equal(first_weights, second_weights)
    for key, value in statistics.items():
        assert torch.equal(first_statistics[key], second_statistics[key])
        torch.testing.assert_close(first_statistics[key], value, rtol=1e-12, atol=1e-12)


def test_state_is_restored():
    tasks = make_tasks()
    model, method = make_net(6), SLCA()
    train(model, method, tasks[0], OPTIMIZERS["Adam"])
    train(model, method, tasks[1], OPTIMIZERS["Adam"])
    file = io.BytesIO()
    torch.save(method.state_dict(), file)
    file.seek(0)
    loaded, loaded_model = replace(method), copy.deepcopy(model)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    train(model, method, tasks[2], OPTIMIZERS["Adam"])
    train(loaded_model, loaded, tasks[2], OPTIMIZERS["Adam"])
    assert torch.equal(parameter_vector(model), parameter_vector(loaded_model))


def test_running_statistics_are_frozen_or_warned_of():
    stream = streams.digits("class")
    settings = {"epochs": 1, "batch_size": 64}
    model = nets.cnn(stream.inputs, stream.outputs, channels=(4, 8))
    method = SLCA() + Freeze("statistics")
    everlearn.train(model, method, stream[0], **settings)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    everlearn.train(model, method, stream[1], **settings)
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    method = SLCA()
    model = nets.cnn(stream.inputs, stream.outputs, channels=(4, 8))
    everlearn.train(model, method, stream[0], **settings)
    with pytest.warns(UserWarning, match=r"SLCA\(…\) \+ Freeze"):
        everlearn.train(model, method, stream[1], **settings)


@pytest.mark.slow
@pytest.mark.parametrize("other", [EWC(), MAS(), L2(), LwF(), Freeze()], ids=repr)
def test_chains(other):
    stream = streams.digits("class")
    result = everlearn.run(nets.mlp, SLCA(share=0.1) + other, stream, epochs=3, batch_size=32)
    assert result.average_accuracy > 0.5


@pytest.mark.parametrize("other", [ER(), DER(), GenerativeReplay(), SI(), PackNet()], ids=repr)
def test_chains_that_make_no_sense_are_refused(other):
    with pytest.raises(ValueError, match=r"is at odds with|both define task_loss"):
        SLCA() + other
    with pytest.raises(ValueError, match=r"is at odds with|both define task_loss"):
        other + SLCA()


def test_a_frozen_head_cannot_be_combined():
    with pytest.raises(ValueError, match="freezes the model"):
        SLCA() + NearestMean()


def test_misuse_is_explained():
    x, y = make_tasks(1)[0]
    model, method = make_net(), SLCA()
    with pytest.raises(ValueError, match=r"needs begin_task"):
        method.before_step(model)
    method.begin_task(model, None)
    with pytest.raises(ValueError, match=r"needs the before_step"):
        method.after_step(model)
    method.loss(model, Batch(x, y)).backward()
    with pytest.raises(ValueError, match=r"has not seen a step"):
        method.end_task(model, (x, y))
    with pytest.raises(ValueError, match=r"examples of class 5, .* has 2 outputs"):
        SLCA().end_task(model, (x, y + 4))
    with pytest.raises(ValueError, match="not finite"):
        SLCA().end_task(model, (x * torch.nan, y))
    with pytest.raises(ValueError, match="no labeled examples"):
        SLCA().end_task(model, (x, torch.full_like(y, -100)))
    with pytest.raises(ValueError, match="keeps statistics by class"):
        SLCA().begin_task(model, Task((x, x), likelihood=Gaussian()))
