import pytest
import torch
from torch import nn

from everlearn import Task, nets
from everlearn.curvature import sensitivity
from tests.models import MODELS, make
from tests.reference import gradients, mean_of

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def linear():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = torch.randn(20, 3)
    return model, x, model(x).detach()


def test_squared_norm_of_a_linear_model(linear):
    model, x, f = linear
    omega = sensitivity(model, x).values
    torch.testing.assert_close(omega["weight"], (2 * f.abs()[:, :, None] * x.abs()[:, None]).mean(0))
    torch.testing.assert_close(omega["bias"], 2 * f.abs().mean(0))


def test_vector_form_of_a_linear_model(linear):
    model, x, _ = linear
    omega = sensitivity(model, x, "vector").values
    torch.testing.assert_close(omega["weight"], x.abs().mean(0).expand(2, 3))
    torch.testing.assert_close(omega["bias"], torch.ones(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_any_model_equals_the_loop_and_the_jacobian_times_the_output(name):
    model, x = make(name)
    outputs = model.eval()(x).detach()
    expected = mean_of(model, x, [2 * outputs], torch.abs)
    actual = sensitivity(model, x, chunk=3).values
    for n, value in expected.items():
        torch.testing.assert_close(actual[n], value, rtol=1e-9, atol=1e-13)
    columns = []
    for c in range(outputs.shape[1]):
        columns.append(torch.zeros_like(outputs))
        columns[-1][:, c] = 1
    expected = mean_of(model, x, columns, torch.abs)
    actual = sensitivity(model, x, "vector").values
    for n, value in expected.items():
        torch.testing.assert_close(actual[n], value, rtol=1e-9, atol=1e-13)


def test_finite_differences_agree():
    model, x = make("mlp")
    gradient_entries = [row["3.weight"][1, 2] for row in gradients(model, x, 2 * model(x).detach())]
    actual = sensitivity(model, x).values["3.weight"][1, 2]
    step = 1e-5
    squared_norms = []
    for sign in (1, -1):
        with torch.no_grad():
            model[3].weight[1, 2] += sign * step
            squared_norms.append(model(x).square().sum(1))
            model[3].weight[1, 2] -= sign * step
    difference = (squared_norms[0] - squared_norms[1]) / (2 * step)
    torch.testing.assert_close(torch.stack(gradient_entries), difference, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(actual, difference.abs().mean(), rtol=1e-6, atol=1e-8)


def test_sensitivity_is_per_example_for_any_chunk_size(linear):
    model, x, _ = linear
    expected = sensitivity(model, x).values["weight"]
    for chunk in (1, 7, 20):
        torch.testing.assert_close(sensitivity(model, x, chunk=chunk).values["weight"], expected)
    batched = torch.autograd.grad(model(x).square().sum(), model.weight)[0].abs() / len(x)
    assert (batched <= expected + 1e-12).all() and not torch.allclose(batched, expected)


def test_labels_do_not_matter(linear):
    model, x, _ = linear
    expected = sensitivity(model, x).values["weight"]
    for y in (torch.zeros(20, dtype=torch.long), torch.arange(20), torch.rand(20)):
        assert torch.equal(sensitivity(model, (x, y)).values["weight"], expected)
    assert torch.allclose(sensitivity(model, [x[:5], x[5:10], x[10:]]).values["weight"], expected)


def test_estimates_of_two_parts_average_by_their_sizes(linear):
    model, x, _ = linear
    parts = 8 / 20 * sensitivity(model, x[:8]) + 12 / 20 * sensitivity(model, x[8:])
    torch.testing.assert_close(parts.values["weight"], sensitivity(model, x).values["weight"])


def test_scaling_the_last_layer():
    model = nets.mlp(4, 3, hidden=(6,))
    x = torch.randn(10, 4)
    omega = sensitivity(model, x).values
    with torch.no_grad():
        model[3].weight.mul_(3)
        model[3].bias.mul_(3)
    scaled_omega = sensitivity(model, x).values
    torch.testing.assert_close(scaled_omega["3.weight"], 3 * omega["3.weight"])
    torch.testing.assert_close(scaled_omega["1.weight"], 9 * omega["1.weight"])


def test_only_allowed_outputs_count(linear):
    model, x, f = linear
    table = torch.tensor([[True, False]])
    omega = sensitivity(model, Task(x, id=0, allowed=table)).values
    torch.testing.assert_close(omega["bias"], torch.stack([2 * f[:, 0].abs().mean(), torch.tensor(0.0)]))
    assert (sensitivity(model, Task(x, id=0, allowed=table), "vector").values["weight"][1] == 0).all()


def test_local_is_hebbs_rule():
    """For a linear layer with ReLU on non-negative inputs: 2 E[relu(a)_i x_j], whatever comes after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))
    x = torch.rand(12, 4)
    omega = sensitivity(model, x, "local").values
    hidden = model[1](model[0](x)).detach()
    torch.testing.assert_close(omega["0.weight"], 2 * torch.einsum("ni,nj->ij", hidden, x) / 12)
    outputs = model[2](hidden).detach()
    torch.testing.assert_close(omega["2.weight"], 2 * (outputs.abs()[:, :, None] * hidden[:, None]).mean(0))
    with torch.no_grad():
        model[2].weight.normal_()
    torch.testing.assert_close(sensitivity(model, x, "local").values["0.weight"], omega["0.weight"])


def test_local_sums_over_positions_of_a_convolution_before_the_absolute_value():
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Flatten(), nn.Linear(8, 3))
    x = torch.randn(6, 1, 2, 2)
    omega = sensitivity(model, x, "local").values["0.weight"]
    expected = 2 * torch.einsum("nchw,nhw->nc", model[0](x).detach(), x[:, 0]).abs().mean(0)
    torch.testing.assert_close(omega.flatten(), expected)


def test_local_counts_allowed_outputs_and_shared_inputs_once():
    table = torch.tensor([[True, False]])
    model = nn.Linear(3, 2)
    x = torch.randn(8, 3)
    omega = sensitivity(model, Task(x, id=0, allowed=table), "local").values
    assert (omega["weight"][1] == 0).all() and omega["weight"][0].sum() > 0

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 4, bias=False)
            self.b = nn.Linear(4, 2)
            self.c = nn.Linear(4, 2)

        def forward(self, x):
            h = self.a(x).relu()
            return self.b(h) + self.c(h)

    fork = Fork()
    x = torch.rand(8, 3)
    hidden = fork.a(x).relu().detach()
    omega = sensitivity(fork, x, "local").values["a.weight"]
    torch.testing.assert_close(omega, 2 * torch.einsum("ni,nj->ij", hidden, x) / 8)


@pytest.mark.parametrize("name", ["adaptive depth", "experts", "siamese, concatenated"])
def test_local_equals_the_mean_over_single_examples(name, caplog):
    model, x = make(name)
    per_example = [sensitivity(model, x[i : i + 1], "local").values for i in range(len(x))]
    for data, chunk in ((x, 2), (x, 7), (x.flip(0), 3)):
        actual = sensitivity(model, data, "local", chunk=chunk).values
        for n, value in actual.items():
            torch.testing.assert_close(value, sum(example_values[n] for example_values in per_example) / len(x))
    assert not caplog.text


def test_local_warns_about_parameters_without_a_recognized_layer(caplog):
    model, x = make("recurrent")
    omega = sensitivity(model, x, "local").values
    assert "No layer was recognized for cell.bias_hh" in caplog.text
    assert (omega["lstm.weight_ih_l0"] == 0).all() and omega["head.weight"].sum() > 0


def test_wrong_norm(linear):
    with pytest.raises(ValueError, match="norm: got 'l2', allowed: 'squared', 'vector', 'local'"):
        sensitivity(*linear[:2], "l2")
