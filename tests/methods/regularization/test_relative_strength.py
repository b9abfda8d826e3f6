"""strength="auto", and the limit of penalties that an optimizer cannot follow."""

import copy
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from everlearn import EWC, L2, MAS, SI, LwF, Task, train
from everlearn.core.chain import label
from everlearn.core.parameters import trainable_parameters
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.step_limit import largest_eigenvalue, limit_curvature

METHODS = [EWC(), EWC(mode="online"), EWC(structure="kronecker"), EWC(structure="full"), MAS(), SI(), L2()]


def make_tasks(count=2, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    tasks = []
    for k in range(count):
        x = scale * torch.randn(64, 5, generator=generator)
        tasks.append(Task((x, (x @ torch.randn(5, 3, generator=generator)).argmax(1)), id=k))
    return tasks


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train_first(method, tasks):
    model = make_model()
    train(model, method, tasks[0], optimizer=sgd, epochs=5, batch_size=16)
    return model


def train_loop(model, method, task, optimizer=None, factor=1.0, loss_factor=1.0, steps=None):
    """A loop of one's own: the penalty in the loss, and nothing else but the hooks that SI needs."""
    optimizer = optimizer or sgd(model.parameters())
    for index, batch in enumerate(task.batches(16, 2)):
        if index == steps:
            break
        optimizer.zero_grad()
        loss = loss_factor * F.cross_entropy(model(batch.x), batch.y) + method.penalty(model)
        (factor * loss).backward()
        if isinstance(method, SI):
            method.before_step(model)
        optimizer.step()
        if isinstance(method, SI):
            method.after_step(model)


def expected_strength(method, model, task):
    """λ = ½ rms(g) / (mean(F) rms(θ)), by autograd on the first batch."""
    batch = next(task.batches(16, 2))
    parameters = trainable_parameters(model)
    gradients = torch.autograd.grad(F.cross_entropy(model(batch.x), batch.y), list(parameters.values()))
    g = torch.cat([value.flatten() for value in gradients])
    theta = torch.cat([p.detach().flatten() for p in parameters.values()])
    importance = torch.cat([value.flatten() for value in method.quadratic.form.diagonal().values()])
    strength = g.square().mean().sqrt() / (importance.mean() * theta.square().mean().sqrt())
    return 2.0 ** round(math.log2(strength / 2))


@pytest.mark.parametrize("method", METHODS, ids=label)
def test_the_first_gradient_of_a_task_sets_the_strength(method):
    first, second = make_tasks()
    method = copy.deepcopy(method)
    model = train_first(method, [first])
    expected = expected_strength(method, model, second)
    unscaled = {n: v.clone() for n, v in method.quadratic.form.diagonal().items()}
    assert method.scale is None
    train_loop(model, method, second, steps=3)
    assert method.scale == expected
    for n, v in method.quadratic.form.diagonal().items():
        torch.testing.assert_close(v, expected * unscaled[n])


@pytest.mark.parametrize("method", METHODS, ids=label)
@pytest.mark.parametrize("loop", ["trainer", "attached", "attached with loss"])
def test_all_loops_measure_the_same_strength(method, loop):
    first, second = make_tasks()
    method = copy.deepcopy(method)
    model = train_first(method, [first])
    expected = expected_strength(method, model, second)
    if loop == "trainer":
        train(model, method, second, optimizer=sgd, epochs=1, batch_size=16)
        assert method.last_scale == expected and method.diagnostics()["strength"] == expected
        return
    optimizer = sgd(model.parameters())
    with method.attach(model, optimizer) as attached:
        for batch in second.batches(16, 2):
            optimizer.zero_grad()
            outputs = model(batch.x)
            loss = F.cross_entropy(outputs, batch.y)
            if loop == "attached with loss":
                loss = attached.loss(loss, batch.x, batch.y, outputs)
            loss.backward()
            optimizer.step()
    assert method.scale == expected


@pytest.mark.parametrize("kind", [EWC, MAS, L2])
def test_the_scale_of_the_loss_does_not_matter(kind):
    """A loss times 1024 with a learning rate divided by it, and a scaled sum of loss and penalty."""
    weights = []
    for loss_factor, factor in [(1, 1), (1024, 1), (1, 1024)]:
        first, second = make_tasks()
        method = kind()
        model = train_first(method, [first])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (loss_factor * factor))
        train_loop(model, method, second, optimizer, factor, loss_factor)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0])
    torch.testing.assert_close(weights[2], weights[0])


@pytest.mark.parametrize("variant", ["accumulated", "clipped", "gradient scaler", "fused"])
def test_one_step_of_any_loop_measures_the_same_strength(variant):
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    expected = expected_strength(method, model, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=variant == "fused")
    scaler = torch.amp.GradScaler("cpu", enabled=variant == "gradient scaler")
    parts = 4 if variant == "accumulated" else 1
    for part in next(second.batches(16, 2)).chunk(parts):
        loss = F.cross_entropy(model(part.x), part.y) + method.penalty(model)
        scaler.scale(loss / parts).backward()
    if variant == "clipped":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    scaler.step(optimizer)
    assert method.scale == expected


