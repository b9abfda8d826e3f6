import copy
from functools import partial

import pytest
import torch
from torch import nn

from everlearn import DER, Batch, DERpp, Memory, Method, Task, nets, run, streams, train
from everlearn.surgery import heads

pytestmark = pytest.mark.usefixtures("double")


def filled(method, n=10, outputs=3):
    model = nn.Linear(4, outputs)
    old = Batch(torch.randn(n, 4), torch.randint(outputs, (n,)))
    method.observe(old, model(old.x).detach())
    return model, old, model(old.x).detach()


def moved(model):
    with torch.no_grad():
        model.weight += torch.randn_like(model.weight)
    return model


def new(n=6):
    return Batch(torch.randn(n, 4), torch.randint(3, (n,)))


def test_der_is_the_mean_over_examples_and_outputs():
    method = DER(10, 10, alpha=0.7)
    model, old, z = filled(method)
    assert method.penalty(model, new()).abs() < 1e-20, "nothing has moved yet"
    moved(model)
    torch.testing.assert_close(method.penalty(model, new()), 0.7 * nn.functional.mse_loss(model(old.x), z))


def test_derpp_adds_the_labels_of_a_second_draw():
    method = DERpp(10, 10, alpha=0.7, beta=0.3)
    model, old, z = filled(method)
    moved(model)
    truth = 0.7 * nn.functional.mse_loss(model(old.x), z) + 0.3 * old.loss(model(old.x))
    torch.testing.assert_close(method.penalty(model, new()), truth)


def test_the_two_draws_are_independent():
    method, seen = DERpp(100, 10), []
    model, _, _ = filled(method, n=100)
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    method.penalty(model, new())
    assert len(seen) == 2 and not torch.equal(*seen)


def test_precision_may_change_between_tasks():
    torch.set_default_dtype(torch.float)
    stream, method = streams.digits("class"), DERpp(30)
    model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
    for task, precision in zip(stream.tasks[:3], ("float32", "bfloat16", "float32"), strict=True):
        train(model, method, task, iterations=3, precision=precision)
    assert method.memory["logits"].dtype == torch.float32


def test_outputs_of_minus_infinity_do_not_spread():
    method = DER(10, 10)
    model, old, z = filled(method)
    out = moved(model)(old.x).clone()
    out[:, 0] = -torch.inf
    masked = nn.Module()
    masked.forward = lambda x: torch.cat([torch.full_like(model(x)[:, :1], -torch.inf), model(x)[:, 1:]], 1)
    truth = 0.5 * (model(old.x)[:, 1:] - z[:, 1:]).square().mean()
    torch.testing.assert_close(method.penalty(masked, new()), truth)


@pytest.mark.parametrize(
    ("one", "other"), [(DERpp(20, alpha=0.0, beta=0.0), Method()), (DERpp(20, alpha=0.4, beta=0.0), DER(20, alpha=0.4))]
)
def test_weights_of_zero(one, other):
    torch.set_default_dtype(torch.float)
    stream, ends = streams.digits("class"), []
    for method in (one, other):
        torch.manual_seed(0)
        model = nets.mlp(stream.inputs, stream.outputs, hidden=(8,))
        for task in stream.tasks[:2]:
            train(model, method, task, iterations=5)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def test_outputs_are_those_before_the_step():
    method, model = DER(20), nn.Linear(4, 3)
    batch = new()
    before = model(batch.x).detach()
    train(model, method, [(batch.x, batch.y)], optimizer=lambda p: torch.optim.SGD(p, lr=10.0))
    torch.testing.assert_close(method.memory["logits"], before)


def test_several_epochs_keep_the_outputs_of_a_trained_model():
    """With those of the first epoch alone DER has 38.5 % and DER++ 94.4 %."""
    torch.set_default_dtype(torch.float)
    for method, measured in ((DER(500), 87.6), (DERpp(500), 96.0)):
        result = run(nets.mlp, method, streams.digits("class"), epochs=10, batch_size=32, progress=False)
        assert 100 * result.average_accuracy == pytest.approx(measured, abs=1.0)


