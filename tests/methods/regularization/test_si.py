import pytest
import torch
from torch import nn

from everlearn import L2, SI, Batch, train
from everlearn.core.parameters import snapshot, trainable_parameters

pytestmark = pytest.mark.usefixtures("double")


class Point(nn.Module):
    """Parameters and nothing else."""

    def __init__(self, values):
        super().__init__()
        self.theta = nn.Parameter(torch.as_tensor(values))


def descend(model, method, loss, steps, make=torch.optim.SGD, lr=0.1):
    """Full-batch training in a loop of one's own."""
    optimizer = make(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (loss(model) + method.penalty(model)).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)


def quadratic(h, at=0.0):
    return lambda model: (h * (model.theta - at) ** 2).sum() / 2


def test_the_path_integral_is_the_fall_of_the_loss_and_half_the_curvature():
    """Σ ω - (L₀ - L_T) = ½ Σ dᵀHd over all steps d, exactly, for a quadratic."""
    root = torch.randn(4, 4)
    hessian = root @ root.t() / 8
    model, method, moves = Point(torch.randn(4)), SI(), []
    loss = lambda m: m.theta @ hessian @ m.theta / 2
    first = loss(model).item()
    for _ in range(20):
        before = model.theta.detach().clone()
        descend(model, method, loss, 1)
        moves.append(model.theta.detach() - before)
    excess = sum((d @ hessian @ d / 2).item() for d in moves)
    assert method.path["theta"].sum().item() == pytest.approx(first - loss(model).item() + excess, rel=1e-12)


@pytest.mark.parametrize("lr", [0.1, 0.01])
def test_the_importance_of_a_diagonal_bowl_is_its_curvature(lr):
    """(h/2) / (1 - lr h/2) at convergence for damping → 0: h/2 as lr → 0, so that strength 1 restores the quadratic."""
    h = torch.tensor([4.0, 1.0, 0.25])
    model, method = Point(torch.ones(3)), SI(strength=1.0, damping=1e-12)
    descend(model, method, quadratic(h), int(40 / lr), lr=lr)
    method.end_task(model, None)
    torch.testing.assert_close(method.omega.values["theta"] / 2, (h / 2) / (1 - lr * h / 2), rtol=1e-4, atol=0)


def test_a_full_batch_path_sums_to_the_fall_of_the_loss():
    x, y = torch.randn(64, 3), torch.randn(64, 1)
    errors = []
    for lr in (0.05, 0.005):
        torch.manual_seed(0)
        model, method = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), SI()
        loss = lambda m: ((m(x) - y) ** 2).mean()
        before = loss(model).item()
        descend(model, method, loss, int(5 / lr), lr=lr)
        errors.append(sum(w.sum().item() for w in method.path.values()) / (before - loss(model).item()) - 1)
    assert 0 < errors[1] < errors[0] < 0.1 and errors[0] / errors[1] == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_path_follows_what_the_optimizer_did(make):
    model, method = Point(torch.randn(5)), SI()
    before = model.theta.detach().clone()
    h = torch.rand(5)
    descend(model, method, quadratic(h), 1, make)
    torch.testing.assert_close(method.path["theta"], -(h * before) * (model.theta.detach() - before))


def test_the_penalty_does_not_enter_the_path():
    h = torch.rand(3) + 1
    model, method = Point(torch.randn(3)), SI(strength=5.0)
    descend(model, method, quadratic(h), 20)
    method.end_task(model, None)
    assert (method.omega.values["theta"] > 0).all()
    for _ in range(3):
        before, path = model.theta.detach().clone(), method.path["theta"].clone()
        descend(model, method, quadratic(h, at=2.0), 1, lr=0.01)
        moved = model.theta.detach() - before
        task_gradient = h * (before - 2.0)
        torch.testing.assert_close(method.path["theta"], path - task_gradient * moved)
    pull = method.omega.values["theta"] * (before - method.quadratic.anchor["theta"])
    torch.testing.assert_close(moved, -0.01 * (task_gradient + pull))


@pytest.mark.parametrize("through_data", [False, True])
def test_a_step_starts_where_the_parameters_are(through_data):
    h = torch.rand(3) + 1
    model, method = Point(torch.randn(3)), SI(strength=5.0)
    descend(model, method, quadratic(h), 20)
    method.end_task(model, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        with torch.no_grad():
            model.theta.add_(1.0)  # between two steps, and so not on the path
        if through_data:
            model.theta.data.add_(1.0)  # which makes no new version
        before, path = model.theta.detach().clone(), method.path["theta"].clone()
        optimizer.zero_grad()
        quadratic(h)(model).backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
        moved, pull = (
            model.theta.detach() - before,
            method.omega.values["theta"] * (before - method.quadratic.anchor["theta"]),
        )
        torch.testing.assert_close(moved, -0.01 * (h * before + pull))
        torch.testing.assert_close(method.path["theta"], path - h * before * moved, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_writes_to_data_is_followed():
    h = torch.rand(3) + 1
    model, method = Point(torch.randn(3)), SI()
    before = model.theta.detach().clone()
    quadratic(h)(model).backward()
    method.before_step(model)
    model.theta.data.sub_(0.1 * model.theta.grad)
    method.after_step(model)
    torch.testing.assert_close(method.path["theta"], -(h * before) * (model.theta.detach() - before))


def test_clipping_after_it_does_not_reach_the_path():
    model, method = Point(torch.full((2,), 10.0)), SI()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    quadratic(torch.ones(2))(model).backward()
    method.before_step(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    method.after_step(model)
    moved = model.theta.detach() - 10.0
    torch.testing.assert_close(method.path["theta"], -10.0 * moved)


def test_consolidation_follows_the_formula_and_starts_anew():
    model, method = Point(torch.randn(4)), SI(strength=0.5, damping=0.3)
    before = model.theta.detach().clone()
    descend(model, method, quadratic(torch.rand(4)), 10)
    path, moved = method.path["theta"].clone(), model.theta.detach() - before
    method.end_task(model, None)
    torch.testing.assert_close(method.omega.values["theta"], (path / (moved**2 + 0.3)).relu())
    assert (method.path["theta"] == 0).all() and torch.equal(method.quadratic.anchor["theta"], model.theta)


def test_importance_never_falls_below_zero():
    model, method = Point(torch.tensor([1.0, 1.0])), SI()
    for sign in (1.0, -1.0, -1.0):
        descend(model, method, lambda m, s=sign: s * 0.5 * m.theta[0] + 0 * m.theta[1], 1)
        method.path["theta"][0] *= sign  # a path uphill
        method.end_task(model, None)
        assert (method.omega.values["theta"] >= 0).all() and method.omega.values["theta"].isfinite().all()
    assert method.omega.values["theta"][1] == 0


def test_unused_and_frozen_parameters_have_no_importance():
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1), "frozen": nn.Linear(3, 1)})
    model["frozen"].requires_grad_(False)
    method, x = SI(), torch.randn(8, 3)
    descend(model, method, lambda m: (m["used"](x) ** 2).mean(), 3)
    method.end_task(model, None)
    assert (method.omega.values["unused.weight"] == 0).all() and "frozen.weight" not in method.omega.values
    assert method.omega.values["used.weight"].sum() > 0


