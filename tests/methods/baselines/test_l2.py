import pytest
import torch
from torch import nn

from everlearn import L2, train
from everlearn.surgery import heads


def make_anchored(strength=3.0):
    model = nn.Linear(4, 2)
    method = L2(strength)
    method.end_task(model, None)
    return model, method


def test_penalty_and_gradient_follow_the_formula():
    model, method = make_anchored()
    anchor = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 0.5 * torch.randn_like(model.weight)
    delta = model.weight.detach() - anchor
    penalty = method.penalty(model)
    torch.testing.assert_close(penalty.detach(), 1.5 * delta.square().sum())
    penalty.backward()
    torch.testing.assert_close(model.weight.grad, 3.0 * delta)
    assert model.bias.grad is None, "a parameter at its anchor has no gradient, so weight decay skips it"


def test_the_penalty_is_zero_before_the_first_task_ends():
    assert L2().penalty(nn.Linear(2, 2)) == 0.0


def test_the_anchor_is_a_copy():
    model, method = make_anchored()
    with torch.no_grad():
        model.weight.zero_()
    assert method.quadratic.anchor["weight"].abs().sum() > 0


def test_a_strong_penalty_reduces_the_drift():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    drift = {}
    for strength in (0.0, 5.0):
        model, method = make_anchored(strength)
        anchor = model.weight.detach().clone()
        sgd = lambda ps: torch.optim.SGD(ps, lr=0.1)
        train(model, method, (x, (x[:, 0] > 0).long()), optimizer=sgd, epochs=20, batch_size=16)
        drift[strength] = (model.weight - anchor).norm().item()
    assert drift[5.0] < 0.2 * drift[0.0]


def test_only_old_outputs_are_penalized():
    model = nn.Sequential(nn.Linear(4, 2))
    method = L2(2.0)
    method.end_task(model, None)
    heads.grow_output(model, 5)
    assert method.penalty(model) == 0
    with torch.no_grad():
        model[0].weight[3:] += 1
    assert method.penalty(model) == 0
    with torch.no_grad():
        model[0].weight[0] += 1
    torch.testing.assert_close(method.penalty(model).detach(), torch.tensor(4.0))


def test_another_model_is_refused():
    _, method = make_anchored()
    with pytest.raises(ValueError, match="None of the remembered parameters"):
        method.penalty(nn.Sequential(nn.Linear(4, 2)))


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_wrapped_models_have_the_same_names(wrap):
    model, method = make_anchored()
    assert method.penalty(wrap(model)) == 0
    assert set(method.quadratic.anchor) == {"weight", "bias"}
