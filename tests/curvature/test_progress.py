import sys

import pytest
import torch
from torch import nn

from everlearn import EWC, MAS
from everlearn.curvature import fisher, progress, sensitivity, show_progress


@pytest.fixture
def immediate(monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.0)


@pytest.fixture
def terminal(monkeypatch, immediate):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)


@pytest.mark.usefixtures("immediate")
def test_there_is_no_bar_off_a_terminal(capsys):
    EWC().end_task(nn.Linear(3, 4), torch.randn(40, 3))
    MAS().end_task(nn.Linear(3, 4), torch.randn(40, 3))
    output = capsys.readouterr()
    assert output.out == output.err == ""


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("compute", "description"),
    [
        (lambda: fisher(nn.Linear(3, 4), torch.randn(40, 3), "signs", chunk=10), "Fisher information:"),
        (lambda: fisher(nn.Linear(3, 4), torch.randn(40, 3), chunk=10), "Fisher information, 3 backward passes:"),
        (lambda: sensitivity(nn.Linear(3, 4), torch.randn(40, 3), chunk=10), "Sensitivity:"),
        (lambda: sensitivity(nn.Linear(3, 4), torch.randn(40, 3), "vector", 10), "Sensitivity, 4 backward passes:"),
    ],
)
def test_a_bar_on_a_terminal_names_the_quantity_and_counts_examples(compute, description, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "tqdm", every_update(progress.tqdm))
    compute()
    output = capsys.readouterr().err
    assert description in output
    assert "30/40" in output
    with show_progress(False):
        compute()
    assert capsys.readouterr().err == ""


def every_update(bar):
    """A bar that is drawn at every update, where a real one waits a tenth of a second."""
    return lambda **settings: bar(mininterval=0, miniters=1, **settings)


@pytest.mark.usefixtures("terminal")
def test_backward_passes_of_a_chunk_advance_the_bar(monkeypatch):
    positions = []

    class Bar(progress.tqdm):
        def update(self, n=1):
            super().update(n)
            positions.append(self.n)

    monkeypatch.setattr(progress, "tqdm", Bar)
    fisher(nn.Linear(3, 5), torch.randn(40, 3), chunk=20)
    assert positions == [0, 5, 10, 15, 20, 20, 25, 30, 35, 40]


def test_a_short_pass_shows_no_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fisher(nn.Linear(3, 4), torch.randn(40, 3))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("data", [iter([torch.randn(8, 3)] * 5), torch.randn(40, 3)])
def test_the_length_may_be_unknown(data, immediate, capsys):
    with show_progress(True):
        fisher(nn.Linear(3, 4), data, "signs")
    assert "Fisher information" in capsys.readouterr().err
