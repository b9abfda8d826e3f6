import pytest
import torch
from torch import nn

from everlearn import MAS, Gaussian, Task
from everlearn.core.parameters import snapshot, trainable_parameters
from everlearn.curvature import sensitivity

pytestmark = pytest.mark.usefixtures("double")


def consolidated(model, method, inputs):
    found = []
    for x in inputs:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        method.end_task(model, x)
        found.append(sensitivity(model, x).values["weight"])
    return found


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_importances_add_up_over_tasks(decay):
    model, method = nn.Linear(3, 2), MAS(0.5, decay=decay)
    found = consolidated(model, method, [torch.randn(5, 3) for _ in range(3)])
    total = sum(decay ** (2 - k) * omega for k, omega in enumerate(found))
    torch.testing.assert_close(method.quadratic.form.values["weight"], 2 * 0.5 * total)


def test_penalty_and_gradient_have_no_half():
    model, method = nn.Linear(3, 2), MAS(3.0)
    x = torch.randn(8, 3)
    method.end_task(model, x)
    omega, anchor = sensitivity(model, x).values, snapshot(model)
    torch.testing.assert_close(omega["weight"], 2 * (model(x).abs().t() @ x.abs()) / 8)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    moved = {n: p.detach() - anchor[n] for n, p in trainable_parameters(model).items()}
    height = method.penalty(model)
    torch.testing.assert_close(height.detach(), 3 * sum((omega[n] * moved[n] ** 2).sum() for n in moved))
    height.backward()
    torch.testing.assert_close(model.weight.grad, 6 * omega["weight"] * moved["weight"])


def test_labels_do_not_enter():
    model, x = nn.Linear(3, 2), torch.randn(8, 3)
    forms = []
    for data in (x, (x, torch.randint(2, (8,))), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 3)):
        method = MAS(1.0)
        method.end_task(model, data)
        forms.append(method.quadratic.form.values["weight"])
    torch.testing.assert_close(forms[0], forms[1])
    torch.testing.assert_close(forms[0], forms[2])


def test_two_loaders_are_joined_by_their_sizes():
    model, x = nn.Linear(3, 2), torch.randn(10, 3)
    a, b, whole = (sensitivity(model, part) for part in (x[:3], x[3:], x))
    mean = a * 0.3 + b * 0.7
    torch.testing.assert_close(mean.values["weight"], whole.values["weight"])


@pytest.mark.parametrize("norm", ["squared", "vector", "local"])
def test_every_form_can_be_chosen(norm):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(8, 3)
    method = MAS(1.0, norm)
    method.end_task(model, x)
    torch.testing.assert_close(
        method.quadratic.form.values["0.weight"], 2 * sensitivity(model, x, norm).values["0.weight"]
    )


def test_consolidating_on_what_a_deployed_model_sees():
    """A second call without training in between adds the importance of other inputs and moves nothing."""
    model, method = nn.Linear(3, 2), MAS(1.0)
    a, b = torch.randn(6, 3), torch.randn(6, 3)
    method.end_task(model, a)
    method.end_task(model, b)
    total = sensitivity(model, a) + sensitivity(model, b)
    torch.testing.assert_close(method.quadratic.form.values["bias"], 2 * total.values["bias"])
    assert method.penalty(model) == 0


@pytest.mark.parametrize("norm", ["squared", "vector"])
def test_a_model_that_ends_in_a_softmax_is_told(norm):
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
    with pytest.warns(UserWarning, match="outputs are probabilities"):
        MAS(norm=norm).end_task(model, torch.randn(9, 3))
    MAS(norm=norm).end_task(model, Task((torch.randn(9, 3), torch.randn(9, 4)), likelihood=Gaussian()))