def drawn(kept, size, random):
    rows = [kept[i] for i in torch.randperm(len(kept), generator=random)[:size].tolist()]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def by_the_authors_rule(tasks, model, capacity, alpha, beta, epochs, size, lr, seed):
    """Buzzega et al.'s loop with a reservoir of lists."""
    random = torch.Generator().manual_seed(seed)
    kept, presented = [], 0
    for x, y in tasks:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(epochs):
            for rows in torch.randperm(len(x), generator=random).split(size):
                out = model(x[rows])
                loss = nn.functional.cross_entropy(out, y[rows])
                if kept and alpha:
                    old_x, _, z = drawn(kept, size, random)
                    loss = loss + alpha * nn.functional.mse_loss(model(old_x), z)
                if kept and beta:
                    old_x, old_y, _ = drawn(kept, size, random)
                    loss = loss + beta * nn.functional.cross_entropy(model(old_x), old_y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for row in zip(x[rows], y[rows], out.detach(), strict=True):
                    place = (
                        len(kept) if presented < capacity else int(torch.randint(presented + 1, (), generator=random))
                    )
                    if place < capacity:
                        kept[place : place + 1] = [row]
                    presented += 1


def accuracy(model, tasks):
    return sum((model(x).argmax(1) == y).float().mean().item() for x, y in tasks) / len(tasks)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, 0.5)])
def test_ends_where_a_loop_of_the_authors_rule_ends(alpha, beta):
    torch.set_default_dtype(torch.float)
    stream = streams.digits("class").first(3)
    tasks = [(t.train.x, t.train.y) for t in stream.tasks]
    ours, theirs = 0.0, 0.0
    for seed in range(3):
        torch.manual_seed(seed)
        model = nets.mlp(stream.inputs, stream.outputs, hidden=(32,))
        twin = copy.deepcopy(model)
        method = DERpp(100, alpha=alpha, beta=beta)
        method.memory = Memory(100, seed=seed)
        for number, data in enumerate(tasks):
            settings = {"epochs": 6, "batch_size": 16, "seed": seed, "optimizer": partial(torch.optim.SGD, lr=0.1)}
            train(model, method, Task(data, id=number), **settings)
        ours += accuracy(model, tasks) / 3
        by_the_authors_rule(tasks, twin, 100, alpha, beta, epochs=6, size=16, lr=0.1, seed=seed)
        theirs += accuracy(twin, tasks) / 3
    assert ours == pytest.approx(theirs, abs=0.02)


def test_outputs_at_ignored_labels_are_not_compared():
    method = DER(4, 4, alpha=1.0)
    model, x = nn.Linear(4, 3), torch.randn(4, 5, 4)
    y = torch.randint(3, (4, 5))
    y[:, 3:] = -100
    z = model(x).detach()
    method.observe(Batch(x, y), z)
    moved(model)
    found = method.penalty(model, Batch(x, y))
    torch.testing.assert_close(found, (model(x)[:, :3] - z[:, :3]).square().mean())


def test_a_head_that_grew_is_compared_where_something_was_stored():
    method = DER(10, 10, alpha=1.0)
    model = nn.Sequential(nn.Linear(4, 3))
    old = new(5)
    method.observe(old, model(old.x).detach())
    z = model(old.x).detach()
    heads.grow_output(model, 5)
    model.double()
    later = Batch(torch.randn(5, 4), torch.randint(5, (5,)))
    with torch.no_grad():
        model[0].weight += torch.randn_like(model[0].weight)
    torch.testing.assert_close(method.penalty(model, later), (model(old.x)[:, :3] - z).square().mean())
    method.observe(later, model(later.x).detach())
    wide = model(later.x).detach()
    with torch.no_grad():
        model[0].weight += torch.randn_like(model[0].weight)
    parts = (model(old.x)[:, :3] - z).square().sum() + (model(later.x) - wide).square().sum()
    torch.testing.assert_close(method.penalty(model, new(10)), parts / (5 * 3 + 5 * 5))
