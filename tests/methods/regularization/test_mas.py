import pytest
import torch
from torch import nn

from everlearn import MAS, Gaussian, Task
from everlearn.core.parameters import snapshot, trainable_parameters
from everlearn.curvature import sensitivity

pytestmark = pytest.mark.usefixtures("double")


def end_tasks(model, method, inputs):
    omegas = []
    for x in inputs:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        method.end_task(model, x)
        omegas.append(sensitivity(model, x).values["weight"])
    return omegas


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_importances_add_up_over_tasks(decay):
    model = nn.Linear(3, 2)
    method = MAS(0.5, decay=decay)
    omegas = end_tasks(model, method, [torch.randn(5, 3) for _ in range(3)])
    total = sum(decay ** (2 - k) * omega for k, omega in enumerate(omegas))
    torch.testing.assert_close(method.quadratic.form.values["weight"], 2 * 0.5 * total)


def test_the_penalty_has_no_factor_one_half():
    model = nn.Linear(3, 2)
    method = MAS(3.0)
    x = torch.randn(8, 3)
    method.end_task(model, x)
    omega = sensitivity(model, x).values
    anchor = snapshot(model)
    torch.testing.assert_close(omega["weight"], 2 * (model(x).abs().t() @ x.abs()) / 8)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    delta = {n: p.detach() - anchor[n] for n, p in trainable_parameters(model).items()}
    penalty = method.penalty(model)
    torch.testing.assert_close(penalty.detach(), 3 * sum((omega[n] * delta[n] ** 2).sum() for n in delta))
    penalty.backward()
    torch.testing.assert_close(model.weight.grad, 6 * omega["weight"] * delta["weight"])


def test_labels_do_not_matter():
    model = nn.Linear(3, 2)
    x = torch.randn(8, 3)
    forms = []
    for data in (x, (x, torch.randint(2, (8,))), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 3)):
        method = MAS(1.0)
        method.end_task(model, data)
        forms.append(method.quadratic.form.values["weight"])
    torch.testing.assert_close(forms[0], forms[1])
    torch.testing.assert_close(forms[0], forms[2])


def test_estimates_of_two_parts_average_by_their_sizes():
    model = nn.Linear(3, 2)
    x = torch.randn(10, 3)
    mean = sensitivity(model, x[:3]) * 0.3 + sensitivity(model, x[3:]) * 0.7
    torch.testing.assert_close(mean.values["weight"], sensitivity(model, x).values["weight"])


@pytest.mark.parametrize("norm", ["squared", "vector", "local"])
def test_every_norm_can_be_chosen(norm):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(8, 3)
    method = MAS(1.0, norm)
    method.end_task(model, x)
    torch.testing.assert_close(
        method.quadratic.form.values["0.weight"], 2 * sensitivity(model, x, norm).values["0.weight"]
    )


def test_consolidating_on_inputs_of_deployment():
    """A second call without training adds the importance of new inputs and keeps the anchor."""
    model = nn.Linear(3, 2)
    method = MAS(1.0)
    task_inputs = torch.randn(6, 3)
    deployment_inputs = torch.randn(6, 3)
    method.end_task(model, task_inputs)
    method.end_task(model, deployment_inputs)
    total = sensitivity(model, task_inputs) + sensitivity(model, deployment_inputs)
    torch.testing.assert_close(method.quadratic.form.values["bias"], 2 * total.values["bias"])
    assert method.penalty(model) == 0


@pytest.mark.parametrize("norm", ["squared", "vector"])
def test_a_model_that_ends_in_a_softmax_raises_a_warning(norm):
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
    with pytest.warns(UserWarning, match="outputs are probabilities"):
        MAS(0.1, norm=norm).end_task(model, torch.randn(9, 3))
    MAS(0.1, norm=norm).end_task(model, Task((torch.randn(9, 3), torch.randn(9, 4)), likelihood=Gaussian()))
