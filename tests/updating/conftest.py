"""Fixtures for the tests of updates."""

from pathlib import Path

import pytest
import safetensors.torch

import everlearn
from everlearn import Method
from tests.updating.deployments import digits, make_model


@pytest.fixture(scope="session")
def trained_weights():
    """Weights of a model that was trained on the digits 0 to 3."""
    model = make_model()
    everlearn.train(model, Method(), digits(0, 1, 2, 3)[0], epochs=15, batch_size=32)
    return safetensors.torch.save({name: value.clone() for name, value in model.state_dict().items()})


@pytest.fixture
def deployment(tmp_path, trained_weights, monkeypatch):
    """Working folder with a deployed model."""
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").write_bytes(trained_weights)
    return tmp_path
