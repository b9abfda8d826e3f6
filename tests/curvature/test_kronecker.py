import pytest
import torch
from torch import nn

from everlearn import Gaussian, nets
from everlearn.curvature import Diagonal, Kronecker, fisher
from everlearn.curvature.kronecker import Pair
from tests.models import MODELS, make
from tests.reference import full_fisher, kronecker_factors, mean_of, softmax_scores, squared_size

pytestmark = pytest.mark.usefixtures("double")


def with_bias(weight, bias):
    return torch.cat([weight, bias[:, None]], 1)


def random_form(outputs=3, inputs=4, terms=1):
    def random_factor(n):
        root = torch.randn(n, 2 * n)
        return root @ root.t() / n

    pairs = [Pair(random_factor(inputs + 1), random_factor(outputs)) for _ in range(terms)]
    return Kronecker({"w": pairs}, {"w": "b"})


def dense(form):
    return sum(torch.kron(g, a) for a, g in form.layers["w"])


def vector(delta):
    return with_bias(delta["w"], delta["b"]).flatten()


DELTA = {"w": torch.randn(3, 4, dtype=torch.double), "b": torch.randn(3, dtype=torch.double)}


@pytest.mark.parametrize("terms", [1, 3])
def test_the_form_is_the_kronecker_product(terms):
    form = random_form(terms=terms)
    f = dense(form)
    v = vector(DELTA)
    torch.testing.assert_close(form.quad(DELTA), v @ f @ v)
    assert form.trace() == pytest.approx(float(f.trace()))
    torch.testing.assert_close(vector(form.diagonal()), f.diagonal())
    torch.testing.assert_close(vector(form.solve(DELTA, 0.3)), torch.linalg.solve(f + 0.3 * torch.eye(15), v))


