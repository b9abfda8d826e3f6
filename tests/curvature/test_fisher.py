import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everlearn import Bernoulli, Categorical, Gaussian, Method, Task, nets, streams, train
from everlearn.curvature import fisher, from_adam, sensitivity
from tests.models import MODELS, make
from tests.reference import full_fisher, mean_of, softmax_scores, squared_size

N = 40
C = 4
D = 3


pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def linear():
    """A softmax model f = W x + b, whose Fisher information has a closed form."""
    torch.manual_seed(3)
    model = nn.Linear(D, C)
    x = torch.randn(N, D)
    y = torch.randint(C, (N,))
    return model, x, y, model(x).softmax(1).detach()


def test_exact_diagonal_of_the_softmax_model(linear):
    model, x, _, p = linear
    f = fisher(model, x).values
    torch.testing.assert_close(f["weight"], torch.einsum("nc,ni->ci", p * (1 - p), x**2) / N)
    torch.testing.assert_close(f["bias"], (p * (1 - p)).mean(0))


def test_empirical_diagonal_of_the_softmax_model(linear):
    model, x, y, p = linear
    r = (p - F.one_hot(y, C)) ** 2
    torch.testing.assert_close(
        fisher(model, (x, y), labels="true").values["weight"], torch.einsum("nc,ni->ci", r, x**2) / N
    )


def test_full_fisher_is_the_hessian_of_the_softmax_model(linear):
    model, x, y, p = linear
    f = fisher(model, x, structure="full").dense()
    s = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    ones = torch.cat([x, torch.ones(N, 1)], 1)
    blocks = torch.einsum("ncd,ni,nj->cidj", s, ones, ones) / N
    w = blocks[:, :D, :, :D].reshape(C * D, C * D)
    torch.testing.assert_close(f[: C * D, : C * D], w)
    torch.testing.assert_close(f[C * D :, C * D :], blocks[:, D, :, D])

    def loss(weight):
        return F.cross_entropy(x @ weight.view(C, D).t() + model.bias, y)

    torch.testing.assert_close(
        f[: C * D, : C * D], torch.autograd.functional.hessian(loss, model.weight.detach().flatten())
    )


def test_the_expected_score_is_zero(linear):
    model, x, _, p = linear
    scores = [Categorical().residual(model(x).detach(), torch.full((N,), c)) for c in range(C)]
    assert sum(p[:, c : c + 1] * scores[c] for c in range(C)).abs().max() < 1e-15


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_exact_labels_equal_the_sum_over_classes_on_any_model(name):
    model, x = make(name)
    model.eval()
    expected = mean_of(model, x, softmax_scores(model(x).detach()), squared_size)
    order = torch.tensor([4, 1, 6, 0, 2, 5, 3])
    for data, chunk in ((x, 3), (x[order], 2), (x[order], 7)):
        actual = fisher(model, data, chunk=chunk).values
        assert set(actual) == set(expected)
        for n, value in expected.items():
            torch.testing.assert_close(actual[n], value, rtol=1e-9, atol=1e-14, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["signs", "sample"])
def test_random_estimates_converge_to_the_exact_one(labels, linear):
    model, x, _, _ = linear
    exact = fisher(model, x).values["weight"]
    many_draws = fisher(model, x, labels=labels, samples=5000).values["weight"]
    assert (many_draws - exact).norm() / exact.norm() < 0.03
    single_draw = fisher(model, x, labels=labels).values["weight"]
    assert not torch.allclose(single_draw, exact, rtol=1e-3), "a single draw is noisy"
    assert torch.equal(single_draw, fisher(model, x, labels=labels).values["weight"]), "and reproducible"
    assert not torch.equal(single_draw, fisher(model, x, labels=labels, seed=1).values["weight"])


def test_signs_are_less_noisy_than_samples_on_a_trained_model():
    torch.set_default_dtype(torch.float)
    task = streams.digits("class").joint()[0]
    torch.manual_seed(0)
    model = nets.mlp(64, 10, hidden=(32,))
    train(model, Method(), task, epochs=20, batch_size=32)
    exact = fisher(model, task)

    def relative_error(labels):
        actual = fisher(model, task, labels=labels)
        squared_error = sum((actual.values[n] - v).square().sum() for n, v in exact.values.items())
        squared_norm = sum(v.square().sum() for v in exact.values.values())
        return float((squared_error / squared_norm).sqrt())

    assert relative_error("signs") < 0.5 * relative_error("sample")


