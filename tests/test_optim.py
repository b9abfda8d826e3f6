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
from everlearn.optim import NaturalGradient, _depends_on_mode
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


def step(model, optimizer, x, y, compute_loss=None):
    optimizer.zero_grad()
    compute_loss = compute_loss or Gaussian().loss
    loss = compute_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_linear_gaussian_regression_is_solved_in_one_step(structure):
    x, y = regression()
    model = nn.Linear(4, 2)
    step(model, NaturalGradient(model, lr=1.0, structure=structure, damping=0.0, likelihood=Gaussian()), x, y)
    ones = torch.cat([x, torch.ones(30, 1)], 1)
    solution = torch.linalg.lstsq(ones, y).solution
    weights = torch.cat([model.weight, model.bias[:, None]], 1).t()
    assert (weights - solution).abs().max() < 1e-10


def test_full_is_invariant_to_a_linear_reparametrization():
    """θ = φ B⁻¹: the same function with different parameters takes the same steps."""
    x, y = regression(k=3)
    b = torch.randn(4, 4) + 2 * torch.eye(4)
    a = nn.Linear(4, 3, bias=False)
    c = nn.Linear(4, 3, bias=False)
    c.weight.data = a.weight.data @ torch.linalg.inv(b)
    for model, inputs in ((a, x), (c, x @ b.t())):
        optimizer = NaturalGradient(model, lr=0.3, structure="full", damping=0.0, likelihood=Gaussian())
        for _ in range(3):
            step(model, optimizer, inputs, y)
    assert (c.weight @ b - a.weight).abs().max() < 1e-10


def test_large_damping_gives_the_gradient():
    x = torch.randn(20, 4)
    y = torch.randint(3, (20,))
    for structure in ("diagonal", "kronecker", "full"):
        model = nn.Linear(4, 3)
        old_weight = model.weight.detach().clone()
        step(model, NaturalGradient(model, lr=1.0, structure=structure, damping=1e8), x, y, F.cross_entropy)
        torch.testing.assert_close((old_weight - model.weight) * 1e8, model.weight.grad, rtol=1e-5, atol=1e-9)


def test_full_on_the_softmax_model_is_newtons_step():
    x = torch.randn(50, 3)
    y = torch.randint(4, (50,))
    model = nn.Linear(3, 4, bias=False)
    w = model.weight.detach().clone().flatten()

    def loss(w):
        return F.cross_entropy(x @ w.view(4, 3).t(), y)

    hessian = torch.autograd.functional.hessian(loss, w)
    gradient = torch.autograd.functional.jacobian(loss, w)
    step(model, NaturalGradient(model, lr=1.0, structure="full", damping=1e-6), x, y, F.cross_entropy)
    newton = w - torch.linalg.solve(hessian + 1e-6 * torch.eye(12), gradient)
    torch.testing.assert_close(model.weight.detach().flatten(), newton, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_the_step_is_the_solved_gradient(structure):
    model, x = make("mlp")
    y = torch.randint(3, (7,))
    expected = copy.deepcopy(model)
    F.cross_entropy(expected(x), y).backward()
    grads = {n: p.grad for n, p in expected.named_parameters()}
    v = fisher(expected, x, structure=structure).solve(grads, 0.1)
    step(model, NaturalGradient(model, lr=0.5, structure=structure, damping=0.1), x, y, F.cross_entropy)
    for n, p in expected.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[n], p - 0.5 * v[n])
        assert (grads[n] * v[n]).sum() >= 0, "a direction of descent"


def test_sample_space_equals_parameter_space():
    model, x = make("mlp")  # 71 parameters; 7 examples have 14 directions
    sample_space = fisher(model, x, structure="full")
    assert sample_space.rows is not None
    v = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    parameter_space = type(sample_space)(sample_space.shapes, matrix=sample_space.dense())
    for n, expected in parameter_space.solve(v, 0.1).items():
        torch.testing.assert_close(sample_space.solve(v, 0.1)[n], expected)


def test_momentum_decay_and_rare_updates():
    x, y = regression()
    model = nn.Linear(4, 2)
    optimizer = NaturalGradient(model, lr=0.1, structure="diagonal", momentum=0.9, damping=0.1, likelihood=Gaussian())
    moves = []
    solved = []
    for _ in range(3):
        old_weight = model.weight.detach().clone()
        step(model, optimizer, x, y)
        moves.append(old_weight - model.weight.detach())
        solved.append(optimizer.curvature.solve({"weight": model.weight.grad}, 0.1)["weight"])
    torch.testing.assert_close(moves[2], 0.1 * (solved[2] + 0.9 * solved[1] + 0.81 * solved[0]))

    curvatures = []
    averaged = NaturalGradient(model, structure="diagonal", decay=0.8, update_every=2, likelihood=Gaussian())
    for k in range(4):
        step(model, averaged, x * (k + 1), y)
        curvatures.append(averaged.curvature.values["weight"])
    assert torch.equal(curvatures[0], curvatures[1]) and torch.equal(curvatures[2], curvatures[3])
    torch.testing.assert_close(curvatures[2], 0.8 * curvatures[0] + 0.2 * 9 * curvatures[0])


def test_averaged_kronecker_factors_stay_one_pair():
    x = torch.randn(20, 4)
    y = torch.randint(3, (20,))
    model = nn.Linear(4, 3)
    optimizer = NaturalGradient(model, lr=0.1, decay=0.5)
    for _ in range(3):
        step(model, optimizer, x, y, F.cross_entropy)
    assert len(optimizer.curvature.layers["weight"]) == 1