def test_a_loop_without_an_optimizer_of_torch_has_a_strength_after_a_few_losses():
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    for _ in range(18):
        batch = next(second.batches(16, 2))
        loss = F.cross_entropy(model(batch.x), batch.y) + method.penalty(model)
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        loss = F.cross_entropy(model(batch.x), batch.y) + method.penalty(model)
        loss.backward()
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= 0.01 * g
    assert method.scale is not None and method.penalty(model) > 0


def test_a_penalty_that_is_only_logged_does_not_set_the_strength():
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    expected = expected_strength(method, model, second)
    with torch.no_grad():
        assert all(method.penalty(model) == 0 for _ in range(40))
    train_loop(model, method, second, steps=1)
    assert method.scale == expected


def test_infinite_gradients_do_not_set_the_strength():
    """A gradient scaler skips their step; the next finite gradients are measured."""
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    expected = expected_strength(method, model, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (method.penalty(model) + torch.inf * model[0].weight.sum()).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert method.scale is None
    train_loop(model, method, second, optimizer, steps=1)
    assert method.scale == expected


def test_other_backward_passes_are_not_measured():
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    expected = expected_strength(method, model, second)
    optimizer = sgd(model.parameters())
    batch = next(second.batches(16, 2))
    loss = F.cross_entropy(model(batch.x), batch.y) + method.penalty(model)
    torch.autograd.grad(100 * model(batch.x).square().sum(), list(model.parameters()))
    loss.backward()
    torch.autograd.grad(100 * model(batch.x).square().sum(), list(model.parameters()))
    with torch.no_grad():
        assert method.penalty(copy.deepcopy(model)) == 0  # of an average of the weights, for a log
    optimizer.step()
    assert method.scale == expected


@pytest.mark.parametrize("attached", [False, True])
def test_a_closure_measures_its_own_gradients(attached):
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    expected = expected_strength(method, model, second)
    batch = next(second.batches(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attachment = method.attach(model, optimizer) if attached else None

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x), batch.y)
        if not attached:
            loss = loss + method.penalty(model)
        loss.backward()
        return loss

    for p in model.parameters():
        p.grad = 100 * torch.ones_like(p)  # of the last task
    optimizer.step(closure)
    optimizer.step(closure)
    assert method.scale == expected
    if attachment is not None:
        attachment.remove()


def test_an_attached_loop_measures_before_it_clips():
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    expected = expected_strength(method, model, second)
    optimizer = sgd(model.parameters())
    batch = next(second.batches(16, 2))
    with method.attach(model, optimizer) as attached:
        model.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        attached.before_step()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert method.scale == expected


@pytest.mark.parametrize("method", [EWC(), MAS(), EWC(mode="online", average=True)], ids=label)
def test_inputs_that_are_always_zero_do_not_matter(method):
    strengths = []
    for padding in (0, 500):
        tasks = make_tasks(3)
        m = copy.deepcopy(method)
        model = make_model()
        wide = nn.Linear(5 + padding, 8)
        with torch.no_grad():
            wide.weight[:, :5] = model[0].weight
            wide.bias.copy_(model[0].bias)
        model[0] = wide
        measured = []
        for task in tasks:
            x = F.pad(task.train.x, (0, padding))
            train(model, m, Task((x, task.train.y), id=task.id), optimizer=sgd, epochs=2, batch_size=16)
            measured.append(m.last_scale)
        strengths.append(measured[1:])
    assert strengths[0] == strengths[1]


def test_a_state_loaded_into_a_method_in_use_is_followed_anew():
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    state = copy.deepcopy(method.state_dict())
    weights = copy.deepcopy(model.state_dict())
    expected = expected_strength(method, model, second)
    optimizer = sgd(model.parameters())
    train_loop(model, method, second, optimizer, steps=2)
    method.load_state_dict(state)
    model.load_state_dict(weights)
    train_loop(model, method, second, optimizer, steps=1)
    assert method.scale == expected


def test_a_method_can_be_pickled_between_penalty_and_step():
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    method.penalty(model)
    duplicate = pickle.loads(pickle.dumps(method))
    train_loop(model, duplicate, second, steps=1)
    assert duplicate.scale is not None


@pytest.mark.parametrize("method", METHODS, ids=label)
def test_later_tasks_add_unscaled_importances(method):
    """The importances after two tasks are those of a penalty of strength 1 at the same parameters."""
    first, second = make_tasks()
    method = copy.deepcopy(method)
    model = train_first(method, [first])
    train_loop(model, method, second)
    assert method.scale is not None
    twin = copy.deepcopy(method)
    twin._rescale(None)
    twin.rates = {}
    method.end_task(model, second)
    twin.end_task(model, second)
    for n, value in method.quadratic.form.diagonal().items():
        assert torch.equal(value, twin.quadratic.form.diagonal()[n])
    assert method.scale is None


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "state"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_copy_within_a_task_continues_equally(copying, steps):
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    train_loop(model, method, second, steps=steps)
    if copying == "state":
        duplicate = EWC()
        duplicate.load_state_dict(method.state_dict())
    else:
        duplicate = copying(method)
    model_copy = copy.deepcopy(model)
    train_loop(model, method, second)
    train_loop(model_copy, duplicate, second)
    assert method.scale == duplicate.scale
    for a, b in zip(model.parameters(), model_copy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_hooks_go_with_the_measurement_and_the_method():
    first, second = make_tasks()
    method = EWC()
    model = train_first(method, [first])
    train_loop(model, method, second, steps=2)
    assert not any(p._backward_hooks for p in model.parameters())
    count = len(_global_optimizer_pre_hooks)
    del method
    assert len(_global_optimizer_pre_hooks) == count - 1


def test_lwf_undoes_the_temperature():
    first, second = make_tasks()
    penalties = []
    for method in (LwF("auto", temperature=3.0), LwF(9.0, temperature=3.0)):
        model = train_first(method, [first])
        with torch.no_grad():
            model[0].weight += 0.1
        method.begin_task(model, second)
        penalties.append(float(method.penalty(model, second.train.x).detach()))
    assert penalties[0] == penalties[1] > 0


# The limit.


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", [EWC, MAS, SI, L2])
def test_no_strength_makes_gradient_descent_diverge(kind, momentum):
    tasks = make_tasks(3)
    model = make_model()
    method = kind(1e8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for task in tasks:
            train(model, method, task, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=momentum), epochs=3)
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in model.parameters())
    assert "which gradient descent with learning rate 0.1 cannot follow (above 20 it diverges)" in str(
        caught[0].message
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_chains_of_penalties_do_not_diverge(nesterov):
    tasks = make_tasks(3)
    model = make_model()
    method = EWC(1e6) + SI(1e6) + L2(1e6)
    for task in tasks:
        train(
            model,
            method,
            task,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=nesterov),
            epochs=10,
        )
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in model.parameters())


