"""Each head equals its closed form on the pooled data, in any order of tasks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.covariance import EmpiricalCovariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from torch import nn

from everlearn import KLDA, FeCAM, NearestMean, RanPAC, StreamingLDA
from everlearn.methods.heads.ranpac import MAX_FREEDOM, RIDGE_GRID, select_ridge

# Most tests give classes one after the other, without a stream.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no examples of:UserWarning")

NUM_CLASSES = 6
NUM_FEATURES = 12

HEADS = [
    NearestMean(),
    StreamingLDA(),
    RanPAC(60),
    RanPAC(60, ridge=3.0),
    RanPAC(60, ridge=3.0, recursive=True),
    RanPAC(0, ridge=0.5),
    KLDA(60),
    FeCAM(),
]


def make_data(num_per_class=30, seed=0):
    """Draw classes of equal size whose features are correlated."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(NUM_FEATURES, NUM_FEATURES, generator=random, dtype=torch.float64)
    centers = 1.5 * torch.randn(NUM_CLASSES, NUM_FEATURES, generator=random, dtype=torch.float64)
    y = torch.arange(NUM_CLASSES).repeat_interleave(num_per_class)
    x = centers[y] + torch.randn(len(y), NUM_FEATURES, generator=random, dtype=torch.float64) @ mixing / 3
    return x, y


def make_model(outputs=NUM_CLASSES):
    """Create a model whose features are its inputs."""
    return nn.Sequential(nn.Identity(), nn.Linear(NUM_FEATURES, outputs)).double()


def learn(method, x, y, classes_by_task=((0, 1), (2, 3), (4, 5))):
    """Learn the classes task by task."""
    model = make_model()
    for classes in classes_by_task:
        rows = torch.isin(y, torch.tensor(classes))
        method.begin_task(model, None)
        method.end_task(model, (x[rows], y[rows]))
    return model


def test_nearest_mean_is_the_largest_cosine_with_a_class_mean():
    x, y = make_data()
    model = learn(NearestMean(), x, y)
    normalized = F.normalize(x, dim=1)
    means = torch.stack([normalized[y == c].mean(0) for c in range(NUM_CLASSES)])
    cosines = F.cosine_similarity(x[:, None], means[None], dim=2)
    torch.testing.assert_close(model(x) / x.norm(dim=1, keepdim=True), cosines, rtol=0, atol=1e-12)


class FixedShrinkage(EmpiricalCovariance):
    """(1 - ε) Σ + ε I, for scikit-learn."""

    def fit(self, X, y=None):
        super().fit(X)
        self.covariance_ = (1 - 1e-2) * self.covariance_ + 1e-2 * np.eye(X.shape[1])
        return self


@pytest.mark.parametrize("normalize", [True, False])
def test_streaming_lda_equals_scikit_learn(normalize):
    x, y = make_data()
    model = learn(StreamingLDA(1e-2, normalize=normalize), x, y)
    reference = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=FixedShrinkage())
    features = F.normalize(x, dim=1).numpy() if normalize else x.numpy()
    reference.fit(features, y)

    # scikit-learn adds log priors, which are equal here.
    expected = torch.from_numpy(reference.decision_function(features)) + math.log(NUM_CLASSES)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("dimension", [0, 40, 400])
def test_ranpac_equals_ridge_regression_on_the_pooled_data(recursive, dimension):
    x, y = make_data()
    method = RanPAC(dimension, ridge=0.7, recursive=recursive)
    model = learn(method, x, y)
    h = F.normalize(x, dim=1)
    if dimension:
        h = (h @ model[1].relu.weight.T).relu()
    reference = Ridge(alpha=0.7, fit_intercept=False, solver="cholesky").fit(h.numpy(), F.one_hot(y).numpy())
    torch.testing.assert_close(model(x), torch.from_numpy(reference.predict(h.numpy())), rtol=0, atol=1e-8)


def test_ridge_has_the_smallest_generalized_cross_validation_error():
    x, y = make_data(num_per_class=10)
    method = RanPAC(80)
    model = learn(method, x, y)
    h = (F.normalize(x, dim=1) @ model[1].relu.weight.T).relu()
    targets = F.one_hot(y).double()
    scale = h.square().sum(0).mean()
    errors = {}
    for relative_ridge in RIDGE_GRID:
        ridge = float(relative_ridge * scale)
        hat_matrix = h @ torch.linalg.solve(h.T @ h + ridge * torch.eye(80, dtype=torch.float64), h.T)
        residual = targets - hat_matrix @ targets
        if hat_matrix.trace() < MAX_FREEDOM * len(x):
            errors[ridge] = float(len(x) * residual.square().sum() / (len(x) - hat_matrix.trace()) ** 2)
    assert select_ridge(method.statistics) == pytest.approx(min(errors, key=errors.get), rel=1e-9)


