"""Functions that several test files need."""

import torch

import everlearn
from everlearn import METHODS

# Fields by which a method is quick on small data.
QUICK_FIELDS = {"ranpac": {"dimension": 50}, "klda": {"dimension": 50}}


def make_method(name, **fields):
    """Create a method of the library by its name."""
    return METHODS[name](**{**QUICK_FIELDS.get(name, {}), **fields})


# Methods that take gradient steps; the others only collect statistics.
TRAINED = [name for name in METHODS if make_method(name).trains]


def train_tasks(model, method, tasks, **settings):
    """Train on the tasks in order."""
    for task in tasks:
        everlearn.train(model, method, task, **settings)


def state_vector(model):
    """Concatenate all parameters and buffers as float64, which represents every float32 and small integer exactly."""
    return torch.cat([value.detach().flatten().double() for value in model.state_dict().values()])


def parameter_vector(model):
    """Concatenate all parameters."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
