"""Streams, networks and methods for the tests of tuning."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch

from everlearn import EWC, Method, streams
from everlearn.core.hyperparameters import Range
from everlearn.trainer import CheckpointEvery
from everlearn.trainer.settings import Training
from everlearn.tuning import Search, tune

pytest.importorskip("optuna")
TRAINING = Training(epochs=2, batch_size=32)
CHECKPOINTS = CheckpointEvery(steps=2)
NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def digits(scenario="domain"):
    (x, y), (x_test, y_test) = streams.digits_data()
    train = (x[:600], y[:600])
    test = (x_test[:200], y_test[:200])
    return streams.split(train, test, tasks=3, scenario=scenario, class_order=range(6), valid=0.2)


def make_net(inputs, outputs):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.Dropout(0.3), torch.nn.Linear(20, outputs)
    )


@dataclass(eq=False)
class Harmful(Method):
    """Adds noise to the weights after every task."""

    harm: Annotated[float, Range(0), Search(0, 1, log=False, late=True)] = 0.0

    def end_task(self, model, task):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(self.harm * torch.randn_like(p))


def use_one_step(allowed):
    remaining = Path(allowed).read_bytes() if allowed else b""
    if remaining:
        Path(allowed).write_bytes(remaining[1:])
        if len(remaining) == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(eq=False)
class KilledEWC(EWC):
    """Kills its process after as many steps as a file has bytes."""

    allowed: str = ""

    def after_step(self, model):
        super().after_step(model)
        use_one_step(self.allowed)


def run_study(folder, allowed, workers=1, method=KilledEWC):
    settings = {"trials": 3, "prune": False, "training": TRAINING, "fields": {"strength": (1, 1e6)}}
    return tune(
        make_net, method(allowed=allowed), digits(), workers=workers, checkpoint=CHECKPOINTS, out=folder, **settings
    )