# Weights that are also used outside linear layers have no Kronecker factors.
TIED = {"tied": {"token_embedding.weight"}, "autoencoder": {"weight"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_factors_of_any_model_equal_the_loop_over_single_examples(name):
    model, x = make(name)
    columns = softmax_scores(model.eval()(x).detach())
    squares = mean_of(model, x, columns, squared_size)
    expected_factors = {}
    order = torch.tensor([4, 1, 6, 0, 2, 5, 3])
    for data, chunk in ((x, 1), (x, 2), (x, 3), (x, 7), (x[order], 1), (x[order], 2), (x[order], 3), (x[order], 7)):
        form = fisher(model, data, structure="kronecker", chunk=chunk)
        expected_factors = expected_factors or kronecker_factors(model, x, columns, set(form.biases))
        assert set(form.layers) == set(expected_factors) - TIED.get(name, set())
        for weight, pairs in form.layers.items():
            assert len(pairs) == 1
            for factor, expected_factor in zip(pairs[0], expected_factors[weight], strict=True):
                torch.testing.assert_close(
                    factor, expected_factor, rtol=1e-9, atol=1e-12, msg=lambda m, w=weight: f"{w}: {m}"
                )
        assert set(form.rest.values) == set(squares) - set(form.layers) - set(form.biases.values())
        for n, value in form.rest.values.items():
            torch.testing.assert_close(value, squares[n], rtol=1e-9, atol=1e-14)


def test_row_major_is_g_times_a_and_column_major_a_times_g():
    form = random_form()
    a, g = form.layers["w"][0]
    d = with_bias(DELTA["w"], DELTA["b"])
    torch.testing.assert_close(d.t().flatten() @ torch.kron(a, g) @ d.t().flatten(), form.quad(DELTA))


def test_factored_damping_damps_both_factors():
    form = random_form()
    a, g = form.layers["w"][0]
    pi = ((a.trace() / 5) / (g.trace() / 3)).sqrt()
    damped = torch.kron(g + 0.3**0.5 / pi * torch.eye(3), a + 0.3**0.5 * pi * torch.eye(5))
    torch.testing.assert_close(vector(form.solve(DELTA, 0.3, "factored")), torch.linalg.solve(damped, vector(DELTA)))


def test_the_gradient_of_the_form():
    form = random_form()
    delta = {n: v.clone().requires_grad_() for n, v in DELTA.items()}
    (0.5 * form.quad(delta)).backward()
    a, g = form.layers["w"][0]
    d = with_bias(DELTA["w"], DELTA["b"])
    torch.testing.assert_close(with_bias(delta["w"].grad, delta["b"].grad), g @ d @ a)


def test_adding_a_form_n_times_multiplies_it_by_n():
    form = random_form()
    total = form + form + form
    assert len(total.layers["w"]) == 3
    torch.testing.assert_close(total.quad(DELTA), 3 * form.quad(DELTA))
    torch.testing.assert_close((0.5 * form).quad(DELTA), 0.5 * form.quad(DELTA))


def test_state_round_trip():
    form = random_form(terms=2)
    other = Kronecker()
    form.rest.values["n"] = torch.ones(2)
    other.load_state_dict(form.state_dict())
    torch.testing.assert_close(other.quad({**DELTA, "n": torch.ones(2)}), form.quad({**DELTA, "n": torch.ones(2)}))


def test_the_form_of_one_example_is_its_exact_fisher_block():
    """For a single example the Kronecker product of a linear layer is its exact Fisher block."""
    model, x = make("mlp")
    example = x[:1]
    expected = full_fisher(model.eval(), example, softmax_scores(model(example).detach()))
    form = fisher(model, example, structure="kronecker")
    a, g = form.layers["5.weight"][0]
    head_indices = [*range(4 * 6 + 6 + 6 * 5 + 5, expected.shape[0])]
    block = expected[head_indices][:, head_indices]  # weights row by row, then biases
    row_indices = [[*range(5 * c, 5 * c + 5), 15 + c] for c in range(3)]
    order = [i for row in row_indices for i in row]
    torch.testing.assert_close(torch.kron(g, a), block[order][:, order])
    for n, v in form.diagonal().items():
        torch.testing.assert_close(v, fisher(model, example).values[n])


def test_gaussian_linear_regression_is_exact_for_many_examples():
    model = nn.Linear(4, 2)
    x = torch.randn(30, 4)
    form = fisher(model, x, structure="kronecker", likelihood=Gaussian())
    a, g = form.layers["weight"][0]
    ones = torch.cat([x, torch.ones(30, 1)], 1)
    torch.testing.assert_close(a, ones.t() @ ones / 30)
    torch.testing.assert_close(g, torch.eye(2))
    assert a.trace().item() == pytest.approx((x.square().sum(1).mean() + 1).item())


def test_a_pointwise_convolution_is_a_linear_layer():
    conv = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    linear = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    linear[0].weight.data = conv[0].weight.data.flatten(1)
    linear[0].bias.data = conv[0].bias.data
    linear[3].load_state_dict(conv[3].state_dict())
    x = torch.randn(9, 4)
    conv_factors = fisher(conv, x[:, :, None, None], structure="kronecker").layers["0.weight"][0]
    linear_factors = fisher(linear, x, structure="kronecker").layers["0.weight"][0]
    for a, b in zip(conv_factors, linear_factors, strict=True):
        torch.testing.assert_close(a, b)


def test_factors_are_symmetric_and_positive():
    model, x = make("cnn")
    form = fisher(model.eval(), x, structure="kronecker")
    assert set(form.rest.values) == {"0.1.weight", "0.1.bias", "1.1.weight", "1.1.bias"}
    for pairs in form.layers.values():
        for factor in pairs[0]:
            torch.testing.assert_close(factor, factor.t())
            assert torch.linalg.eigvalsh(factor).min() > -1e-12


def test_a_rotation_of_the_inputs_changes_the_diagonal_but_not_the_form():
    model = nn.Linear(4, 3, bias=False)
    x = torch.randn(20, 4)
    rotation = torch.linalg.qr(torch.randn(4, 4)).Q
    rotated = nn.Linear(4, 3, bias=False)
    rotated.weight.data = model.weight.data @ rotation.t()
    delta = torch.randn(3, 4)
    for structure, is_invariant in (("kronecker", True), ("diagonal", False)):
        before = fisher(model, x, structure=structure).quad({"weight": delta})
        after = fisher(rotated, x @ rotation.t(), structure=structure).quad({"weight": delta @ rotation.t()})
        assert torch.allclose(before, after) == is_invariant


@pytest.mark.parametrize("labels", ["exact", "true"])
def test_factors_equal_their_definition(labels):
    """benchmarks/peers.py compares with an independent library as well."""
    for model, x in (
        (nets.mlp(5, 3, hidden=(6,)), torch.randn(12, 5)),
        (nets.cnn((2, 6, 6), 3, channels=(3, 4), norm=False), torch.randn(12, 2, 6, 6)),
    ):
        y = torch.randint(3, (12,))
        outputs = model(x).detach()
        true_label_scores = [outputs.softmax(-1) - nn.functional.one_hot(y, 3)]
        weights = {n for n, _ in model.named_parameters() if n.endswith("weight")}  # each of which has a bias
        factors = kronecker_factors(
            model, x, true_label_scores if labels == "true" else softmax_scores(outputs), weights
        )
        form = fisher(model, (x, y), labels, structure="kronecker")
        assert set(factors) == set(form.layers) == set(form.biases) == weights and not form.rest.values
        for weight, (inputs, output_gradients) in factors.items():
            torch.testing.assert_close(form.layers[weight][0].inputs, inputs)
            torch.testing.assert_close(form.layers[weight][0].outputs, output_gradients)


def test_the_full_form_equals_its_definition():
    model = nets.mlp(5, 3, hidden=(6,))
    x = torch.randn(12, 5)
    expected = full_fisher(model, x, softmax_scores(model(x).detach()))
    torch.testing.assert_close(fisher(model, x, structure="full").dense(), expected, rtol=1e-8, atol=1e-12)


class SharedBias(nn.Module):
    """A tied embedding whose output layer has a bias, and one bias shared by two weights."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(6, 4)
        self.bias = nn.Parameter(torch.randn(6))
        self.first_weight = nn.Parameter(torch.randn(4, 4))
        self.second_weight = nn.Parameter(torch.randn(4, 4))
        self.shared_bias = nn.Parameter(torch.randn(4))

    def forward(self, t):
        h = nn.functional.linear(self.token_embedding(t).mean(1), self.first_weight, self.shared_bias).tanh()
        h = nn.functional.linear(h, self.second_weight, self.shared_bias).tanh()
        return nn.functional.linear(h, self.token_embedding.weight, self.bias)


def test_a_shared_bias_has_a_diagonal_importance():
    model = SharedBias()
    t = torch.randint(6, (9, 3))
    form = fisher(model, t, structure="kronecker")
    expected = fisher(model, t).values
    assert set(form.layers) == {"first_weight", "second_weight"} and form.biases == {}
    for name in ("bias", "shared_bias", "token_embedding.weight"):
        torch.testing.assert_close(form.rest.values[name], expected[name])


def test_a_missing_weight_counts_as_zero():
    form = random_form()
    bias = {"b": DELTA["b"]}
    zero = {"w": torch.zeros(3, 4), **bias}
    torch.testing.assert_close(form.quad(bias), form.quad(zero))
    torch.testing.assert_close(form.solve(bias, 0.3)["b"], form.solve(zero, 0.3)["b"])
    assert form.solve({}, 0.3) == {}


def test_running_average_of_the_factors():
    first = random_form()
    second = random_form()
    mixed = first.average_with(second, 0.8).layers["w"][0]
    for actual, a, b in zip(mixed, first.layers["w"][0], second.layers["w"][0], strict=True):
        torch.testing.assert_close(actual, 0.8 * a + 0.2 * b)


def test_running_average_with_an_empty_form():
    first = random_form()
    second = random_form()
    for previous, update, factor in ((first, Kronecker(), 0.8), (Kronecker(), second, 0.2)):
        mixed = previous.average_with(update, 0.8)
        nonempty = previous if previous.layers else update
        torch.testing.assert_close(mixed.quad(DELTA), factor * nonempty.quad(DELTA))
        assert len(mixed.layers["w"]) == 1 and mixed.biases == {"w": "b"}


def test_factors_and_diagonal_of_one_layer_are_solved_jointly():
    form = random_form()
    form.rest = Diagonal({"b": torch.rand(3)})
    squares = {"w": torch.zeros(3, 4), **form.rest.values}
    expected = torch.linalg.solve(dense(form) + torch.diag(vector(squares)) + 0.3 * torch.eye(15), vector(DELTA))
    torch.testing.assert_close(vector(form.solve(DELTA, 0.3)), expected)


def test_processes_with_examples_of_different_experts(run_two_processes):
    """The factors are those of a single process when each process has the examples of another expert."""
    model, _ = make("experts")
    x = torch.randn(40, 4)
    top_expert = model.gate(x).argmax(1)
    x = torch.cat([torch.stack([a, b]) for a, b in zip(x[top_expert == 0][:4], x[top_expert == 1][:4], strict=True)])

    def estimate():
        return fisher(model, x, structure="kronecker", chunk=2).state_dict()

    expected = estimate()
    for actual in run_two_processes(estimate):
        assert set(actual["layers"]) == set(expected["layers"]) and len(expected["layers"]) == 3
        for weight, pairs in expected["layers"].items():
            for factor, expected_factor in zip(actual["layers"][weight][0], pairs[0], strict=True):
                torch.testing.assert_close(factor, expected_factor)


def test_the_diagonal_has_the_shapes_of_the_parameters():
    model, x = make("cnn")
    for n, v in fisher(model.eval(), x, structure="kronecker").diagonal().items():
        assert v.shape == dict(model.named_parameters())[n].shape
