"""Gas sensors that age: a domain-incremental stream whose drift is real (Vergara et al., 2012)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from everlearn.data import Arrays
from everlearn.seeds import generator
from everlearn.sources import Data, load
from everlearn.stream import Scenario, Stream
from everlearn.streams.sets import a_task_per_set, first_of

MONTHS = {1: "1-2", 2: "3-10", 3: "11-13", 4: "14-15", 5: "16", 6: "17-20", 7: "21", 8: "22-23", 9: "24-30", 10: "36"}


def gas_drift(
    scenario: Scenario = "domain",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    test: float = 0.2,
) -> Stream:
    """Six gases told apart by 16 ageing sensors: a task per batch of months, in the order of time.

    The 128 features are standardised by mean and deviation of the first task's training examples alone: who starts to
    measure knows nothing of the months to come. Task- and class-incremental streams have classes of their own per batch.

    Args:
        scenario: "domain", "task" or "class".
        tasks: only the first so many batches.
        seed: of which measurements of a batch are for tests, and of the validation share.
        valid: share of each task's training examples held back for choosing hyper-parameters.
        root: the folder of data sets; by default EVERLEARN_DATA.
        test: share of each batch for tests.
    """
    if not 0 < test < 1:
        raise ValueError(f"The share of measurements for tests lies between 0 and 1, got {test}.")
    (x, y), (x_test, y_test) = data = load("gas_drift", root)
    if data.times is None:
        raise ValueError("The measurements come without their batches, so that they have no order of time.")
    features, gas, times = torch.cat([x, x_test]), torch.cat([y, y_test]), torch.cat(data.times)
    sets = {}
    for batch in first_of(times.unique().tolist(), tasks, "gas-drift"):
        rows = (times == batch).nonzero().flatten()
        order = rows[torch.randperm(len(rows), generator=generator(seed, "stream", "test", batch))]
        held = max(1, round(test * len(rows)))
        own, others = order[:held].sort().values, order[held:].sort().values
        months = MONTHS[batch]
        name = f"batch {batch} (month{'s' * ('-' in months)} {months})"
        sets[name] = Data((features[others], gas[others]), (features[own], gas[own]), names=data.names)
    stream = a_task_per_set(sets, None, scenario=scenario, seed=seed, valid=valid, name="gas-drift")
    _standardise(stream)
    stream.settings["test"] = test
    return stream


def _standardise(stream: Stream) -> None:
    first = stream[0].train.x
    mean, deviation = first.mean(0), first.std(0)
    deviation[deviation == 0] = 1
    for task in stream:
        for which in ("train", "valid", "test"):
            source: Arrays | None = getattr(task, which)
            if source is not None:
                setattr(task, which, replace(source, x=(source.x - mean) / deviation))
