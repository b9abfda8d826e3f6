"""Sums of quadratics, compared with the sum over tasks."""

import pytest
import torch
from torch import nn

from everlearn.core.parameters import snapshot, trainable_parameters
from everlearn.curvature import Diagonal, Full, Kronecker, Quadratic
from everlearn.curvature.kronecker import Pair
from everlearn.surgery.heads import grow_output

pytestmark = pytest.mark.usefixtures("double")


def random_spd(n):
    root = torch.randn(n, n)
    return root @ root.t()


def random_form(kind, model):
    shapes = {n: tuple(p.shape) for n, p in trainable_parameters(model).items()}
    size = sum(p.numel() for p in trainable_parameters(model).values())
    if kind == "diagonal":
        return Diagonal({n: torch.rand(s) for n, s in shapes.items()})
    if kind == "full":
        return Full(shapes, None, random_spd(size))
    outputs, inputs = shapes["weight"]
    return Kronecker({"weight": [Pair(random_spd(inputs + 1), random_spd(outputs))]}, {"weight": "bias"})


def move_parameters(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return snapshot(model)


def sum_of_terms(terms, model):
    theta = dict(model.named_parameters())
    return sum(form.quad({n: theta[n] - anchor[n] for n in anchor}) for form, anchor in terms) / 2


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("count", [1, 2, 20])
def test_a_sum_of_quadratics_is_one_quadratic(kind, count):
    model = nn.Linear(3, 2)
    total = Quadratic()
    terms = []
    for _ in range(count):
        terms.append((random_form(kind, model), move_parameters(model)))
        total.add(*terms[-1])
    move_parameters(model)
    value = total(model)
    expected = sum_of_terms(terms, model)
    torch.testing.assert_close(value, expected)
    actual = torch.autograd.grad(value, list(model.parameters()))
    for g, t in zip(actual, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(g, t)


def test_the_collapsed_anchor_is_accurate_in_single_precision():
    """Close anchors and large importances: A θ² - 2 B θ + C would lose all digits here."""
    torch.set_default_dtype(torch.float)
    model = nn.Linear(3, 2)
    total = Quadratic()
    terms = []
    for _ in range(20):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-4 * torch.randn_like(p))
        terms.append((random_form("diagonal", model) * 1e8, snapshot(model)))
        total.add(*terms[-1])
    exact = []
    for form, anchor in terms:
        double_form = Diagonal({n: v.double() for n, v in form.values.items()})
        exact.append((double_form, {n: v.double() for n, v in anchor.items()}))
    move_parameters(model)
    expected = torch.autograd.grad(sum_of_terms(exact, model.double()), list(model.parameters()))
    actual = torch.autograd.grad(total(model.float()), list(model.parameters()))
    for g, t in zip(actual, expected, strict=True):
        torch.testing.assert_close(g.double(), t, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
def test_first_and_second_derivatives(kind):
    model = nn.Linear(3, 2)
    quadratic = Quadratic()
    form = random_form(kind, model)
    quadratic.add(form, snapshot(model))
    assert quadratic(model) == 0
    move_parameters(model)
    names, theta = zip(*model.named_parameters(), strict=True)

    def value_at(*values):
        return torch.func.functional_call(
            QuadraticModule(model, quadratic), dict(zip([f"model.{n}" for n in names], values, strict=True))
        )

    assert torch.autograd.gradcheck(value_at, tuple(p.detach().requires_grad_() for p in theta))
    hessian = torch.autograd.functional.hessian(value_at, tuple(p.detach() for p in theta))
    direction = [torch.randn_like(p) for p in theta]
    quad = sum(
        (a * torch.tensordot(h, b, b.dim())).sum()
        for a, row in zip(direction, hessian, strict=True)
        for h, b in zip(row, direction, strict=True)
    )
    torch.testing.assert_close(quad, form.quad(dict(zip(names, direction, strict=True))))


class QuadraticModule(nn.Module):
    def __init__(self, model, quadratic):
        super().__init__()
        self.model = model
        self.quadratic = quadratic

    def forward(self):
        return self.quadratic(self.model)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
def test_new_outputs_are_unpenalized_and_old_ones_stay_penalized(kind):
    model = nn.Sequential(nn.Linear(3, 2))
    full_name = {"weight": "0.weight", "bias": "0.bias"}

    def make_form():
        form = random_form(kind, model[0])
        if kind == "diagonal":
            return Diagonal({full_name[n]: v for n, v in form.values.items()})
        if kind == "full":
            return Full({full_name[n]: s for n, s in form.shapes.items()}, None, form.matrix)
        return Kronecker({"0.weight": form.layers["weight"]}, {"0.weight": "0.bias"})

    first_form = make_form()
    quadratic = Quadratic()
    quadratic.add(first_form, snapshot(model))
    grow_output(model, 4)
    model.double()
    assert quadratic(model).abs() < 1e-20
    displacement = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.add_(displacement[n])
    expected = first_form.quad({n: m[:2] for n, m in displacement.items()}) / 2
    torch.testing.assert_close(quadratic(model).detach(), expected)
    second_form = make_form()
    quadratic.add(second_form, snapshot(model))
    torch.testing.assert_close(quadratic(model).detach(), expected)
    second_anchor = snapshot(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    current = {n: p.detach() for n, p in model.named_parameters()}
    expected = first_form.quad(
        {n: (displacement[n] + current[n] - second_anchor[n])[:2] for n in current}
    ) + second_form.quad({n: current[n] - second_anchor[n] for n in current})
    torch.testing.assert_close(quadratic(model).detach(), expected / 2)


def test_the_value_can_be_backpropagated_twice():
    model = nn.Linear(3, 2)
    quadratic = Quadratic()
    quadratic.add(random_form("diagonal", model), snapshot(model))
    move_parameters(model)
    value = quadratic(model)
    gradient = torch.autograd.grad(value, model.weight, retain_graph=True)[0]
    assert torch.equal(gradient, torch.autograd.grad(value, model.weight)[0])


def test_saving_and_loading():
    for kind in ("diagonal", "kronecker", "full"):
        model = nn.Linear(3, 2)
        quadratic = Quadratic()
        restored = Quadratic()
        for _ in range(2):
            quadratic.add(random_form(kind, model), move_parameters(model))
        restored.load_state_dict(quadratic.state_dict())
        move_parameters(model)
        assert torch.equal(quadratic(model), restored(model))


def test_forms_of_different_structures_cannot_be_added():
    model = nn.Linear(3, 2)
    quadratic = Quadratic()
    quadratic.add(random_form("diagonal", model), snapshot(model))
    with pytest.raises(
        TypeError, match="Diagonal and Full cannot be added: compute all importances with the same structure"
    ):
        quadratic.add(random_form("full", model), snapshot(model))


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("frozen", [(True, False, False), (False, True, False), (True, False, True)])
def test_layers_frozen_and_thawed_between_tasks(kind, frozen):
    """Each task penalizes the parameters that were trainable in it, in any order in the forms."""
    model = nn.Linear(3, 2)
    total = Quadratic()
    terms = []
    for is_frozen in frozen:
        model.weight.requires_grad_(not is_frozen)
        if kind == "kronecker" and is_frozen:
            form = Kronecker(rest=Diagonal({"bias": random_spd(2)[0]}))
        else:
            form = random_form(kind, model)
        terms.append((form, move_trainable(model)))
        total.add(*terms[-1])
    model.weight.requires_grad_(True)
    move_parameters(model)
    value = total(model)
    expected = sum_of_terms(terms, model)
    torch.testing.assert_close(value, expected)
    actual = torch.autograd.grad(value, list(model.parameters()))
    for g, t in zip(actual, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(g, t)


def move_trainable(model):
    with torch.no_grad():
        for p in trainable_parameters(model).values():
            p.add_(torch.randn_like(p))
    return snapshot(model)


@pytest.mark.parametrize("kind", ["kronecker", "full"])
def test_frozen_parameters_off_their_anchor_enter_the_gradient_of_the_others(kind):
    model = nn.Linear(3, 2)
    quadratic = Quadratic()
    form = random_form(kind, model)
    anchor = snapshot(model)
    quadratic.add(form, anchor)
    move_parameters(model)
    (expected,) = torch.autograd.grad(sum_of_terms([(form, anchor)], model), [model.bias])
    model.weight.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(quadratic(model), [model.bias])[0], expected)


def test_complex_parameters_are_penalized_by_their_distance():
    model = nn.Module()
    quadratic = Quadratic()
    model.z = nn.Parameter(torch.randn(3, dtype=torch.cdouble))
    terms = []
    for _ in range(2):
        importance = torch.rand(3)
        anchor = snapshot(model)["z"]
        terms.append((importance, anchor))
        quadratic.add(Diagonal({"z": importance}), {"z": anchor})
        move_parameters(model)
    value = quadratic(model)
    value.backward()
    actual = model.z.grad
    model.z.grad = None
    expected = (
        sum(
            (importance * ((model.z - anchor).real ** 2 + (model.z - anchor).imag ** 2)).sum()
            for importance, anchor in terms
        )
        / 2
    )
    expected.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(actual, model.z.grad)
