import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everlearn import Bernoulli, Categorical, Gaussian, Method, Task, nets, streams, train
from everlearn.curvature import fisher, from_adam, sensitivity
from tests.models import MODELS, make
from tests.reference import full_fisher, mean_of, softmax_scores, squared_size

N, C, D = 40, 4, 3


pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def linear():
    """A softmax model, for which everything is known in closed form: f = W x + b."""
    torch.manual_seed(3)
    model, x, y = nn.Linear(D, C), torch.randn(N, D), torch.randint(C, (N,))
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


@pytest.mark.parametrize("name", list(MODELS))
def test_exact_is_the_label_weighted_sum_on_any_model(name):
    model, x = make(name)
    model.eval()
    right = mean_of(model, x, softmax_scores(model(x).detach()), squared_size)
    order = torch.tensor([4, 1, 6, 0, 2, 5, 3])
    for data, chunk in ((x, 3), (x[order], 2), (x[order], 7)):
        found = fisher(model, data, chunk=chunk).values
        assert set(found) == set(right)
        for n, value in right.items():
            torch.testing.assert_close(found[n], value, rtol=1e-9, atol=1e-14, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("labels", ["signs", "sample"])
def test_random_estimates_converge_to_the_exact(labels, linear):
    model, x, _, _ = linear
    exact = fisher(model, x).values["weight"]
    found = fisher(model, x, labels=labels, samples=5000).values["weight"]
    assert (found - exact).norm() / exact.norm() < 0.03
    one = fisher(model, x, labels=labels).values["weight"]
    assert not torch.allclose(one, exact, rtol=1e-3), "a single draw is not exact"
    assert torch.equal(one, fisher(model, x, labels=labels).values["weight"]), "but the same every time"
    assert not torch.equal(one, fisher(model, x, labels=labels, seed=1).values["weight"])


def test_signs_are_less_noisy_than_samples_on_a_trained_model():
    torch.set_default_dtype(torch.float)
    task = streams.digits("class").joint()[0]
    torch.manual_seed(0)
    model = nets.mlp(64, 10, hidden=(32,))
    train(model, Method(), task, epochs=20, batch_size=32)
    exact = fisher(model, task)

    def error(labels):
        found = fisher(model, task, labels=labels)
        apart = sum((found.values[n] - v).square().sum() for n, v in exact.values.items())
        return float((apart / sum(v.square().sum() for v in exact.values.values())).sqrt())

    assert error("signs") < 0.5 * error("sample")


def test_predicted_and_true_labels_are_something_else(linear):
    model, x, _, p = linear
    found = fisher(model, x, labels="predicted").values["bias"]
    torch.testing.assert_close(found, ((p - F.one_hot(p.argmax(1), C)) ** 2).mean(0))
    assert not torch.allclose(found, fisher(model, x).values["bias"], rtol=0.1)


@pytest.mark.parametrize("labels", ["exact", "true", "predicted"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_neither_batches_nor_order_nor_copies_matter(labels, structure, linear):
    model, x, y, _ = linear
    right = fisher(model, (x, y), labels, structure).diagonal()["weight"]
    order = torch.randperm(N)
    for data, chunk in (((x, y), 7), ((x[order], y[order]), 256), ((torch.cat([x, x]), torch.cat([y, y])), 16)):
        torch.testing.assert_close(fisher(model, data, labels, structure, chunk=chunk).diagonal()["weight"], right)


def test_dead_units_and_unused_heads_have_none():
    model = nets.mlp(3, 4, hidden=(5,))
    with torch.no_grad():
        model[1].weight[2], model[1].bias[2] = 0.0, -1.0
    f = fisher(model, torch.randn(20, 3)).values
    assert (f["1.weight"][2] == 0).all() and f["1.bias"][2] == 0 and (f["1.weight"] >= 0).all()
    table = torch.tensor([[True, True, False, False], [False, False, True, True]])
    task = Task(torch.randn(20, 3), id=0, allowed=table)
    f = fisher(model, task).values
    assert (f["3.weight"][2:] == 0).all() and (f["3.weight"][:2, [0, 1, 3, 4]] > 0).all()


@pytest.mark.parametrize("labels", ["exact", "signs", "sample", "true", "predicted"])
def test_allowed_classes_are_all_there_is(labels):
    """A masked wide head has the Fisher information of the narrow head it stands for."""
    wide, x, y = nn.Linear(3, 5), torch.randn(30, 3), torch.randint(2, (30,))
    narrow = nn.Linear(3, 2)
    with torch.no_grad():
        narrow.weight.copy_(wide.weight[:2])
        narrow.bias.copy_(wide.bias[:2])
    table = torch.tensor([[True, True, False, False]])
    found = fisher(wide, Task((x, y), id=0, allowed=table), labels, samples=200 if labels in ("signs", "sample") else 1)
    right = fisher(narrow, (x, y), labels if labels in ("true", "predicted") else "exact")
    torch.testing.assert_close(
        found.values["weight"][:2],
        right.values["weight"],
        rtol=0.1 if labels in ("signs", "sample") else 1e-9,
        atol=1e-12,
    )
    assert (found.values["weight"][2:] == 0).all()


def test_an_lstm_in_single_precision():
    """Its two biases have one gradient tensor, which must not be squared twice."""
    torch.set_default_dtype(torch.float)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    model, x = Last(), torch.randn(20, 7, 5)
    right = mean_of(model, x, softmax_scores(model(x).detach()), torch.square)
    for n, v in fisher(model, x).values.items():
        torch.testing.assert_close(v, right[n], rtol=1e-3, atol=1e-7)


def test_ignored_and_impossible_labels(linear):
    model, x, y, _ = linear
    ignored = torch.where(y == 0, -100, y)
    for structure in ("diagonal", "kronecker", "full"):
        for labels in ("exact", "true"):
            kept = fisher(model, (x[y != 0], y[y != 0]), labels, structure).trace()
            assert fisher(model, (x, ignored), labels, structure, chunk=3).trace() == pytest.approx(kept)
    with pytest.raises(ValueError, match="all its labels are ignored"):
        fisher(model, (x, torch.full_like(y, -100)))
    for wrong, cure in ((y - 1, "number the labels from 0, and give -100"), (y + 5, "build it with more outputs")):
        with pytest.raises(ValueError, match=f"but the model has (only )?4 outputs .*{cure}"):
            fisher(model, (x, wrong), labels="true")
    with pytest.raises(ValueError, match="One output is no choice"):
        fisher(nn.Linear(D, 1), x)


def test_unlabelled_datasets(linear):
    model, x, _, _ = linear
    data = torch.utils.data.TensorDataset(x)
    for d in (data, torch.utils.data.DataLoader(data, batch_size=7)):
        torch.testing.assert_close(fisher(model, d).values["weight"], fisher(model, x).values["weight"])


def test_a_single_allowed_class_tells_nothing():
    model, task = nn.Linear(3, 2), Task(torch.randn(5, 3), id=0, allowed=torch.tensor([[True, False]]))
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
    model, x = nn.Linear(3, 2), torch.randn(50, 3)
    f = fisher(model, x, likelihood=Gaussian(variance=0.5)).values
    torch.testing.assert_close(f["weight"], (2 * (x**2).mean(0)).expand(2, 3))
    torch.testing.assert_close(
        fisher(model, x, likelihood=Gaussian(0.5), labels="signs", samples=3).values["bias"], f["bias"]
    )
    p = model(x).sigmoid().detach()
    f = fisher(model, x, likelihood=Bernoulli()).values
    torch.testing.assert_close(f["weight"], torch.einsum("nc,ni->ci", p * (1 - p), x**2) / 50)
    for labels in ("signs", "sample"):
        drawn = fisher(model, x, likelihood=Bernoulli(), labels=labels, samples=3000).values["weight"]
        assert (drawn - f["weight"]).norm() / f["weight"].norm() < 0.05
    y = (torch.rand(50, 2) > 0.5).double()
    r = (p - y) ** 2
    task = Task((x, y), likelihood=Bernoulli())
    assert torch.equal(
        fisher(model, (x, y), "true", likelihood=Bernoulli()).values["bias"], fisher(model, task, "true").values["bias"]
    )
    torch.testing.assert_close(fisher(model, task, labels="true").values["bias"], r.mean(0))
    with pytest.raises(ValueError, match="most likely target is the output itself"):
        fisher(model, x, likelihood=Gaussian(), labels="predicted")


class Words(nn.Module):
    """A language model: a distribution over words at every place."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, t):
        return self.out(torch.tanh(self.words(t)).cumsum(1))


def test_sequences_count_token_by_token():
    torch.manual_seed(0)
    model, t = Words(), torch.randint(5, (6, 4))
    y = torch.randint(5, (6, 4))
    y[0, 2:] = -100
    out = model(t).detach()
    columns = []
    for place in range(4):
        for column in softmax_scores(out[:, place]):
            s = torch.zeros_like(out)
            s[:, place] = column * (y[:, place] != -100)[:, None]
            columns.append(s)
    each = 6 / int((y != -100).sum())  # examples over labels: the loss is a mean over these
    right = {n: each * value for n, value in mean_of(model, t, columns, torch.square).items()}
    found = fisher(model, (t, y)).values
    for n, value in right.items():
        torch.testing.assert_close(found[n], value)
    drawn = fisher(model, (t, y), labels="signs", samples=4000).values["out.weight"]
    assert (drawn - right["out.weight"]).norm() / right["out.weight"].norm() < 0.03
    true = fisher(model, (t, y), labels="true").values["out.bias"]
    r = (out.softmax(-1) - F.one_hot(y.clamp(min=0), 5)) * (y != -100)[..., None]
    torch.testing.assert_close(true, each * r.sum(1).square().mean(0))


def test_the_fisher_information_of_tokens_is_the_curvature_of_the_loss():
    """Where outputs are linear in the parameters, the Hessian of the mean cross-entropy, by torch's own second derivatives."""
    torch.manual_seed(0)
    model, t = nn.Linear(3, 4), torch.randn(5, 6, 3)
    y = torch.randint(4, (5, 6))
    y[1, 2:] = -100
    y[3] = -100

    def loss(weight, bias):
        return F.cross_entropy(F.linear(t, weight, bias).flatten(0, 1), y.flatten())

    hessian = torch.autograd.functional.hessian(loss, (model.weight.detach(), model.bias.detach()))
    flat = torch.cat([torch.cat([h.reshape(a, b) for h, b in zip(row, (12, 4), strict=True)], 1)
                      for row, a in zip(hessian, (12, 4), strict=True)])  # fmt: skip
    full = fisher(model, (t, y), structure="full")
    torch.testing.assert_close(full.matrix if full.matrix is not None else full.rows.t() @ full.rows, flat)
    torch.testing.assert_close(fisher(model, (t, y)).values["bias"], flat.diagonal()[12:])
    all_labels = y.clamp(min=0)
    torch.testing.assert_close(fisher(model, t).values["weight"], fisher(model, (t, all_labels)).values["weight"])
    constant, step = t[:1, :1].expand_as(t), {"weight": torch.randn(4, 3), "bias": torch.randn(4)}
    quads = [fisher(model, (constant, y), structure=s).quad(step) for s in ("full", "kronecker")]
    torch.testing.assert_close(*quads)  # one input for all: the approximation is exact


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("complex", "bert")])
def test_full_equals_the_outer_products(name):
    model, x = make(name)
    right = full_fisher(model.eval(), x, softmax_scores(model(x).detach()))
    for data, chunk in ((x, None), (x.flip(0), 3)):
        found = fisher(model, data, structure="full", chunk=chunk)
        torch.testing.assert_close(found.dense(), right, rtol=1e-9, atol=1e-14)


def test_the_diagonal_of_the_full_is_the_diagonal(linear):
    model, x, _, _ = linear
    full, diagonal = fisher(model, x, structure="full"), fisher(model, x)
    for n, v in full.diagonal().items():
        torch.testing.assert_close(v, diagonal.values[n])
    assert full.trace() == pytest.approx(diagonal.trace())


def test_the_empirical_fisher_of_one_example_is_its_squared_gradient():
    model, x = make("mlp")
    y = torch.tensor([1])
    F.cross_entropy(model(x[:1]), y).backward()
    found = fisher(model, (x[:1], y), labels="true").values
    for n, p in model.named_parameters():
        torch.testing.assert_close(found[n], p.grad**2)


def test_adam_gives_its_second_moments():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.99))
    x, y = torch.randn(64, 3), torch.randint(2, (64,))
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
    found = from_adam(heads, optimizer).values
    torch.testing.assert_close(found["0.weight"], heads[0].weight.grad ** 2)
    assert not found["1.weight"].any(), "a head that was never trained has none"
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
    model, x = nets.mlp(4, 3, hidden=(6,)), torch.randn(3000, 4)
    right = fisher(model, x, structure=structure).diagonal()
    half = copy.deepcopy(model).bfloat16()
    found = fisher(half, x.bfloat16(), structure=structure).diagonal()
    for n, v in right.items():
        assert found[n].dtype == torch.float32
        assert (found[n] - v).norm() / v.norm() < 0.05


