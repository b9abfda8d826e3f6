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
    def psd(n):
        r = torch.randn(n, 2 * n)
        return r @ r.t() / n

    pairs = [Pair(psd(inputs + 1), psd(outputs)) for _ in range(terms)]
    return Kronecker({"w": pairs}, {"w": "b"})


def dense(form):
    return sum(torch.kron(g, a) for a, g in form.layers["w"])


def vector(delta):
    return with_bias(delta["w"], delta["b"]).flatten()


DELTA = {"w": torch.randn(3, 4, dtype=torch.double), "b": torch.randn(3, dtype=torch.double)}


@pytest.mark.parametrize("terms", [1, 3])
def test_the_form_is_the_kronecker_product(terms):
    form = random_form(terms=terms)
    f, v = dense(form), vector(DELTA)
    torch.testing.assert_close(form.quad(DELTA), v @ f @ v)
    assert form.trace() == pytest.approx(float(f.trace()))
    torch.testing.assert_close(vector(form.diagonal()), f.diagonal())
    torch.testing.assert_close(vector(form.solve(DELTA, 0.3)), torch.linalg.solve(f + 0.3 * torch.eye(15), v))


TIED = {"tied": {"words.weight"}, "autoencoder": {"weight"}}  # used in other ways too, so that they have no factors


@pytest.mark.parametrize("name", list(MODELS))
def test_factors_of_any_model_are_those_of_every_example_alone(name):
    model, x = make(name)
    columns = softmax_scores(model.eval()(x).detach())
    squares = mean_of(model, x, columns, squared_size)
    right = {}
    order = torch.tensor([4, 1, 6, 0, 2, 5, 3])
    for data, chunk in ((x, 1), (x, 2), (x, 3), (x, 7), (x[order], 1), (x[order], 2), (x[order], 3), (x[order], 7)):
        form = fisher(model, data, structure="kronecker", chunk=chunk)
        right = right or kronecker_factors(model, x, columns, set(form.biases))
        assert set(form.layers) == set(right) - TIED.get(name, set())
        for weight, pairs in form.layers.items():
            assert len(pairs) == 1
            for factor, truth in zip(pairs[0], right[weight], strict=True):
                torch.testing.assert_close(factor, truth, rtol=1e-9, atol=1e-12, msg=lambda m, w=weight: f"{w}: {m}")
        assert set(form.rest.values) == set(squares) - set(form.layers) - set(form.biases.values())
        for n, value in form.rest.values.items():
            torch.testing.assert_close(value, squares[n], rtol=1e-9, atol=1e-14)


def test_row_major_is_g_times_a_and_column_major_a_times_g():
    form = random_form()
    (a, g) = form.layers["w"][0]
    d = with_bias(DELTA["w"], DELTA["b"])
    torch.testing.assert_close(d.t().flatten() @ torch.kron(a, g) @ d.t().flatten(), form.quad(DELTA))


def test_factored_damping_is_another_matrix():
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


def test_sums_keep_lists_so_identical_tasks_count_as_often_as_they_are():
    form = random_form()
    total = form + form + form
    assert len(total.layers["w"]) == 3
    torch.testing.assert_close(total.quad(DELTA), 3 * form.quad(DELTA))
    torch.testing.assert_close((0.5 * form).quad(DELTA), 0.5 * form.quad(DELTA))


def test_state_round_trip():
    form, other = random_form(terms=2), Kronecker()
    form.rest.values["n"] = torch.ones(2)
    other.load_state_dict(form.state_dict())
    torch.testing.assert_close(other.quad({**DELTA, "n": torch.ones(2)}), form.quad({**DELTA, "n": torch.ones(2)}))


def test_one_example_is_exact():
    """For a single example the Kronecker product of a linear layer is its exact Fisher block."""
    model, x = make("mlp")
    one = x[:1]
    right = full_fisher(model.eval(), one, softmax_scores(model(one).detach()))
    form = fisher(model, one, structure="kronecker")
    a, g = form.layers["5.weight"][0]
    last = [*range(4 * 6 + 6 + 6 * 5 + 5, right.shape[0])]
    block = right[last][:, last]  # weights row by row, then biases
    places = [[*range(5 * c, 5 * c + 5), 15 + c] for c in range(3)]
    order = [i for row in places for i in row]
    torch.testing.assert_close(torch.kron(g, a), block[order][:, order])
    for n, v in form.diagonal().items():
        torch.testing.assert_close(v, fisher(model, one).values[n])


def test_gaussian_linear_regression_is_exact_for_any_number():
    model, x = nn.Linear(4, 2), torch.randn(30, 4)
    form = fisher(model, x, structure="kronecker", likelihood=Gaussian())
    a, g = form.layers["weight"][0]
    ones = torch.cat([x, torch.ones(30, 1)], 1)
    torch.testing.assert_close(a, ones.t() @ ones / 30)
    torch.testing.assert_close(g, torch.eye(2))
    assert a.trace().item() == pytest.approx((x.square().sum(1).mean() + 1).item())


def test_a_pointwise_convolution_is_a_linear_layer():
    conv = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    linear = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    linear[0].weight.data, linear[0].bias.data = conv[0].weight.data.flatten(1), conv[0].bias.data
    linear[3].load_state_dict(conv[3].state_dict())
    x = torch.randn(9, 4)
    one = fisher(conv, x[:, :, None, None], structure="kronecker").layers["0.weight"][0]
    two = fisher(linear, x, structure="kronecker").layers["0.weight"][0]
    for a, b in zip(one, two, strict=True):
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
    model, x = nn.Linear(4, 3, bias=False), torch.randn(20, 4)
    q = torch.linalg.qr(torch.randn(4, 4)).Q
    turned = nn.Linear(4, 3, bias=False)
    turned.weight.data = model.weight.data @ q.t()
    delta = torch.randn(3, 4)
    for structure, same in (("kronecker", True), ("diagonal", False)):
        before = fisher(model, x, structure=structure).quad({"weight": delta})
        after = fisher(turned, x @ q.t(), structure=structure).quad({"weight": delta @ q.t()})
        assert torch.allclose(before, after) == same


