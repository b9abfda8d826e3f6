import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everlearn import Gaussian, nets, streams
from everlearn.curvature import fisher
from everlearn.optim import NaturalGradient, _has_two_modes
from tests.models import make


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.double)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float)


def regression(n=30, d=4, k=2):
    x = torch.randn(n, d)
    return x, x @ torch.randn(d, k) + 0.3 * torch.randn(n, k)


def step(model, optimizer, x, y, likelihood=None):
    optimizer.zero_grad()
    loss = (likelihood or Gaussian()).loss(model(x), y) if likelihood is not False else F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_linear_gaussian_regression_is_solved_in_one_step(structure):
    x, y = regression()
    model = nn.Linear(4, 2)
    step(model, NaturalGradient(model, lr=1.0, structure=structure, damping=0.0, likelihood=Gaussian()), x, y)
    ones = torch.cat([x, torch.ones(30, 1)], 1)
    right = torch.linalg.lstsq(ones, y).solution
    found = torch.cat([model.weight, model.bias[:, None]], 1).t()
    assert (found - right).abs().max() < 1e-10


def test_full_is_invariant_to_a_linear_reparametrisation():
    """θ = φ B⁻¹: the same function, other parameters, the same steps."""
    x, y = regression(k=3)
    b = torch.randn(4, 4) + 2 * torch.eye(4)
    a, c = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    c.weight.data = a.weight.data @ torch.linalg.inv(b)
    for model, inputs in ((a, x), (c, x @ b.t())):
        optimizer = NaturalGradient(model, lr=0.3, structure="full", damping=0.0, likelihood=Gaussian())
        for _ in range(3):
            step(model, optimizer, inputs, y)
    assert (c.weight @ b - a.weight).abs().max() < 1e-10


def test_large_damping_is_the_gradient():
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    for structure in ("diagonal", "kronecker", "full"):
        model = nn.Linear(4, 3)
        before = model.weight.detach().clone()
        step(model, NaturalGradient(model, lr=1.0, structure=structure, damping=1e8), x, y, False)
        torch.testing.assert_close((before - model.weight) * 1e8, model.weight.grad, rtol=1e-5, atol=1e-9)


def test_full_on_the_softmax_model_is_newtons_step():
    x, y = torch.randn(50, 3), torch.randint(4, (50,))
    model = nn.Linear(3, 4, bias=False)
    w = model.weight.detach().clone().flatten()

    def loss(w):
        return F.cross_entropy(x @ w.view(4, 3).t(), y)

    h, g = torch.autograd.functional.hessian(loss, w), torch.autograd.functional.jacobian(loss, w)
    step(model, NaturalGradient(model, lr=1.0, structure="full", damping=1e-6), x, y, False)
    right = w - torch.linalg.solve(h + 1e-6 * torch.eye(12), g)
    torch.testing.assert_close(model.weight.detach().flatten(), right, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_the_step_is_the_solved_gradient(structure):
    model, x = make("mlp")
    y = torch.randint(3, (7,))
    expected = copy.deepcopy(model)
    F.cross_entropy(expected(x), y).backward()
    grads = {n: p.grad for n, p in expected.named_parameters()}
    v = fisher(expected, x, structure=structure).solve(grads, 0.1)
    step(model, NaturalGradient(model, lr=0.5, structure=structure, damping=0.1), x, y, False)
    for n, p in expected.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[n], p - 0.5 * v[n])
        assert (grads[n] * v[n]).sum() >= 0, "a direction of descent"


def test_sample_space_equals_parameter_space():
    model, x = make("mlp")  # 71 parameters; 7 examples have 14 directions
    small = fisher(model, x, structure="full")
    assert small.rows is not None
    v = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    whole = type(small)(small.shapes, matrix=small.dense())
    for n, right in whole.solve(v, 0.1).items():
        torch.testing.assert_close(small.solve(v, 0.1)[n], right)


def test_momentum_decay_and_rare_updates():
    x, y = regression()
    model = nn.Linear(4, 2)
    optimizer = NaturalGradient(model, lr=0.1, structure="diagonal", momentum=0.9, damping=0.1, likelihood=Gaussian())
    moves, solved = [], []
    for _ in range(3):
        before = model.weight.detach().clone()
        step(model, optimizer, x, y)
        moves.append(before - model.weight.detach())
        solved.append(optimizer.curvature.solve({"weight": model.weight.grad}, 0.1)["weight"])
    torch.testing.assert_close(moves[2], 0.1 * (solved[2] + 0.9 * solved[1] + 0.81 * solved[0]))

    seen = []
    averaged = NaturalGradient(model, structure="diagonal", decay=0.8, update_every=2, likelihood=Gaussian())
    for k in range(4):
        step(model, averaged, x * (k + 1), y)
        seen.append(averaged.curvature.values["weight"])
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])
    torch.testing.assert_close(seen[2], 0.8 * seen[0] + 0.2 * 9 * seen[0])


def test_running_kronecker_factors_stay_one_pair():
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    model = nn.Linear(4, 3)
    optimizer = NaturalGradient(model, lr=0.1, decay=0.5)
    for _ in range(3):
        step(model, optimizer, x, y, False)
    assert len(optimizer.curvature.layers["weight"]) == 1