def test_klda_is_lda_of_random_fourier_features():
    x, y = make_data()
    method = KLDA(50, sigma=0.4, shrinkage=1e-2)
    model = learn(method, x, y)
    features = F.normalize(x, dim=1)
    h = math.sqrt(2 / 50) * torch.cos(features @ model[1].fourier.weight.T + model[1].fourier.bias)
    reference = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=FixedShrinkage()).fit(h.numpy(), y)
    expected = torch.from_numpy(reference.decision_function(h.numpy())) + math.log(NUM_CLASSES)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-8)


def test_random_fourier_features_approximate_an_rbf_kernel():
    x, _ = make_data()
    features = F.normalize(x, dim=1)
    h = KLDA(20_000, sigma=0.3).represent(features)
    squared_distances = torch.cdist(features, features).square()
    torch.testing.assert_close(h @ h.T, torch.exp(-0.3 * squared_distances), rtol=0, atol=0.05)


def test_fecam_equals_a_loop_over_classes():
    x, y = make_data(num_per_class=40)
    method = FeCAM(alpha1=0.5, alpha2=0.3)
    model = learn(method, x, y)
    h = x.abs().sqrt() * x.sign()
    expected = torch.empty(len(x), NUM_CLASSES, dtype=torch.float64)
    for c in range(NUM_CLASSES):
        covariance = torch.cov(h[y == c].T)
        diagonal = torch.eye(NUM_FEATURES).bool()
        shrunk = covariance.clone()
        shrunk[diagonal] += 0.5 * covariance[diagonal].mean()
        shrunk[~diagonal] += 0.3 * covariance[~diagonal].mean()
        deviations = shrunk.diagonal().sqrt()
        correlations = shrunk / deviations[:, None] / deviations
        difference = F.normalize(h, dim=1) - F.normalize(h[y == c].mean(0), dim=0)
        expected[:, c] = -torch.einsum("ni,ij,nj->n", difference, correlations.inverse(), difference)
    torch.testing.assert_close(method.predict(model, x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_ten_orders_of_tasks_give_identical_predictions(head):
    x, y = make_data()
    x_test, _ = make_data(num_per_class=50, seed=1)
    predictions = []
    for seed in range(10):
        order = torch.randperm(NUM_CLASSES, generator=torch.Generator().manual_seed(seed))
        method = replace(head)
        model = learn(method, x, y, classes_by_task=order.view(3, 2).tolist())
        predictions.append(method.predict(model, x_test).argmax(1))
    assert all(torch.equal(predictions[0], prediction) for prediction in predictions)


@pytest.mark.parametrize("ridge", [1e-4, 1.0, 100.0])
def test_recursive_ridge_stays_exact_over_many_learned_and_forgotten_examples(ridge):
    x, y = make_data()
    recursive, batch = RanPAC(60, ridge=ridge, recursive=True), RanPAC(60, ridge=ridge)
    models = make_model(), make_model()
    for method, model in zip((recursive, batch), models, strict=True):
        method.end_task(model, (x, y))
    for _ in range(20):
        recursive.end_task(models[0], (x[:50], y[:50]))
        recursive.forget(models[0], (x[:50], y[:50]))
    torch.testing.assert_close(models[0](x), models[1](x), rtol=0, atol=1e-6)


def test_fewer_examples_than_features_are_not_fitted_exactly():
    random = torch.Generator().manual_seed(0)
    centers = 0.4 * torch.randn(10, 64, generator=random)
    y = torch.randint(10, (900,), generator=random)
    x = centers[y] + torch.randn(900, 64, generator=random)
    accuracies = []
    for ridge in ("gcv", 1e-6):
        model = nn.Sequential(nn.Identity(), nn.Linear(64, 10))
        RanPAC(500, ridge=ridge).end_task(model, (x[:200], y[:200]))
        accuracies.append((model(x[200:]).argmax(1) == y[200:]).float().mean())
    assert accuracies[0] > accuracies[1] + 0.05