@pytest.mark.parametrize("labels", ["exact", "true"])
def test_factors_are_those_of_their_definition(labels):
    """Also a library that we did not write agrees with ours: benchmarks/peers.py."""
    for model, x in (
        (nets.mlp(5, 3, hidden=(6,)), torch.randn(12, 5)),
        (nets.cnn((2, 6, 6), 3, channels=(3, 4), norm=False), torch.randn(12, 2, 6, 6)),
    ):
        y = torch.randint(3, (12,))
        outputs = model(x).detach()
        true = [outputs.softmax(-1) - nn.functional.one_hot(y, 3)]
        weights = {n for n, _ in model.named_parameters() if n.endswith("weight")}  # each of which has a bias
        factors = kronecker_factors(model, x, true if labels == "true" else softmax_scores(outputs), weights)
        form = fisher(model, (x, y), labels, structure="kronecker")
        assert set(factors) == set(form.layers) == set(form.biases) == weights and not form.rest.values
        for weight, (inputs, gradients) in factors.items():
            torch.testing.assert_close(form.layers[weight][0].inputs, inputs)
            torch.testing.assert_close(form.layers[weight][0].outputs, gradients)


def test_the_full_form_is_that_of_its_definition():
    model, x = nets.mlp(5, 3, hidden=(6,)), torch.randn(12, 5)
    right = full_fisher(model, x, softmax_scores(model(x).detach()))
    torch.testing.assert_close(fisher(model, x, structure="full").dense(), right, rtol=1e-8, atol=1e-12)


class Shares(nn.Module):
    """A tied table with a bias of its own, and one bias under two weights."""

    def __init__(self):
        super().__init__()
        self.words, self.bias = nn.Embedding(6, 4), nn.Parameter(torch.randn(6))
        self.v, self.w, self.both = (
            nn.Parameter(torch.randn(4, 4)),
            nn.Parameter(torch.randn(4, 4)),
            nn.Parameter(torch.randn(4)),
        )

    def forward(self, t):
        h = nn.functional.linear(self.words(t).mean(1), self.v, self.both).tanh()
        h = nn.functional.linear(h, self.w, self.both).tanh()
        return nn.functional.linear(h, self.words.weight, self.bias)


def test_a_bias_without_a_layer_of_its_own_keeps_its_diagonal():
    model, t = Shares(), torch.randint(6, (9, 3))
    form, right = fisher(model, t, structure="kronecker"), fisher(model, t).values
    assert set(form.layers) == {"v", "w"} and form.biases == {}
    for name in ("bias", "both", "words.weight"):
        torch.testing.assert_close(form.rest.values[name], right[name])


def test_parts_of_a_layer():
    form, bias = random_form(), {"b": DELTA["b"]}
    zero = {"w": torch.zeros(3, 4), **bias}
    torch.testing.assert_close(form.quad(bias), form.quad(zero))
    torch.testing.assert_close(form.solve(bias, 0.3)["b"], form.solve(zero, 0.3)["b"])
    assert form.solve({}, 0.3) == {}


def test_running_average_of_the_factors():
    one, two = random_form(), random_form()
    mixed = one.average_with(two, 0.8).layers["w"][0]
    for found, a, b in zip(mixed, one.layers["w"][0], two.layers["w"][0], strict=True):
        torch.testing.assert_close(found, 0.8 * a + 0.2 * b)


def test_a_running_average_with_a_layer_that_only_one_of_them_met():
    one, two = random_form(), random_form()
    for own, new, share in ((one, Kronecker(), 0.8), (Kronecker(), two, 0.2)):
        mixed, met = own.average_with(new, 0.8), own if own.layers else new
        torch.testing.assert_close(mixed.quad(DELTA), share * met.quad(DELTA))
        assert len(mixed.layers["w"]) == 1 and mixed.biases == {"w": "b"}


def test_factors_and_a_diagonal_of_one_layer_are_solved_together():
    form = random_form()
    form.rest = Diagonal({"b": torch.rand(3)})
    squares = {"w": torch.zeros(3, 4), **form.rest.values}
    right = torch.linalg.solve(dense(form) + torch.diag(vector(squares)) + 0.3 * torch.eye(15), vector(DELTA))
    torch.testing.assert_close(vector(form.solve(DELTA, 0.3)), right)


def test_processes_that_met_other_experts(two):
    """One process has the examples of one expert, the other those of another: the factors are those of one process."""
    model, _ = make("experts")
    x = torch.randn(40, 4)
    best = model.gate(x).argmax(1)
    x = torch.cat([torch.stack([a, b]) for a, b in zip(x[best == 0][:4], x[best == 1][:4], strict=True)])

    def measure():
        return fisher(model, x, structure="kronecker", chunk=2).state_dict()

    alone = measure()
    for found in two(measure):
        assert set(found["layers"]) == set(alone["layers"]) and len(alone["layers"]) == 3
        for weight, pairs in alone["layers"].items():
            for factor, truth in zip(found["layers"][weight][0], pairs[0], strict=True):
                torch.testing.assert_close(factor, truth)


def test_the_diagonal_has_the_parameters_shapes():
    model, x = make("cnn")
    for n, v in fisher(model.eval(), x, structure="kronecker").diagonal().items():
        assert v.shape == dict(model.named_parameters())[n].shape
