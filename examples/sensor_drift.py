"""Regression on sensors that age: your own tasks, a Gaussian likelihood, and what is lost on the old sensor."""

import torch

import everlearn
from everlearn import ER, EWC, Gaussian, Method, nets, streams
from everlearn.core.chain import label


def sensor(age, seed):
    """A reading drifts with age; the quantity behind it stays the same."""
    quantity = torch.rand(400, 1, generator=torch.Generator().manual_seed(seed))
    reading = torch.cat([quantity**2 + 0.3 * age, quantity * (1 - 0.2 * age)], 1)
    return reading, quantity


tasks = [(sensor(age, seed=age), sensor(age, seed=100 + age)) for age in range(4)]
stream = streams.from_tasks(tasks, scenario="domain", likelihood=Gaussian(), name="sensor")
for method in (Method(), EWC(1.0), ER(40)):
    result = everlearn.run(lambda: nets.mlp(2, 1, hidden=(32,)), method, stream, epochs=30, batch_size=32)
    print(f"{label(method)}: squared error per sensor, new to old: {(-result.accuracy[-1][::-1]).round(4)}")
