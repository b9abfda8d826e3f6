"""Sums of bowls, against the sum written out."""

import pytest
import torch
from torch import nn

from everlearn.core.parameters import snapshot, trainable_parameters
from everlearn.curvature import Diagonal, Full, Kronecker, Quadratic
from everlearn.curvature.kronecker import Pair
from everlearn.surgery.heads import grow_output

pytestmark = pytest.mark.usefixtures("double")


def spd(n):
    root = torch.randn(n, n)
    return root @ root.t()


def random_form(kind, model):
    shapes = {n: tuple(p.shape) for n, p in trainable_parameters(model).items()}
    size = sum(p.numel() for p in trainable_parameters(model).values())
    if kind == "diagonal":
        return Diagonal({n: torch.rand(s) for n, s in shapes.items()})
    if kind == "full":
        return Full(shapes, None, spd(size))
    outputs, inputs = shapes["weight"]
    return Kronecker({"weight": [Pair(spd(inputs + 1), spd(outputs))]}, {"weight": "bias"})


def place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return snapshot(model)


def written_out(bowls, model):
    theta = dict(model.named_parameters())
    return sum(form.quad({n: theta[n] - at[n] for n in at}) for form, at in bowls) / 2


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("count", [1, 2, 20])
def test_a_sum_of_bowls_is_one_bowl(kind, count):
    model, total, bowls = nn.Linear(3, 2), Quadratic(), []
    for _ in range(count):
        bowls.append((random_form(kind, model), place(model)))
        total.add(*bowls[-1])
    place(model)
    height, truth = total(model), written_out(bowls, model)
    torch.testing.assert_close(height, truth)
    found = torch.autograd.grad(height, list(model.parameters()))
    for g, t in zip(found, torch.autograd.grad(truth, list(model.parameters())), strict=True):
        torch.testing.assert_close(g, t)