def test_without_task_boundaries():
    h = torch.rand(3)
    model, method = Point(torch.randn(3)), SI(consolidate_every=5)
    descend(model, method, quadratic(h), 4)
    assert not method.omega.values
    descend(model, method, quadratic(h), 1)
    held = method.omega.values["theta"].clone()
    assert (held > 0).all() and torch.equal(method.quadratic.anchor["theta"], model.theta)
    descend(model, method, quadratic(h), 3)
    method.end_task(model, None)
    assert torch.equal(held, method.omega.values["theta"]), "a boundary changes nothing"
    descend(model, method, quadratic(h), 2)
    assert (method.omega.values["theta"] > held).all()


def test_importances_add_up_and_the_anchor_moves():
    model, method = Point(torch.randn(3)), SI()
    held = []
    for _ in range(2):
        descend(model, method, quadratic(torch.rand(3)), 5)
        method.end_task(model, None)
        held.append(method.omega.values["theta"].clone())
    assert (held[1] >= held[0]).all() and torch.equal(method.quadratic.anchor["theta"], model.theta)


def test_a_loop_that_does_not_speak_the_verbs_is_told():
    model, method = nn.Linear(2, 2), SI()
    with pytest.raises(ValueError, match=r"not seen a step: call before_step\(model\) and after_step\(model\)"):
        method.end_task(model, None)


def test_a_held_parameter_that_a_task_does_not_use_is_still_pulled():
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    method, x = SI(strength=1.0), torch.randn(8, 3)
    descend(model, method, lambda m: (m["a"](x) ** 2).mean() + (m["b"](x) ** 2).mean(), 5)
    method.end_task(model, None)
    with torch.no_grad():
        model["b"].weight += 1
    before = snapshot(model)
    descend(model, method, lambda m: (m["a"](x) ** 2).mean(), 1)
    assert ((before["b.weight"] - trainable_parameters(model)["b.weight"]) > 0).all()


def test_other_penalties_in_a_chain_are_part_of_what_is_learned():
    paths = []
    for strength in (0.0, 5.0):
        torch.manual_seed(0)
        model, chain = nn.Linear(3, 2), L2(strength) + SI()
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


def test_parameters_without_importance_are_clipped_without_harm():
    """A layer added in the second task has a path of its own gradient, although clipping changes gradients in place."""
    model, method, x = nn.Sequential(nn.Linear(3, 3)), SI(), torch.randn(8, 3)
    descend(model, method, lambda m: (m(x) ** 2).mean(), 3)
    method.end_task(model, None)
    model.append(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(x) ** 2).mean().backward()
    g, before = model[1].weight.grad.clone(), model[1].weight.detach().clone()
    method.before_step(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    method.after_step(model)
    torch.testing.assert_close(method.path["1.weight"], -g * (model[1].weight.detach() - before))


def test_a_pull_of_another_moment_is_not_used_again():
    model, method = Point(torch.randn(3)), SI()
    descend(model, method, quadratic(torch.ones(3)), 5)
    method.end_task(model, None)
    with torch.no_grad():
        model.theta += 1
    assert method.penalty(model) > 0  # looked at, far from the anchor
    method.end_task(model, None)  # which moves here
    model.theta.grad = torch.zeros(3)
    method.before_step(model)
    assert (model.theta.grad == 0).all()


def test_a_step_that_a_scaler_skips_leaves_no_trace():
    model, method = Point(torch.randn(3)), SI()
    descend(model, method, quadratic(torch.ones(3)), 2)
    path = method.path["theta"].clone()
    model.theta.grad = torch.tensor([1.0, torch.inf, torch.nan])
    method.before_step(model)
    method.after_step(model)
    assert torch.equal(path, method.path["theta"])


def test_verbs_in_the_wrong_place_are_told():
    model, method = Point(torch.randn(3)), SI()
    with pytest.raises(ValueError, match=r"found no gradients: call it after loss.backward\(\)"):
        method.before_step(model)
    with pytest.raises(ValueError, match=r"after_step needs the before_step\(model\) of the same step"):
        method.after_step(model)
