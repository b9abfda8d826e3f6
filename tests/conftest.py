import os
from pathlib import Path

import pytest
import torch

from everlearn import nets, streams


def pytest_configure():
    torch.set_num_threads(1)  # tests run side by side; more threads than cores only wait for each other


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def double():
    """Mathematics is checked in float64."""
    torch.set_default_dtype(torch.double)
    yield
    torch.set_default_dtype(torch.float)


@pytest.fixture
def small_stream():
    return lambda scenario="task": streams.split(*_some_digits(), tasks=3, scenario=scenario, class_order=range(6))


@pytest.fixture
def small_net():
    return lambda inputs, outputs: nets.mlp(inputs, outputs, hidden=(20,))


def _some_digits():
    (x, y), (x_test, y_test) = streams.digits_data()
    return (x[:500], y[:500]), (x_test[:200], y_test[:200])


@pytest.fixture
def shared_data():
    """The folder of real data sets, where there is one."""
    given = os.environ.get("EVERLEARN_DATA")
    folder = Path(given) if given else Path(__file__).parents[2] / "shared" / "data"
    if not (folder / "mnist").exists():
        pytest.skip("no real data here: set EVERLEARN_DATA to the folder that holds them")
    return folder
