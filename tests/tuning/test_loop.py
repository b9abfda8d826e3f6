"""Tuning in a training loop of the user."""

import multiprocessing
import os
import signal
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import everlearn
from everlearn import DER, EWC, MAS, SI, LwF, Method, streams, tune
from everlearn.trainer import CheckpointEvery, Training
from everlearn.tuning import Search
from tests.tuning.studies import NEEDS_FORK, Harmful, digits

STRENGTHS = {"fields": {"strength": (1, 1e6)}, "prune": False}


def make_model():
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
    )


def make_tasks(generator=None, num_tasks=3):
    """Pairs of loaders: odd against even digits, each task with its own permutation of the pixels."""
    (x, y), _ = streams.digits_data()
    x = x.flatten(1)
    tasks = []
    for seed in range(num_tasks):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        data = TensorDataset(x[:, order], y % 2)
        train = DataLoader(torch.utils.data.Subset(data, range(160)), 32, shuffle=True, generator=generator)
        tasks.append((train, DataLoader(torch.utils.data.Subset(data, range(160, 400)), 256)))
    return tasks


def train(model, method, task):
    """A loop that calls the hooks."""
    loader, _ = task
    model.train()
    method.begin_task(model, loader)
    optimizer = torch.optim.Adam([*model.parameters(), *method.parameters()], lr=0.01)
    for x, y in loader:
        loss = method.loss(model, everlearn.Batch(x, y))
        optimizer.zero_grad()
        loss.backward()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
    method.end_task(model, loader)


def train_attached(model, method, task):
    """A loop that the method is attached to."""
    loader, _ = task
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    attached = method.attach(model, optimizer)
    for x, y in loader:
        outputs = model(x)
        loss = attached.loss(F.cross_entropy(outputs, y), x, y, outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    method.end_task(model, loader)
    attached.remove()


def evaluate(model, method, task):
    _, loader = task
    torch.rand(1)  # evaluation must not influence training
    return float(np.mean([(method.predict(model, x).argmax(1) == y).float().mean() for x, y in loader]))


def train_alone(method, train=train, seed=0, generator=None):
    """The scores of a naive loop over all tasks, and the trained model."""
    tasks = make_tasks(generator)
    torch.manual_seed(seed)
    model = make_model()
    rows = []
    for i, task in enumerate(tasks):
        train(model, method, task)
        states = torch.get_rng_state()
        rows.append([evaluate(model, method, task) for task in tasks[: i + 1]])
        torch.set_rng_state(states)
    return rows, model


@dataclass(eq=False)
class EarlyDecay(Method):
    """Weight decay that acts in the first task, too."""

    rate: Annotated[float, Search(1e-4, 1)] = 0.1

    def penalty(self, model, batch=None, outputs=None):
        return self.rate * sum(p.square().sum() for p in model.parameters())


CASES = [
    (EWC(), train, "strength"),
    (EWC(mode="online"), train_attached, "strength"),
    (SI(), train, "damping"),
    (MAS() + LwF(), train_attached, "MAS.strength"),
    (Harmful(), train, "harm"),
    (EarlyDecay(), train, "rate"),
    (DER(20), train, "alpha"),
]


@pytest.mark.parametrize(("method", "loop", "name"), CASES, ids=[f"{case[2]}-{case[1].__name__}" for case in CASES])
def test_trials_equal_naive_loop_bit_for_bit(method, loop, name, tmp_path, monkeypatch):
    models = []
    tasks = make_tasks()

    def keep_model(model, method, task):
        if task is tasks[-1]:
            models.append(model)
        return evaluate(model, method, task)

    study = tune(
        make_model, method, tasks, train=loop, evaluate=keep_model, fields={name: None}, trials=3, prune=False,
        out=tmp_path,
    )  # fmt: skip
    assert len({str(trial.values) for trial in study.trials}) == len(models) == 3
    for trial, model in zip(study.trials, models, strict=True):
        trial_method = everlearn.tuning.search_space.with_values(method, study.dimensions, [trial.values[name]])
        rows, naive_model = train_alone(trial_method, loop)
        assert trial.score == pytest.approx(np.mean(rows[-1]), abs=1e-12)
        assert trial.old == pytest.approx(np.mean(rows[-1][:-1]), abs=1e-12)
        assert trial.new == pytest.approx(np.mean([row[-1] for row in rows]), abs=1e-12)
        for p, q in zip(model.parameters(), naive_model.parameters(), strict=True):
            assert torch.equal(p, q)
    assert study.best.score == max(trial.score for trial in study.trials)
