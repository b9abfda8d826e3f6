"""Importances that are not finite are refused with an error that names the cause."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from everlearn import EWC, MAS, Gaussian
from everlearn.curvature import fisher, sensitivity


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def data_with_two_broken_rows(value):
    x = torch.randn(30, 4)
    x[[17, 21], 2] = value
    return x, torch.randint(3, (30,))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("method", [EWC(), EWC(labels="true"), EWC(structure="kronecker"), MAS()], ids=repr)
def test_non_finite_inputs_are_counted(method, value):
    with pytest.raises(FloatingPointError, match=r"2 of 30 examples \(first: example 17\) have NaN or infinite inputs"):
        method.end_task(make_net(), data_with_two_broken_rows(value))
    assert not method.quadratic.anchor, "a failed end of task stores nothing"


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_non_finite_targets_are_distinguished_from_inputs(structure):
    x = torch.randn(30, 4)
    y = torch.randn(30, 3)
    y[5, 1] = torch.nan
    with pytest.raises(FloatingPointError, match=r"1 of 30 examples \(first: example 5\) have NaN or infinite targets"):
        fisher(make_net(), (x, y), labels="true", structure=structure, likelihood=Gaussian())
    fisher(make_net(), (x, y.nan_to_num()), labels="true", structure=structure, likelihood=Gaussian())


@pytest.mark.parametrize("estimate_importance", [fisher, sensitivity])
def test_non_finite_inputs_of_a_loader_are_named_without_a_count(estimate_importance):
    loader = DataLoader(TensorDataset(*data_with_two_broken_rows(torch.nan)), 10)
    with pytest.raises(FloatingPointError, match="NaN or infinite numbers in the inputs"):
        estimate_importance(make_net(), loader)


class SquareRoot(nn.Linear):
    """A layer whose gradient is NaN for an input of 0."""

    def forward(self, x):
        return (super().forward(x).square()).sqrt()


@pytest.mark.parametrize("estimate_importance", [fisher, sensitivity])
def test_a_non_finite_gradient_is_not_attributed_to_the_data(estimate_importance):
    x = torch.randn(20, 4)
    x[9] = 0
    with pytest.raises(FloatingPointError, match="a square root or a logarithm at 0"):
        estimate_importance(SquareRoot(4, 3, bias=False), x)
