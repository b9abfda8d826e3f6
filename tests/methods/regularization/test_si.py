import pytest
import torch
from torch import nn

from everlearn import L2, SI, Batch, train
from everlearn.core.parameters import snapshot, trainable_parameters

pytestmark = pytest.mark.usefixtures("double")


class ParameterVector(nn.Module):
    """A model that is one parameter vector."""

    def __init__(self, values):
        super().__init__()
        self.theta = nn.Parameter(torch.as_tensor(values))


def train_full_batch(model, method, loss, steps, make_optimizer=torch.optim.SGD, lr=0.1):
    """Train on the full batch in a custom loop."""
    optimizer = make_optimizer(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (loss(model) + method.penalty(model)).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)


def quadratic_loss(h, minimum=0.0):
    return lambda model: (h * (model.theta - minimum) ** 2).sum() / 2


def test_the_path_integral_is_the_decrease_of_the_loss_plus_half_the_curvature():
    """Σ ω - (L₀ - L_T) = ½ Σ dᵀHd over all steps d, exactly, for a quadratic."""
    root = torch.randn(4, 4)
    hessian = root @ root.t() / 8
    model = ParameterVector(torch.randn(4))
    method = SI(10.0)
    steps = []
    loss = lambda m: m.theta @ hessian @ m.theta / 2
    initial_loss = loss(model).item()
    for _ in range(20):
        theta_before = model.theta.detach().clone()
        train_full_batch(model, method, loss, 1)
        steps.append(model.theta.detach() - theta_before)
    curvature_terms = sum((d @ hessian @ d / 2).item() for d in steps)
    assert method.path["theta"].sum().item() == pytest.approx(
        initial_loss - loss(model).item() + curvature_terms, rel=1e-12
    )


@pytest.mark.parametrize("lr", [0.1, 0.01])
def test_the_importance_of_a_diagonal_quadratic_is_its_curvature(lr):
    """(h/2) / (1 - lr h/2) at convergence for damping → 0: h/2 as lr → 0, so that strength 1 restores the quadratic."""
    h = torch.tensor([4.0, 1.0, 0.25])
    model = ParameterVector(torch.ones(3))
    method = SI(strength=1.0, damping=1e-12)
    train_full_batch(model, method, quadratic_loss(h), int(40 / lr), lr=lr)
    method.end_task(model, None)
    torch.testing.assert_close(method.omega.values["theta"] / 2, (h / 2) / (1 - lr * h / 2), rtol=1e-4, atol=0)


def test_a_full_batch_path_sums_to_the_decrease_of_the_loss():
    x = torch.randn(64, 3)
    y = torch.randn(64, 1)
    errors = []
    for lr in (0.05, 0.005):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        method = SI(10.0)
        loss = lambda m: ((m(x) - y) ** 2).mean()
        initial_loss = loss(model).item()
        train_full_batch(model, method, loss, int(5 / lr), lr=lr)
        errors.append(sum(w.sum().item() for w in method.path.values()) / (initial_loss - loss(model).item()) - 1)
    assert 0 < errors[1] < errors[0] < 0.1 and errors[0] / errors[1] == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_path_uses_the_steps_of_the_optimizer(make_optimizer):
    model = ParameterVector(torch.randn(5))
    method = SI(10.0)
    theta_before = model.theta.detach().clone()
    h = torch.rand(5)
    train_full_batch(model, method, quadratic_loss(h), 1, make_optimizer)
    torch.testing.assert_close(method.path["theta"], -(h * theta_before) * (model.theta.detach() - theta_before))


def test_the_penalty_does_not_enter_the_path():
    h = torch.rand(3) + 1
    model = ParameterVector(torch.randn(3))
    method = SI(strength=5.0)
    train_full_batch(model, method, quadratic_loss(h), 20)
    method.end_task(model, None)
    assert (method.omega.values["theta"] > 0).all()
    for _ in range(3):
        theta_before = model.theta.detach().clone()
        path = method.path["theta"].clone()
        train_full_batch(model, method, quadratic_loss(h, minimum=2.0), 1, lr=0.01)
        step = model.theta.detach() - theta_before
        task_gradient = h * (theta_before - 2.0)
        torch.testing.assert_close(method.path["theta"], path - task_gradient * step)
    penalty_gradient = method.omega.values["theta"] * (theta_before - method.quadratic.anchor["theta"])
    torch.testing.assert_close(step, -0.01 * (task_gradient + penalty_gradient))


