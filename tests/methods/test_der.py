import pytest
import torch
from torch import nn

from everlearn import DER, Batch, DERpp, Method, heads, nets, streams, train

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
