import sys

import pytest
import torch

from everlearn.curvature import Diagonal, fisher, histogram
from tests.models import make


def test_one_row_per_parameter_on_a_logarithmic_axis(tmp_path):
    model, x = make("mlp")
    figure = histogram(fisher(model, x))
    names = [axis.get_ylabel() for axis in figure.axes]
    assert names == [n for n, _ in model.named_parameters()]
    assert all(axis.get_xscale() == "log" for axis in figure.axes)
    figure.savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_bar_counts_and_annotated_shares():
    values = torch.cat([torch.zeros(50), torch.full((49,), 1e-3), torch.tensor([1.0])])
    (axis,) = histogram(Diagonal({"w": values})).axes
    assert sum(bar.get_height() for bar in axis.patches) == 50
    assert axis.texts[0].get_text() == "top 1 %: 95 % of the sum\nzero: 50 %"


def test_zero_importances_and_missing_matplotlib_raise(monkeypatch):
    with pytest.raises(ValueError, match="All importances are zero"):
        histogram(Diagonal({"w": torch.zeros(3)}))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'everlearn\[plot\]'"):
        histogram(Diagonal({"w": torch.ones(3)}))
