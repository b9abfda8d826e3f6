"""Importances that are not finite are refused with what is to blame."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from everlearn import EWC, MAS, Gaussian
from everlearn.curvature import fisher, sensitivity


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def broken(value):
    x = torch.randn(30, 4)
    x[[17, 21], 2] = value
    return x, torch.randint(3, (30,))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("method", [EWC(), EWC(labels="true"), EWC(structure="kronecker"), MAS()], ids=repr)
def test_broken_inputs_are_counted(method, value):
    with pytest.raises(FloatingPointError, match=r"2 of 30 examples \(first: example 17\) have NaN or infinite inputs"):
        method.end_task(net(), broken(value))
    assert not method.quadratic.anchor, "nothing was taken in"


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_broken_targets_are_told_from_inputs(structure):
    x, y = torch.randn(30, 4), torch.randn(30, 3)
    y[5, 1] = torch.nan
    with pytest.raises(FloatingPointError, match=r"1 of 30 examples \(first: example 5\) have NaN or infinite targets"):
        fisher(net(), (x, y), labels="true", structure=structure, likelihood=Gaussian())
    fisher(net(), (x, y.nan_to_num()), labels="true", structure=structure, likelihood=Gaussian())


@pytest.mark.parametrize("importance", [fisher, sensitivity])
def test_a_loader_cannot_be_counted_but_is_blamed(importance):
    loader = DataLoader(TensorDataset(*broken(torch.nan)), 10)
    with pytest.raises(FloatingPointError, match="NaN or infinite numbers in the inputs"):
        importance(net(), loader)


class Root(nn.Linear):
    """Its gradient is NaN where the input is 0."""

    def forward(self, x):
        return (super().forward(x).square()).sqrt()


@pytest.mark.parametrize("importance", [fisher, sensitivity])
def test_an_infinite_gradient_is_not_blamed_on_the_data(importance):
    x = torch.randn(20, 4)
    x[9] = 0
    with pytest.raises(FloatingPointError, match="a square root or a logarithm at 0"):
        importance(Root(4, 3, bias=False), x)
