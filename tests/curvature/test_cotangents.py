import pytest
import torch
from torch import nn

from everlearn import EWC, MAS, Bernoulli, Categorical, Gaussian, Task
from everlearn.core.batch import Batch
from everlearn.curvature import count_backward_passes, estimate_epochs, fisher, sensitivity
from everlearn.curvature.per_example.recorded_pass import RecordedPass

pytestmark = pytest.mark.usefixtures("double")

N = 40


def linear(num_outputs, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, num_outputs), torch.randn(N, 3)


@pytest.fixture
def num_backward_passes(monkeypatch):
    """Counts the backward passes of chunks with all examples; the probe has fewer."""
    counts = []
    backward = RecordedPass.backward

    def count(self, cotangents, is_last):
        if len(cotangents[-1]) == N:
            counts.append(1)
        backward(self, cotangents, is_last)

    monkeypatch.setattr(RecordedPass, "backward", count)
    return lambda: len(counts)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.5), Bernoulli()])
def test_auto_is_unbiased(structure, likelihood):
    model, x = linear(4)
    exact = fisher(model, x, "exact", structure, likelihood).diagonal()
    num_seeds = 200
    means = {name: torch.zeros_like(value) for name, value in exact.items()}
    squares = {name: torch.zeros_like(value) for name, value in exact.items()}
    for seed in range(num_seeds):
        for name, value in fisher(model, x, "auto", structure, likelihood, seed=seed).diagonal().items():
            means[name] += value / num_seeds
            squares[name] += value**2 / num_seeds

    # The difference of each entry in standard errors, and for the diagonal of Gaussians no difference at all.
    for name, value in exact.items():
        standard_error = ((squares[name] - means[name] ** 2).clamp(min=0) / num_seeds).sqrt()
        assert ((means[name] - value).abs() <= 4 * standard_error + 1e-9 * value).all()


ONE_PASS = {
    "two classes": (2, Categorical(), None),
    "two allowed classes of four": (4, Categorical(), torch.tensor([[False, True, False, True]])),
    "one real target": (1, Gaussian(2.0), None),
    "one binary label": (1, Bernoulli(), None),
}


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("case", list(ONE_PASS))
def test_auto_is_exact_where_that_takes_one_backward_pass(case, samples, structure, num_backward_passes):
    num_outputs, likelihood, allowed = ONE_PASS[case]
    model, x = linear(num_outputs)
    task = Task(x, id=0, allowed=allowed, likelihood=likelihood)
    auto = fisher(model, task, "auto", structure, samples=samples).diagonal()
    assert num_backward_passes() == 1
    exact = fisher(model, task, "exact", structure).diagonal()
    assert all(torch.equal(auto[name], exact[name]) for name in exact)


@pytest.mark.parametrize("num_outputs", [3, 10, 150])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Bernoulli()])
def test_the_default_of_ewc_takes_one_backward_pass(num_outputs, likelihood, num_backward_passes):
    model, x = linear(num_outputs)
    method = EWC()
    method.end_task(model, Task(x, likelihood=likelihood))
    assert num_backward_passes() == 1
    assert method.estimate_consolidation(Batch(x, likelihood=likelihood), model(x)) == estimate_epochs(1) < 1.5


CASES = {
    "classes": (6, Categorical(), None),
    "allowed classes": (6, Categorical(), torch.tensor([[True, False, True, True, False, False]])),
    "a single class": (3, Categorical(), torch.tensor([[True, False, False]])),
    "real targets": (5, Gaussian(), None),
    "binary labels": (5, Bernoulli(), None),
}


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("labels", ["auto", "exact", "signs", "sample"])
@pytest.mark.parametrize("case", list(CASES))
def test_backward_passes_are_counted_before_they_are_taken(case, labels, samples, num_backward_passes):
    num_outputs, likelihood, allowed = CASES[case]
    model, x = linear(num_outputs)
    task = Task(x, id=0, allowed=allowed, likelihood=likelihood)
    (batch,) = task.examples(N)
    expected = count_backward_passes(labels, batch, model(x), samples)
    fisher(model, task, labels, samples=samples)
    assert num_backward_passes() == expected


@pytest.mark.parametrize("norm", ["squared", "vector", "local"])
def test_backward_passes_of_the_sensitivity(norm, num_backward_passes):
    model, x = linear(5)
    task = Task(x, id=0, allowed=torch.tensor([[True, False, True, True, False]]))
    (batch,) = task.examples(N)
    sensitivity(model, task, norm)
    assert MAS(norm=norm).estimate_consolidation(batch, model(x)) == estimate_epochs(num_backward_passes())


@pytest.mark.parametrize("labels", ["auto", "signs", "sample"])
def test_draws_are_averaged(labels):
    model, x = linear(4)
    exact = fisher(model, x).values["weight"]
    many = fisher(model, x, labels, samples=2000).values["weight"]
    torch.testing.assert_close(many, exact, rtol=0.05, atol=0)


def test_draws_differ_between_tasks_and_not_after_resuming():
    model, x = linear(4)
    method = EWC(1.0)
    method.end_task(model, x)
    first = method.quadratic.form.values["weight"].clone()
    resumed = EWC(1.0)
    resumed.load_state_dict(method.state_dict())
    for current in (method, resumed):
        current.end_task(model, x)
    second = method.quadratic.form.values["weight"] - first
    assert not torch.allclose(first, second)
    assert torch.equal(method.quadratic.form.values["weight"], resumed.quadratic.form.values["weight"])


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_draws_do_not_depend_on_the_chunk_size(chunk):
    model, x = linear(4)
    torch.testing.assert_close(
        fisher(model, x, "auto", chunk=chunk).values["weight"], fisher(model, x, "auto", chunk=16).values["weight"]
    )