def test_kl_clip_bounds_the_step():
    x = torch.randn(20, 4)
    y = torch.randint(3, (20,))
    model = nn.Linear(4, 3)
    old_model = copy.deepcopy(model)
    optimizer = NaturalGradient(model, lr=10.0, damping=1e-6, kl_clip=1e-3)
    step(model, optimizer, x, y, F.cross_entropy)
    grads = {n: p.grad for n, p in model.named_parameters()}
    v = optimizer.curvature.solve(grads, 1e-6)
    vg = sum((v[n] * g).sum() for n, g in grads.items())
    nu = (1e-3 / (100 * vg)).sqrt()
    assert nu < 1, "the bound is active"
    torch.testing.assert_close(old_model.weight - model.weight, 10.0 * nu * v["weight"])


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_a_resumed_optimizer_takes_the_same_steps(structure, tmp_path):
    x = torch.randn(20, 4)
    y = torch.randint(3, (20,))

    def optimizer_for(model):
        return NaturalGradient(model, lr=0.1, structure=structure, momentum=0.5, decay=0.5, update_every=2, damping=0.1)

    model = nets.mlp(4, 3, hidden=(5,))
    optimizer = optimizer_for(model)
    for _ in range(3):
        step(model, optimizer, x, y, F.cross_entropy)
    resumed_model = copy.deepcopy(model)
    resumed = optimizer_for(resumed_model)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for _ in range(3):
        step(model, optimizer, x, y, F.cross_entropy)
        step(resumed_model, resumed, x, y, F.cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed_model.parameters(), strict=True))


def test_parameters_without_factors_are_named_in_one_warning():
    torch.set_default_dtype(torch.float)
    model = nets.cnn((1, 8, 8), 10, channels=(4,)).eval()
    task = streams.digits("class")[0]
    optimizer = NaturalGradient(model, lr=0.01, damping=0.1)

    def learn():
        for batch in task.batches(64):
            optimizer.zero_grad()
            batch.loss(model(batch.x)).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=r"No Kronecker factors for 0.1.weight, 0.1.bias: .* the diagonal") as caught:
        learn()
    assert len(caught) == 1


@pytest.mark.parametrize("layer", [lambda: nn.Dropout(0.5), lambda: nn.BatchNorm1d(4)], ids=["dropout", "batch norm"])
def test_layers_in_training_mode_cause_one_warning(layer):
    x = torch.randn(20, 4)
    y = torch.randint(3, (20,))
    model = nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 3))
    optimizer = NaturalGradient(model, lr=0.01, structure="diagonal", damping=0.1)
    step(model.eval(), optimizer, x, y, F.cross_entropy)
    first_curvature = fisher(model, x).values["0.weight"]
    with pytest.warns(UserWarning, match=r"F in evaluation mode.* in which 1 .*model.eval\(\)"):
        step(model.train(), optimizer, x, y, F.cross_entropy)
    step(model, optimizer, x, y, F.cross_entropy)  # a second warning would be an error
    model.eval()(x)
    optimizer._update_curvature()
    torch.testing.assert_close(optimizer.curvature.values["0.weight"], fisher(model, x).values["0.weight"])
    assert not torch.allclose(first_curvature, optimizer.curvature.values["0.weight"])


def test_layers_that_depend_on_the_mode():
    mode_dependent = (
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.LSTM(4, 4, 2, dropout=0.1),
        nn.InstanceNorm1d(4, track_running_stats=True),
    )
    assert all(map(_depends_on_mode, mode_dependent))
    independent = (
        nn.Linear(4, 4),
        nn.Dropout(0.0),
        nn.MultiheadAttention(4, 2),
        nn.LayerNorm(4),
        nn.InstanceNorm1d(4),
    )
    assert not any(map(_depends_on_mode, independent))


def test_closures_and_schedulers_work():
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


def test_a_deleted_optimizer_removes_its_hook_and_copies_of_the_model_are_ignored():
    model = nn.Linear(4, 2)
    x = torch.randn(6, 4)
    optimizer = NaturalGradient(model)
    copy.deepcopy(model)(x)
    assert optimizer._inputs is None, "inputs of a copy are ignored"
    with pytest.raises(TypeError, match="belongs to its model"):
        copy.deepcopy(optimizer)
    pickle.loads(pickle.dumps(model))(x)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None and not model._forward_pre_hooks


def test_inputs_of_the_last_pass_with_gradients_are_used():
    x = torch.randn(6, 4)
    y = torch.randint(2, (6,))
    model = nn.Linear(4, 2).eval()
    optimizer = NaturalGradient(model, structure="diagonal")
    with torch.no_grad():
        model(x * 100)
    F.cross_entropy(model(input=x), y).backward()
    optimizer.step()
    old_model = copy.deepcopy(model)
    with torch.no_grad():
        old_model.weight.add_(0.1 * optimizer.curvature.solve({"weight": model.weight.grad}, 1e-3)["weight"])
        old_model.bias.add_(0.1 * optimizer.curvature.solve({"bias": model.bias.grad}, 1e-3)["bias"])
    torch.testing.assert_close(optimizer.curvature.values["weight"], fisher(old_model, x).values["weight"])
    with pytest.raises(RuntimeError, match="no forward pass since the last step"):
        optimizer.step()


def test_frozen_layers_are_not_updated():
    model, x = make("mlp")
    optimizer = NaturalGradient(model, damping=0.1)
    model[1].requires_grad_(False)
    old_weight = model[1].weight.clone()
    step(model, optimizer, x, torch.randint(3, (7,)), F.cross_entropy)
    assert torch.equal(old_weight, model[1].weight)


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