@pytest.mark.parametrize("through_data", [False, True])
def test_external_changes_between_steps_are_not_part_of_the_path(through_data):
    h = torch.rand(3) + 1
    model = ParameterVector(torch.randn(3))
    method = SI(strength=5.0)
    train_full_batch(model, method, quadratic_loss(h), 20)
    method.end_task(model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        with torch.no_grad():
            model.theta.add_(1.0)  # a change between two steps is not part of the path
        if through_data:
            model.theta.data.add_(1.0)  # does not increment the version counter
        theta_before = model.theta.detach().clone()
        path = method.path["theta"].clone()
        optimizer.zero_grad()
        quadratic_loss(h)(model).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
        step = model.theta.detach() - theta_before
        penalty_gradient = method.omega.values["theta"] * (theta_before - method.quadratic.anchor["theta"])
        torch.testing.assert_close(step, -0.01 * (h * theta_before + penalty_gradient))
        torch.testing.assert_close(method.path["theta"], path - h * theta_before * step, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_writes_to_data_is_supported():
    h = torch.rand(3) + 1
    model = ParameterVector(torch.randn(3))
    method = SI(10.0)
    theta_before = model.theta.detach().clone()
    quadratic_loss(h)(model).backward()
    method.before_step(model)
    model.theta.data.sub_(0.1 * model.theta.grad)
    method.after_step(model)
    torch.testing.assert_close(method.path["theta"], -(h * theta_before) * (model.theta.detach() - theta_before))


def test_clipping_after_before_step_does_not_change_the_path_gradient():
    model = ParameterVector(torch.full((2,), 10.0))
    method = SI(10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    quadratic_loss(torch.ones(2))(model).backward()
    method.before_step(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    method.after_step(model)
    step = model.theta.detach() - 10.0
    torch.testing.assert_close(method.path["theta"], -10.0 * step)


def test_consolidation_follows_the_formula_and_resets_the_path():
    model = ParameterVector(torch.randn(4))
    method = SI(strength=0.5, damping=0.3)
    theta_before = model.theta.detach().clone()
    train_full_batch(model, method, quadratic_loss(torch.rand(4)), 10)
    path = method.path["theta"].clone()
    step = model.theta.detach() - theta_before
    method.end_task(model, None)
    torch.testing.assert_close(method.omega.values["theta"], (path / (step**2 + 0.3)).relu())
    assert (method.path["theta"] == 0).all() and torch.equal(method.quadratic.anchor["theta"], model.theta)


def test_importance_is_never_negative():
    model = ParameterVector(torch.tensor([1.0, 1.0]))
    method = SI(10.0)
    for sign in (1.0, -1.0, -1.0):
        train_full_batch(model, method, lambda m, s=sign: s * 0.5 * m.theta[0] + 0 * m.theta[1], 1)
        method.path["theta"][0] *= sign  # a path with increasing loss
        method.end_task(model, None)
        assert (method.omega.values["theta"] >= 0).all() and method.omega.values["theta"].isfinite().all()
    assert method.omega.values["theta"][1] == 0


def test_unused_and_frozen_parameters_have_no_importance():
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1), "frozen": nn.Linear(3, 1)})
    model["frozen"].requires_grad_(False)
    method = SI(10.0)
    x = torch.randn(8, 3)
    train_full_batch(model, method, lambda m: (m["used"](x) ** 2).mean(), 3)
    method.end_task(model, None)
    assert (method.omega.values["unused.weight"] == 0).all() and "frozen.weight" not in method.omega.values
    assert method.omega.values["used.weight"].sum() > 0


def test_consolidation_without_task_boundaries():
    h = torch.rand(3)
    model = ParameterVector(torch.randn(3))
    method = SI(1.0, consolidate_every=5)
    train_full_batch(model, method, quadratic_loss(h), 4)
    assert not method.omega.values
    train_full_batch(model, method, quadratic_loss(h), 1)
    omega = method.omega.values["theta"].clone()
    assert (omega > 0).all() and torch.equal(method.quadratic.anchor["theta"], model.theta)
    train_full_batch(model, method, quadratic_loss(h), 3)
    method.end_task(model, None)
    assert torch.equal(omega, method.omega.values["theta"]), "a task boundary changes nothing"
    train_full_batch(model, method, quadratic_loss(h), 2)
    assert (method.omega.values["theta"] > omega).all()


def test_importances_add_up_and_the_anchor_moves():
    model = ParameterVector(torch.randn(3))
    method = SI(1.0)
    omegas = []
    for _ in range(2):
        train_full_batch(model, method, quadratic_loss(torch.rand(3)), 5)
        method.end_task(model, None)
        omegas.append(method.omega.values["theta"].clone())
    assert (omegas[1] >= omegas[0]).all() and torch.equal(method.quadratic.anchor["theta"], model.theta)


def test_a_loop_that_does_not_call_the_hooks_is_refused():
    model = nn.Linear(2, 2)
    method = SI(10.0)
    with pytest.raises(ValueError, match=r"not seen a step: call before_step\(model\) and after_step\(model\)"):
        method.end_task(model, None)


def test_a_parameter_unused_in_a_task_is_still_penalized():
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    method = SI(strength=1.0)
    x = torch.randn(8, 3)
    train_full_batch(model, method, lambda m: (m["a"](x) ** 2).mean() + (m["b"](x) ** 2).mean(), 5)
    method.end_task(model, None)
    with torch.no_grad():
        model["b"].weight += 1
    initial = snapshot(model)
    train_full_batch(model, method, lambda m: (m["a"](x) ** 2).mean(), 1)
    assert ((initial["b.weight"] - trainable_parameters(model)["b.weight"]) > 0).all()


def test_penalties_of_other_methods_in_a_chain_enter_the_path():
    paths = []
    for strength in (0.0, 5.0):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        chain = L2(strength) + SI(10.0)
        x = torch.randn(16, 3)
        train(model, chain, (x, (x[:, 0] > 0).long()), epochs=1, batch_size=4)
        method = chain.methods[1]
        method.path["weight"].zero_()
        chain.begin_task(model, None)
        with torch.no_grad():
            model.weight += 0.1
        chain.loss(model, Batch(x, (x[:, 0] > 0).long())).backward()
        chain.before_step(model)
        with torch.no_grad():
            model.weight -= 0.1
        chain.after_step(model)
        paths.append(method.path["weight"].sum().item())
    assert paths[1] > paths[0] + 0.01


def test_clipping_does_not_change_the_path_of_a_new_layer():
    """The path of a layer added in the second task uses its gradient before clipping changes it in place."""
    model = nn.Sequential(nn.Linear(3, 3))
    method = SI(10.0)
    x = torch.randn(8, 3)
    train_full_batch(model, method, lambda m: (m(x) ** 2).mean(), 3)
    method.end_task(model, None)
    model.append(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(x) ** 2).mean().backward()
    gradient = model[1].weight.grad.clone()
    initial_weight = model[1].weight.detach().clone()
    method.before_step(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    method.after_step(model)
    torch.testing.assert_close(method.path["1.weight"], -gradient * (model[1].weight.detach() - initial_weight))


def test_a_cached_penalty_gradient_is_not_reused_after_consolidation():
    model = ParameterVector(torch.randn(3))
    method = SI(10.0)
    train_full_batch(model, method, quadratic_loss(torch.ones(3)), 5)
    method.end_task(model, None)
    with torch.no_grad():
        model.theta += 1
    assert method.penalty_value(model) > 0  # evaluated far from the anchor
    method.end_task(model, None)  # moves the anchor to the current parameters
    model.theta.grad = torch.zeros(3)
    method.before_step(model)
    assert (model.theta.grad == 0).all()


def test_a_step_skipped_by_a_scaler_does_not_change_the_path():
    model = ParameterVector(torch.randn(3))
    method = SI(10.0)
    train_full_batch(model, method, quadratic_loss(torch.ones(3)), 2)
    path = method.path["theta"].clone()
    model.theta.grad = torch.tensor([1.0, torch.inf, torch.nan])
    method.before_step(model)
    method.after_step(model)
    assert torch.equal(path, method.path["theta"])


def test_hooks_in_the_wrong_order_are_refused():
    model = ParameterVector(torch.randn(3))
    method = SI(10.0)
    with pytest.raises(ValueError, match=r"found no gradients: call it after loss.backward\(\)"):
        method.before_step(model)
    with pytest.raises(ValueError, match=r"after_step needs the before_step\(model\) of the same step"):
        method.after_step(model)
