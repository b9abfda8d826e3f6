"""Regression on aging sensors: your own tasks, a Gaussian likelihood, and the error on the oldest sensor."""

import torch

import everlearn
from everlearn import ER, EWC, Gaussian, Method, nets, streams
from everlearn.core.chain import label


def read_sensor(age, seed):
    """Return readings that drift with age, and the measured quantity, which does not."""
    quantity = torch.rand(400, 1, generator=torch.Generator().manual_seed(seed))
    reading = torch.cat([quantity**2 + 0.3 * age, quantity * (1 - 0.2 * age)], 1)
    return reading, quantity


def make_model():
    return nets.mlp(2, 1, hidden=(32,))


tasks = [(read_sensor(age, seed=age), read_sensor(age, seed=100 + age)) for age in range(4)]
stream = streams.from_tasks(tasks, scenario="domain", likelihood=Gaussian(), name="sensor")
for method in (Method(), EWC(), ER(40)):
    result = everlearn.run(make_model, method, stream, epochs=30, batch_size=32)
    errors = -result.accuracy[-1][::-1]  # the score of a regression is the negative squared error
    print(f"{label(method)}: squared error per sensor, from newest to oldest task: {errors.round(4)}")