def test_the_collapsed_anchor_is_accurate_in_single_precision():
    """Close anchors and large importances: A θ² - 2 B θ + C would lose all digits here."""
    torch.set_default_dtype(torch.float)
    model, total = nn.Linear(3, 2), Quadratic()
    bowls = []
    for _ in range(20):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-4 * torch.randn_like(p))
        bowls.append((random_form("diagonal", model) * 1e8, snapshot(model)))
        total.add(*bowls[-1])
    exact = [
        (Diagonal({n: v.double() for n, v in f.values.items()}), {n: v.double() for n, v in a.items()})
        for f, a in bowls
    ]
    place(model)
    truth = torch.autograd.grad(written_out(exact, model.double()), list(model.parameters()))
    found = torch.autograd.grad(total(model.float()), list(model.parameters()))
    for g, t in zip(found, truth, strict=True):
        torch.testing.assert_close(g.double(), t, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
def test_first_and_second_derivatives(kind):
    model, quadratic = nn.Linear(3, 2), Quadratic()
    form = random_form(kind, model)
    quadratic.add(form, snapshot(model))
    assert quadratic(model) == 0
    place(model)
    names, theta = zip(*model.named_parameters(), strict=True)

    def height(*values):
        return torch.func.functional_call(
            Height(model, quadratic), dict(zip([f"model.{n}" for n in names], values, strict=True))
        )

    assert torch.autograd.gradcheck(height, tuple(p.detach().requires_grad_() for p in theta))
    hessian = torch.autograd.functional.hessian(height, tuple(p.detach() for p in theta))
    direction = [torch.randn_like(p) for p in theta]
    quad = sum(
        (a * torch.tensordot(h, b, b.dim())).sum()
        for a, row in zip(direction, hessian, strict=True)
        for h, b in zip(row, direction, strict=True)
    )
    torch.testing.assert_close(quad, form.quad(dict(zip(names, direction, strict=True))))


class Height(nn.Module):
    def __init__(self, model, quadratic):
        super().__init__()
        self.model, self.quadratic = model, quadratic

    def forward(self):
        return self.quadratic(self.model)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
def test_what_has_grown_since_is_free_and_what_was_stays_held(kind):
    model = nn.Sequential(nn.Linear(3, 2))
    rename = {"weight": "0.weight", "bias": "0.bias"}

    def form():
        found = random_form(kind, model[0])
        if kind == "diagonal":
            return Diagonal({rename[n]: v for n, v in found.values.items()})
        if kind == "full":
            return Full({rename[n]: s for n, s in found.shapes.items()}, None, found.matrix)
        return Kronecker({"0.weight": found.layers["weight"]}, {"0.weight": "0.bias"})

    first, quadratic = form(), Quadratic()
    quadratic.add(first, snapshot(model))
    grow_output(model, 4)
    model.double()
    assert quadratic(model).abs() < 1e-20
    moved = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.add_(moved[n])
    truth = first.quad({n: m[:2] for n, m in moved.items()}) / 2
    torch.testing.assert_close(quadratic(model).detach(), truth)
    second = form()
    quadratic.add(second, snapshot(model))
    torch.testing.assert_close(quadratic(model).detach(), truth)
    before = snapshot(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    now = {n: p.detach() for n, p in model.named_parameters()}
    truth = first.quad({n: (moved[n] + now[n] - before[n])[:2] for n in now}) + second.quad(
        {n: now[n] - before[n] for n in now}
    )
    torch.testing.assert_close(quadratic(model).detach(), truth / 2)


def test_it_can_be_backpropagated_twice():
    model, quadratic = nn.Linear(3, 2), Quadratic()
    quadratic.add(random_form("diagonal", model), snapshot(model))
    place(model)
    height = quadratic(model)
    a = torch.autograd.grad(height, model.weight, retain_graph=True)[0]
    assert torch.equal(a, torch.autograd.grad(height, model.weight)[0])


def test_saving_and_loading():
    for kind in ("diagonal", "kronecker", "full"):
        model, quadratic, again = nn.Linear(3, 2), Quadratic(), Quadratic()
        for _ in range(2):
            quadratic.add(random_form(kind, model), place(model))
        again.load_state_dict(quadratic.state_dict())
        place(model)
        assert torch.equal(quadratic(model), again(model))


def test_forms_of_different_kinds_do_not_mix():
    model, quadratic = nn.Linear(3, 2), Quadratic()
    quadratic.add(random_form("diagonal", model), snapshot(model))
    with pytest.raises(
        TypeError, match="Diagonal and Full cannot be added: compute all importances with the same structure"
    ):
        quadratic.add(random_form("full", model), snapshot(model))


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("frozen", [(True, False, False), (False, True, False), (True, False, True)])
def test_layers_that_are_frozen_and_thawed_between_tasks(kind, frozen):
    """The sum of what every task held, of the parameters that it held, whatever their order in the forms."""
    model, total, bowls = nn.Linear(3, 2), Quadratic(), []
    for still in frozen:
        model.weight.requires_grad_(not still)
        form = (
            random_form(kind, model)
            if kind != "kronecker" or not still
            else Kronecker(rest=Diagonal({"bias": spd(2)[0]}))
        )
        bowls.append((form, place_trainable(model)))
        total.add(*bowls[-1])
    model.weight.requires_grad_(True)
    place(model)
    height, truth = total(model), written_out(bowls, model)
    torch.testing.assert_close(height, truth)
    found = torch.autograd.grad(height, list(model.parameters()))
    for g, t in zip(found, torch.autograd.grad(truth, list(model.parameters())), strict=True):
        torch.testing.assert_close(g, t)


def place_trainable(model):
    with torch.no_grad():
        for p in trainable_parameters(model).values():
            p.add_(torch.randn_like(p))
    return snapshot(model)


@pytest.mark.parametrize("kind", ["kronecker", "full"])
def test_what_is_frozen_off_its_anchor_pulls_at_the_others(kind):
    model, quadratic = nn.Linear(3, 2), Quadratic()
    form = random_form(kind, model)
    at = snapshot(model)
    quadratic.add(form, at)
    place(model)
    (right,) = torch.autograd.grad(written_out([(form, at)], model), [model.bias])
    model.weight.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(quadratic(model), [model.bias])[0], right)


def test_complex_parameters_are_held_by_their_distance():
    model, quadratic = nn.Module(), Quadratic()
    model.z = nn.Parameter(torch.randn(3, dtype=torch.cdouble))
    bowls = []
    for _ in range(2):
        bowls.append((torch.rand(3), snapshot(model)["z"]))
        quadratic.add(Diagonal({"z": bowls[-1][0]}), {"z": bowls[-1][1]})
        place(model)
    height = quadratic(model)
    height.backward()
    found, model.z.grad = model.z.grad, None
    truth = sum((f * ((model.z - at).real ** 2 + (model.z - at).imag ** 2)).sum() for f, at in bowls) / 2
    truth.backward()
    torch.testing.assert_close(height, truth)
    torch.testing.assert_close(found, model.z.grad)
