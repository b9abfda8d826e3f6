import pytest
import torch
from torch import nn
from torch.distributions import Categorical as Classes
from torch.distributions import Laplace, MixtureSameFamily, MultivariateNormal, Normal

from everlearn import Bernoulli, Categorical, Gaussian, Task
from everlearn.core.data_source import Arrays
from everlearn.curvature import fisher, gaussian_kl, kl, predictive_kl
from tests.models import make


def test_closed_forms_in_both_directions():
    p = Normal(0.0, 1.0)
    q = Normal(1.0, 2.0)
    forward = torch.log(torch.tensor(2.0)) + (1 + 1) / 8 - 0.5
    torch.testing.assert_close(kl(p, q), forward)
    reverse = -torch.log(torch.tensor(2.0)) + (4 + 1) / 2 - 0.5
    torch.testing.assert_close(kl(p, q, "reverse"), reverse)
    with pytest.raises(ValueError, match="direction: got 'back'"):
        kl(p, q, "back")


def test_gaussians_with_full_covariance():
    def random_covariance():
        root = torch.randn(3, 6, dtype=torch.double)
        return root @ root.t()

    m = torch.randn(3).double()
    s = random_covariance()
    n = torch.randn(3).double()
    t = random_covariance()
    expected = torch.distributions.kl_divergence(MultivariateNormal(m, s), MultivariateNormal(n, t))
    torch.testing.assert_close(gaussian_kl(m, s, n, t), expected)


def test_divergence_without_a_closed_form_is_sampled():
    torch.manual_seed(0)
    mixture = MixtureSameFamily(Classes(torch.ones(2)), Normal(torch.tensor([-2.0, 2.0]), torch.ones(2)))
    wide = Normal(0.0, 2.24)
    narrow = Normal(2.0, 1.0)
    grid = torch.linspace(-12, 12, 20001)
    p = mixture.log_prob(grid).exp()
    expected = torch.trapezoid(p * (mixture.log_prob(grid) - wide.log_prob(grid)), grid)
    assert abs(kl(mixture, wide, samples=200_000) - expected) < 0.01
    assert kl(mixture, wide) < kl(mixture, narrow), "the forward direction covers all modes"
    assert kl(mixture, narrow, "reverse") < 0.8, "the reverse direction may fit one mode"
    assert kl(Laplace(0.0, 1.0), Laplace(0.0, 1.0)) == 0


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.7), Bernoulli()])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "bare"])
def test_the_fisher_information_is_the_curvature_of_the_divergence(name, likelihood, direction):
    model, x = make(name)
    model.eval()
    torch.set_default_dtype(torch.double)
    form = fisher(model, x, structure="full", likelihood=likelihood)
    step = {n: 1e-4 * torch.randn_like(p) for n, p in model.named_parameters()}
    ratio = predictive_kl(model, step, x, direction, likelihood) / (0.5 * form.quad(step))
    torch.set_default_dtype(torch.float)
    assert abs(ratio - 1) < 5e-3


def test_allowed_classes_define_the_distribution():
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x = torch.randn(10, 3).double()
    table = torch.tensor([[True, True, False, False]])
    step = {"weight": 1e-4 * torch.randn(4, 3).double()}
    task = Task(x, id=0, allowed=table)
    ratio = predictive_kl(model, step, task) / (
        0.5 * fisher(model, task).quad({"weight": torch.zeros(4, 3).double()}) + 1e-30
    )
    assert torch.isfinite(predictive_kl(model, step, task)) and ratio > 0
    full = fisher(model, task, structure="full")
    assert abs(predictive_kl(model, step, task) / (0.5 * full.quad(step)) - 1) < 1e-2


def test_mixed_class_masks_ignored_tokens_and_bernoulli_masks():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.double)
    try:
        table = torch.tensor([[True, True, False, False], [False, True, True, True]])
        linear = nn.Linear(3, 4)
        language_model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
        x = torch.randn(10, 3)
        mixed_task = Task(Arrays(x, torch.ones(10, dtype=torch.long), torch.arange(10) % 2), id=0, allowed=table)
        tokens = torch.randint(5, (6, 4))
        y = torch.randint(5, (6, 4))
        y[:, 2:] = -100
        bernoulli_task = Task(x, id=0, allowed=table, likelihood=Bernoulli())
        for model, data in ((linear, mixed_task), (language_model, (tokens, y)), (linear, bernoulli_task)):
            step = {n: 1e-4 * torch.randn_like(p) for n, p in model.named_parameters()}
            ratio = predictive_kl(model, step, data) / (0.5 * fisher(model, data, structure="full").quad(step))
            assert abs(ratio - 1) < 1e-2
    finally:
        torch.set_default_dtype(torch.float)