def test_predicted_labels_differ_from_exact_ones(linear):
    model, x, _, p = linear
    actual = fisher(model, x, labels="predicted").values["bias"]
    torch.testing.assert_close(actual, ((p - F.one_hot(p.argmax(1), C)) ** 2).mean(0))
    assert not torch.allclose(actual, fisher(model, x).values["bias"], rtol=0.1)


@pytest.mark.parametrize("labels", ["exact", "true", "predicted"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_chunks_order_and_repetition_do_not_matter(labels, structure, linear):
    model, x, y, _ = linear
    expected = fisher(model, (x, y), labels, structure).diagonal()["weight"]
    order = torch.randperm(N)
    for data, chunk in (((x, y), 7), ((x[order], y[order]), 256), ((torch.cat([x, x]), torch.cat([y, y])), 16)):
        torch.testing.assert_close(fisher(model, data, labels, structure, chunk=chunk).diagonal()["weight"], expected)


def test_dead_units_and_masked_outputs_have_zero_importance():
    model = nets.mlp(3, 4, hidden=(5,))
    with torch.no_grad():
        model[1].weight[2] = 0.0
        model[1].bias[2] = -1.0
    f = fisher(model, torch.randn(20, 3)).values
    assert (f["1.weight"][2] == 0).all() and f["1.bias"][2] == 0 and (f["1.weight"] >= 0).all()
    table = torch.tensor([[True, True, False, False], [False, False, True, True]])
    task = Task(torch.randn(20, 3), id=0, allowed=table)
    f = fisher(model, task).values
    assert (f["3.weight"][2:] == 0).all() and (f["3.weight"][:2, [0, 1, 3, 4]] > 0).all()


@pytest.mark.parametrize("labels", ["exact", "signs", "sample", "true", "predicted"])
def test_masked_head_equals_narrow_head(labels):
    """A masked wide head has the Fisher information of the narrow head with the allowed classes."""
    wide = nn.Linear(3, 5)
    x = torch.randn(30, 3)
    y = torch.randint(2, (30,))
    narrow = nn.Linear(3, 2)
    with torch.no_grad():
        narrow.weight.copy_(wide.weight[:2])
        narrow.bias.copy_(wide.bias[:2])
    table = torch.tensor([[True, True, False, False]])
    is_random = labels in ("signs", "sample")
    task = Task((x, y), id=0, allowed=table)
    actual = fisher(wide, task, labels, samples=200 if is_random else 1)
    expected = fisher(narrow, (x, y), labels if labels in ("true", "predicted") else "exact")
    rtol = 0.1 if is_random else 1e-9
    torch.testing.assert_close(actual.values["weight"][:2], expected.values["weight"], rtol=rtol, atol=1e-12)
    assert (actual.values["weight"][2:] == 0).all()


def test_an_lstm_in_single_precision():
    """The two biases of an LSTM share a gradient tensor, which must not be squared twice."""
    torch.set_default_dtype(torch.float)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 6, batch_first=True)
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    model = Last()
    x = torch.randn(20, 7, 5)
    expected = mean_of(model, x, softmax_scores(model(x).detach()), torch.square)
    for n, v in fisher(model, x).values.items():
        torch.testing.assert_close(v, expected[n], rtol=1e-3, atol=1e-7)


def test_ignored_and_out_of_range_labels(linear):
    model, x, y, _ = linear
    ignored = torch.where(y == 0, -100, y)
    for structure in ("diagonal", "kronecker", "full"):
        for labels in ("exact", "true"):
            expected = fisher(model, (x[y != 0], y[y != 0]), labels, structure).trace()
            assert fisher(model, (x, ignored), labels, structure, chunk=3).trace() == pytest.approx(expected)
    with pytest.raises(ValueError, match="all its labels are ignored"):
        fisher(model, (x, torch.full_like(y, -100)))
    for wrong_labels, advice in (
        (y - 1, "number the labels from 0, and give -100"),
        (y + 5, "build it with more outputs"),
    ):
        with pytest.raises(ValueError, match=f"but the model has (only )?4 outputs .*{advice}"):
            fisher(model, (x, wrong_labels), labels="true")
    with pytest.raises(ValueError, match="One output is no choice"):
        fisher(nn.Linear(D, 1), x)


def test_unlabelled_datasets(linear):
    model, x, _, _ = linear
    data = torch.utils.data.TensorDataset(x)
    for d in (data, torch.utils.data.DataLoader(data, batch_size=7)):
        torch.testing.assert_close(fisher(model, d).values["weight"], fisher(model, x).values["weight"])


def test_a_single_allowed_class_has_zero_importance():
    model = nn.Linear(3, 2)
    task = Task(torch.randn(5, 3), id=0, allowed=torch.tensor([[True, False]]))
    for structure in ("diagonal", "kronecker", "full"):
        assert fisher(model, task, structure=structure).trace() == 0


def test_very_confident_predictions_stay_accurate():
    torch.set_default_dtype(torch.float)
    model = nn.Linear(2, 3, bias=False)
    model.weight.data = torch.tensor([[60.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    f = fisher(model, torch.tensor([[1.0, 0.5]])).values["weight"]
    exact = 2 * torch.exp(torch.tensor(-60.0, dtype=torch.double))
    torch.testing.assert_close(f[0, 0].double(), exact, rtol=1e-4, atol=0)


def test_gaussian_and_bernoulli():
    model = nn.Linear(3, 2)
    x = torch.randn(50, 3)
    exact = fisher(model, x, likelihood=Gaussian(variance=0.5)).values
    torch.testing.assert_close(exact["weight"], (2 * (x**2).mean(0)).expand(2, 3))
    torch.testing.assert_close(
        fisher(model, x, likelihood=Gaussian(0.5), labels="signs", samples=3).values["bias"], exact["bias"]
    )
    p = model(x).sigmoid().detach()
    exact = fisher(model, x, likelihood=Bernoulli()).values
    torch.testing.assert_close(exact["weight"], torch.einsum("nc,ni->ci", p * (1 - p), x**2) / 50)
    for labels in ("signs", "sample"):
        sampled = fisher(model, x, likelihood=Bernoulli(), labels=labels, samples=3000).values["weight"]
        assert (sampled - exact["weight"]).norm() / exact["weight"].norm() < 0.05
    y = (torch.rand(50, 2) > 0.5).double()
    squared_residuals = (p - y) ** 2
    task = Task((x, y), likelihood=Bernoulli())
    assert torch.equal(
        fisher(model, (x, y), "true", likelihood=Bernoulli()).values["bias"], fisher(model, task, "true").values["bias"]
    )
    torch.testing.assert_close(fisher(model, task, labels="true").values["bias"], squared_residuals.mean(0))
    with pytest.raises(ValueError, match="most likely target is the output itself"):
        fisher(model, x, likelihood=Gaussian(), labels="predicted")


class LanguageModel(nn.Module):
    """A language model: a distribution over tokens at every position."""

    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, t):
        return self.head(torch.tanh(self.token_embedding(t)).cumsum(1))


def test_sequences_are_weighted_by_token():
    torch.manual_seed(0)
    model = LanguageModel()
    t = torch.randint(5, (6, 4))
    y = torch.randint(5, (6, 4))
    y[0, 2:] = -100
    outputs = model(t).detach()
    columns = []
    for position in range(4):
        for column in softmax_scores(outputs[:, position]):
            score = torch.zeros_like(outputs)
            score[:, position] = column * (y[:, position] != -100)[:, None]
            columns.append(score)
    examples_per_label = 6 / int((y != -100).sum())  # the loss is a mean over labels
    expected = {n: examples_per_label * value for n, value in mean_of(model, t, columns, torch.square).items()}
    actual = fisher(model, (t, y)).values
    for n, value in expected.items():
        torch.testing.assert_close(actual[n], value)
    sampled = fisher(model, (t, y), labels="signs", samples=4000).values["head.weight"]
    assert (sampled - expected["head.weight"]).norm() / expected["head.weight"].norm() < 0.03
    empirical = fisher(model, (t, y), labels="true").values["head.bias"]
    residuals = (outputs.softmax(-1) - F.one_hot(y.clamp(min=0), 5)) * (y != -100)[..., None]
    torch.testing.assert_close(empirical, examples_per_label * residuals.sum(1).square().mean(0))


def test_the_fisher_information_of_tokens_is_the_curvature_of_the_loss():
    """For outputs linear in the parameters, the Fisher information is the Hessian of the mean cross-entropy."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    t = torch.randn(5, 6, 3)
    y = torch.randint(4, (5, 6))
    y[1, 2:] = -100
    y[3] = -100

    def loss(weight, bias):
        return F.cross_entropy(F.linear(t, weight, bias).flatten(0, 1), y.flatten())

    hessian = torch.autograd.functional.hessian(loss, (model.weight.detach(), model.bias.detach()))
    sizes = (12, 4)
    block_rows = []
    for row, num_rows in zip(hessian, sizes, strict=True):
        blocks = [block.reshape(num_rows, num_columns) for block, num_columns in zip(row, sizes, strict=True)]
        block_rows.append(torch.cat(blocks, 1))
    expected = torch.cat(block_rows)
    full = fisher(model, (t, y), structure="full")
    torch.testing.assert_close(full.matrix if full.matrix is not None else full.rows.t() @ full.rows, expected)
    torch.testing.assert_close(fisher(model, (t, y)).values["bias"], expected.diagonal()[12:])
    all_labels = y.clamp(min=0)
    torch.testing.assert_close(fisher(model, t).values["weight"], fisher(model, (t, all_labels)).values["weight"])
    constant = t[:1, :1].expand_as(t)
    step = {"weight": torch.randn(4, 3), "bias": torch.randn(4)}
    quads = [fisher(model, (constant, y), structure=s).quad(step) for s in ("full", "kronecker")]
    torch.testing.assert_close(*quads)  # exact when all inputs are equal


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("complex", "bert")])
def test_full_equals_the_outer_products(name):
    model, x = make(name)
    expected = full_fisher(model.eval(), x, softmax_scores(model(x).detach()))
    for data, chunk in ((x, None), (x.flip(0), 3)):
        actual = fisher(model, data, structure="full", chunk=chunk)
        torch.testing.assert_close(actual.dense(), expected, rtol=1e-9, atol=1e-14)


def test_the_diagonal_of_the_full_form_equals_the_diagonal_form(linear):
    model, x, _, _ = linear
    full = fisher(model, x, structure="full")
    diagonal = fisher(model, x)
    for n, v in full.diagonal().items():
        torch.testing.assert_close(v, diagonal.values[n])
    assert full.trace() == pytest.approx(diagonal.trace())


def test_the_empirical_fisher_of_one_example_is_its_squared_gradient():
    model, x = make("mlp")
    y = torch.tensor([1])
    F.cross_entropy(model(x[:1]), y).backward()
    actual = fisher(model, (x[:1], y), labels="true").values
    for n, p in model.named_parameters():
        torch.testing.assert_close(actual[n], p.grad**2)


def test_from_adam_returns_second_moments():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.99))
    x = torch.randn(64, 3)
    y = torch.randint(2, (64,))
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(from_adam(model, optimizer).values["weight"], model.weight.grad**2)
    heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    groups = [{"params": heads[0].parameters(), "alpha": 0.9}, {"params": heads[1].parameters()}]
    optimizer = torch.optim.RMSprop(groups, lr=0.0)
    F.cross_entropy(heads[0](x), y).backward()
    optimizer.step()
    actual = from_adam(heads, optimizer).values
    torch.testing.assert_close(actual["0.weight"], heads[0].weight.grad ** 2)
    assert not actual["1.weight"].any(), "a head that was never trained has no second moments"
    with pytest.raises(ValueError, match="SGD holds no second moments of this model"):
        from_adam(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"labels": "exactly"},
            "labels: got 'exactly', allowed: 'auto', 'exact', 'signs', 'sample', 'predicted', 'true'",
        ),
        ({"structure": "block"}, "structure: got 'block', allowed: 'diagonal', 'kronecker', 'full'"),
        ({"samples": 0}, "at least 1"),
        ({"data": torch.zeros(0, D)}, "no examples"),
        ({"labels": "true"}, "no labels"),
    ],
)
def test_wrong_arguments(arguments, message, linear):
    model, x, _, _ = linear
    with pytest.raises(ValueError, match=message):
        fisher(model, **{"data": x, **arguments})


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_half_precision_models_have_sums_in_float32(structure):
    torch.manual_seed(0)
    model = nets.mlp(4, 3, hidden=(6,))
    x = torch.randn(3000, 4)
    expected = fisher(model, x, structure=structure).diagonal()
    half = copy.deepcopy(model).bfloat16()
    actual = fisher(half, x.bfloat16(), structure=structure).diagonal()
    for n, v in expected.items():
        assert actual[n].dtype == torch.float32
        assert (actual[n] - v).norm() / v.norm() < 0.05


def test_weights_and_gradients_are_unchanged(linear):
    model, x, y, _ = linear
    initial_state = copy.deepcopy(model.state_dict())
    model.weight.grad = torch.ones_like(model.weight)
    fisher(model, (x, y), labels="signs", structure="kronecker")
    assert all(torch.equal(v, initial_state[k]) for k, v in model.state_dict().items())
    assert torch.equal(model.weight.grad, torch.ones(C, D)) and model.weight.requires_grad


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed, reentrant"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_activation_checkpointing_changes_nothing(name, structure):
    model, x = make(name)
    plain_model = nn.Sequential(model.first, model.part, model.head)
    functions_before = (
        torch.utils.checkpoint.CheckpointFunction,
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
    )
    expected = fisher(plain_model, x, structure=structure).diagonal()
    actual = fisher(model, x, structure=structure).diagonal()
    for (n, _), (plain_name, _) in zip(model.named_parameters(), plain_model.named_parameters(), strict=True):
        torch.testing.assert_close(actual[n], expected[plain_name])
    functions_after = (
        torch.utils.checkpoint.CheckpointFunction,
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
    )
    assert functions_after == functions_before, "torch's checkpoint functions are restored"


def test_complex_parameters_have_real_importances():
    """Compare with the closed form Σ over outputs c of p (1 - p) |∂ f_c / ∂z|² of f = Re(W z x)."""

    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.z = nn.Parameter(torch.tensor(0.3 + 0.4j, dtype=torch.cdouble))

        def forward(self, x):
            rotated = (self.z * x).real
            return torch.cat([rotated, torch.zeros_like(rotated)], 1)

    model = Rotation()
    x = torch.randn(9, 1)
    actual = fisher(model, x).values["z"]
    p = (0.3 * x).sigmoid()
    assert actual.dtype == torch.double
    torch.testing.assert_close(actual, (p * (1 - p) * x.square()).mean())
    step = {"z": torch.tensor(3 + 4j, dtype=torch.cdouble)}
    torch.testing.assert_close(fisher(model, x).quad(step), 25 * actual)
    with pytest.raises(ValueError, match="structure='full' is for real parameters, and z is complex"):
        fisher(model, x, structure="full")


def test_from_adam_with_complex_parameters():
    model, x = make("complex")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    F.cross_entropy(model(x), torch.zeros(7, dtype=torch.long)).backward()
    optimizer.step()
    actual = from_adam(model, optimizer).values
    for n, p in model.named_parameters():
        torch.testing.assert_close(actual[n], squared_size(p.grad))


class ChangingBuffers(nn.Module):
    """Buffers updated by earlier inputs shift the outputs, in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, C)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.ones(D))

    def forward(self, x):
        outputs = self.layer(x - self.mean) * (1 + self.calls)
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0).detach()
        return outputs


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_buffers_changed_by_forward_passes_are_restored(structure):
    torch.manual_seed(0)
    model = ChangingBuffers().eval()
    x = torch.randn(N, D)
    linear = nn.Linear(D, C)
    linear.load_state_dict(model.layer.state_dict())
    expected = list(fisher(linear, x - 1, structure=structure).diagonal().values())
    initial_buffers = {n: (buffer, buffer.clone()) for n, buffer in model.named_buffers()}
    for chunk in (1, 7, N):
        actual = fisher(model, x, structure=structure, chunk=chunk).diagonal()
        torch.testing.assert_close([actual["layer.weight"], actual["layer.bias"]], expected)
        sensitivity(model, x, chunk=chunk)
        for n, buffer in model.named_buffers():
            assert buffer is initial_buffers[n][0] and torch.equal(buffer, initial_buffers[n][1])


def test_inference_mode_is_refused(linear):
    model, x, _, _ = linear
    with torch.inference_mode():
        for estimate in (fisher, sensitivity):
            with pytest.raises(ValueError, match=r"under torch.inference_mode\(\).*leave that block first"):
                estimate(model, x)
        inference_x = x + 0
        inference_model = nn.Linear(D, C)
    torch.testing.assert_close(fisher(model, inference_x).values, fisher(model, x).values)
    with pytest.raises(ValueError, match=r"were made under torch.inference_mode\(\)"):
        fisher(inference_model, x)