@pytest.mark.parametrize("structure", ["kronecker", "full"])
def test_forms_with_products_are_scaled_as_a_whole(structure):
    tasks = make_tasks(3)
    model = make_model()
    method = EWC(1e8, structure=structure)
    train(model, method, tasks[0], optimizer=sgd, epochs=3)
    with pytest.warns(UserWarning, match="limited"):
        train(model, method, tasks[1], optimizer=sgd, epochs=3)
    train(model, method, tasks[2], optimizer=sgd, epochs=3)
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in model.parameters())


def test_adam_follows_any_penalty():
    """Its steps are bounded, so that the penalty is that of the paper whatever its strength."""
    first, second = make_tasks()
    method = EWC(1e8)
    model = train_first(method, [first])
    train(model, method, second, optimizer=torch.optim.Adam, epochs=2)
    assert not method.rates and all(p.isfinite().all() for p in model.parameters())


def test_the_limit_follows_a_warm_up_and_another_optimizer():
    tasks = make_tasks(3)
    method = EWC(1e6)
    model = train_first(method, tasks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    method._warned_of_limit = True
    for step in range(40):
        optimizer.param_groups[0]["lr"] = min(0.1, 1e-12 * 10**step)
        train_loop(model, method, tasks[1], optimizer, steps=1)
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in model.parameters())
    assert max(method.rates.values()) == pytest.approx(0.1)
    method.end_task(model, tasks[1])
    train(model, method, tasks[2], optimizer=torch.optim.Adam, epochs=1)
    assert not method.rates


def test_only_what_would_diverge_is_limited():
    quadratic = EWC().quadratic
    quadratic.form = Diagonal({"a": torch.tensor([1.0, 30.0]), "b": torch.tensor([3.0, 9.0])})
    limited = limit_curvature(quadratic, {"a": 0.1, "b": 0.1})
    assert limited.form.values["a"].tolist() == [1.0, 5.0] and limited.form.values["b"].tolist() == [3.0, 9.0]
    assert limit_curvature(quadratic, {"b": 0.1}) is quadratic
    assert limit_curvature(quadratic, {}) is quadratic


def test_largest_eigenvalue_is_that_of_the_dense_matrix():
    first, _ = make_tasks()
    for structure in ("kronecker", "full"):
        method = EWC(1.0, structure=structure)
        model = train_first(method, [first])
        names = list(trainable_parameters(model))
        sizes = [p.numel() for p in model.parameters()]
        rows = []
        for unit in torch.eye(sum(sizes)):
            parts = unit.split(sizes)
            vector = {n: v.view_as(p) for n, v, p in zip(names, parts, model.parameters(), strict=True)}
            product = method.quadratic.form.times(vector)
            rows.append(torch.cat([product[n].flatten() for n in names]))
        expected = float(torch.linalg.eigvalsh(torch.stack(rows))[-1])
        assert largest_eigenvalue(method.quadratic.form) == pytest.approx(expected, rel=0.05)