def test_kl_clip_bounds_the_step():
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    model = nn.Linear(4, 3)
    before = copy.deepcopy(model)
    optimizer = NaturalGradient(model, lr=10.0, damping=1e-6, kl_clip=1e-3)
    step(model, optimizer, x, y, False)
    grads = {n: p.grad for n, p in model.named_parameters()}
    v = optimizer.curvature.solve(grads, 1e-6)
    vg = sum((v[n] * g).sum() for n, g in grads.items())
    nu = (1e-3 / (100 * vg)).sqrt()
    assert nu < 1, "the bound is felt"
    torch.testing.assert_close(before.weight - model.weight, 10.0 * nu * v["weight"])


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_resuming_equals_never_having_stopped(structure, tmp_path):
    x, y = torch.randn(20, 4), torch.randint(3, (20,))

    def optimizer_for(model):
        return NaturalGradient(model, lr=0.1, structure=structure, momentum=0.5, decay=0.5, update_every=2, damping=0.1)

    model = nets.mlp(4, 3, hidden=(5,))
    optimizer = optimizer_for(model)
    for _ in range(3):
        step(model, optimizer, x, y, False)
    other = copy.deepcopy(model)
    resumed = optimizer_for(other)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(3):
        step(model, optimizer, x, y, False)
        step(other, resumed, x, y, False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_has_no_factors_is_said_once():
    torch.set_default_dtype(torch.float)
    model = nets.cnn((1, 8, 8), 10, channels=(4,)).eval()
    task = streams.digits("class")[0]
    optimizer = NaturalGradient(model, lr=0.01, damping=0.1)

    def learn():
        for batch in task.batches(64):
            optimizer.zero_grad()
            batch.loss(model(batch.x)).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=r"No Kronecker factors for 0.1.weight, 0.1.bias: .* the diagonal") as seen:
        learn()
    assert len(seen) == 1


@pytest.mark.parametrize("layer", [lambda: nn.Dropout(0.5), lambda: nn.BatchNorm1d(4)], ids=["dropout", "batch norm"])
def test_a_gradient_of_training_mode_beside_a_form_of_evaluation_mode_is_said_once(layer):
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    model = nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 3))
    optimizer = NaturalGradient(model, lr=0.01, structure="diagonal", damping=0.1)
    step(model.eval(), optimizer, x, y, False)
    right = fisher(model, x).values["0.weight"]
    with pytest.warns(UserWarning, match=r"F in evaluation mode.* in which 1 .*model.eval\(\)"):
        step(model.train(), optimizer, x, y, False)
    step(model, optimizer, x, y, False)  # where a second warning would be an error
    model.eval()(x)
    optimizer._update({})
    torch.testing.assert_close(optimizer.curvature.values["0.weight"], fisher(model, x).values["0.weight"])
    assert not torch.allclose(right, optimizer.curvature.values["0.weight"])


def test_layers_that_do_something_else_in_training_mode():
    known = (
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.LSTM(4, 4, 2, dropout=0.1),
        nn.InstanceNorm1d(4, track_running_stats=True),
    )
    assert all(map(_has_two_modes, known))
    plain = nn.Linear(4, 4), nn.Dropout(0.0), nn.MultiheadAttention(4, 2), nn.LayerNorm(4), nn.InstanceNorm1d(4)
    assert not any(map(_has_two_modes, plain))


def test_it_is_a_torch_optimizer_that_learns():
    torch.set_default_dtype(torch.float)
    model = nets.mlp(64, 10, hidden=(20,))
    optimizer = NaturalGradient(model, lr=0.1, damping=0.01)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.9, 5)
    losses = []
    for batch in streams.digits("class").joint()[0].batches(64, epochs=1):

        def closure(b=batch):
            optimizer.zero_grad()
            loss = b.loss(model(b.x))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        schedule.step()
    assert losses[-1] < 0.25 * losses[0]


def test_the_optimizer_is_let_go_with_its_hook_and_knows_its_own_model():
    model, x = nn.Linear(4, 2), torch.randn(6, 4)
    optimizer = NaturalGradient(model)
    copy.deepcopy(model)(x)
    assert optimizer._inputs is None, "the copy's inputs are not the model's"
    with pytest.raises(TypeError, match="belongs to its model"):
        copy.deepcopy(optimizer)
    pickle.loads(pickle.dumps(model))(x)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None and not model._forward_pre_hooks


def test_inputs_are_those_of_the_last_pass_in_any_mode_and_form():
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    model = nn.Linear(4, 2).eval()
    optimizer = NaturalGradient(model, structure="diagonal")
    with torch.no_grad():
        model(x * 100)
    F.cross_entropy(model(input=x), y).backward()
    optimizer.step()
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        fresh.weight.add_(0.1 * optimizer.curvature.solve({"weight": model.weight.grad}, 1e-3)["weight"])
        fresh.bias.add_(0.1 * optimizer.curvature.solve({"bias": model.bias.grad}, 1e-3)["bias"])
    torch.testing.assert_close(optimizer.curvature.values["weight"], fisher(fresh, x).values["weight"])
    with pytest.raises(RuntimeError, match="no forward pass since the last step"):
        optimizer.step()


def test_frozen_layers_are_left_out():
    model, x = make("mlp")
    optimizer = NaturalGradient(model, damping=0.1)
    model[1].requires_grad_(False)
    before = model[1].weight.clone()
    step(model, optimizer, x, torch.randint(3, (7,)), False)
    assert torch.equal(before, model[1].weight)


def test_errors_say_what_to_do():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="NaturalGradient needs lr > 0"):
        NaturalGradient(model, lr=-1.0)
    with pytest.raises(ValueError, match="kl_clip must be above 0"):
        NaturalGradient(model, kl_clip=0.0)
    with pytest.raises(TypeError, match="takes the model, not its parameters"):
        NaturalGradient(model.parameters())
    with pytest.raises(ValueError, match="an optimizer never sees"):
        NaturalGradient(model, labels="true")
    optimizer = NaturalGradient(model)
    with pytest.raises(RuntimeError, match="has seen no forward pass"):
        optimizer.step()
    optimizer.detach()
    assert not model._forward_pre_hooks