def test_the_task_and_the_model_stay(linear):
    model, x, y, _ = linear
    before = copy.deepcopy(model.state_dict())
    model.weight.grad = torch.ones_like(model.weight)
    fisher(model, (x, y), labels="signs", structure="kronecker")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model.weight.grad, torch.ones(C, D)) and model.weight.requires_grad


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed, reentrant"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_a_checkpoint_changes_nothing(name, structure):
    model, x = make(name)
    plain = nn.Sequential(model.first, model.part, model.head)
    before = torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_without_reentrant_generator
    right = fisher(plain, x, structure=structure).diagonal()
    found = fisher(model, x, structure=structure).diagonal()
    for (n, _), (m, _) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(found[n], right[m])
    after = torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_without_reentrant_generator
    assert after == before, "checkpoints are themselves again"


def test_complex_parameters_have_real_importances():
    """Σ over outputs c of p (1 - p) |∂ f_c / ∂z|² of f = Re(W z x): by hand."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.z = nn.Parameter(torch.tensor(0.3 + 0.4j, dtype=torch.cdouble))

        def forward(self, x):
            turned = (self.z * x).real
            return torch.cat([turned, torch.zeros_like(turned)], 1)

    model, x = Turned(), torch.randn(9, 1)
    found = fisher(model, x).values["z"]
    p = (0.3 * x).sigmoid()
    assert found.dtype == torch.double
    torch.testing.assert_close(found, (p * (1 - p) * x.square()).mean())
    step = {"z": torch.tensor(3 + 4j, dtype=torch.cdouble)}
    torch.testing.assert_close(fisher(model, x).quad(step), 25 * found)
    with pytest.raises(ValueError, match="structure='full' is for real parameters, and z is complex"):
        fisher(model, x, structure="full")


def test_adams_moments_of_complex_parameters():
    model, x = make("complex")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    F.cross_entropy(model(x), torch.zeros(7, dtype=torch.long)).backward()
    optimizer.step()
    found = from_adam(model, optimizer).values
    for n, p in model.named_parameters():
        torch.testing.assert_close(found[n], squared_size(p.grad))


class Remembering(nn.Module):
    """What it has seen before shifts its outputs, in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, C)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.ones(D))

    def forward(self, x):
        out = self.layer(x - self.mean) * (1 + self.calls)
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0).detach()
        return out


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_buffers_that_every_forward_pass_moves_are_put_back(structure):
    torch.manual_seed(0)
    model, x = Remembering().eval(), torch.randn(N, D)
    still = nn.Linear(D, C)
    still.load_state_dict(model.layer.state_dict())
    right = list(fisher(still, x - 1, structure=structure).diagonal().values())
    before = {n: (b, b.clone()) for n, b in model.named_buffers()}
    for chunk in (1, 7, N):
        found = fisher(model, x, structure=structure, chunk=chunk).diagonal()
        torch.testing.assert_close([found["layer.weight"], found["layer.bias"]], right)
        sensitivity(model, x, chunk=chunk)
        for n, b in model.named_buffers():
            assert b is before[n][0] and torch.equal(b, before[n][1])


def test_inference_mode_is_refused_with_a_sentence(linear):
    model, x, _, _ = linear
    with torch.inference_mode():
        for measure in (fisher, sensitivity):
            with pytest.raises(ValueError, match=r"under torch.inference_mode\(\).*leave that block first"):
                measure(model, x)
        there, born = x + 0, nn.Linear(D, C)
    torch.testing.assert_close(fisher(model, there).values, fisher(model, x).values)
    with pytest.raises(ValueError, match=r"were made under torch.inference_mode\(\)"):
        fisher(born, x)
