"""Gas sensor drift: a domain-incremental stream with natural distribution shift (Vergara et al., 2012)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from everlearn.core.data_source import Arrays
from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.runtime.randomness import generator
from everlearn.sources import Data, load
from everlearn.streams.dataset_sequence import stream_of_datasets, take_first

MONTHS = {1: "1-2", 2: "3-10", 3: "11-13", 4: "14-15", 5: "16", 6: "17-20", 7: "21", 8: "22-23", 9: "24-30", 10: "36"}


def gas_drift(
    scenario: Scenario = "domain",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    test: float = 0.2,
) -> Stream:
    """Classify six gases with 16 aging sensors: one task per batch of months, in chronological order.

    The 128 features are standardized with the mean and standard deviation of the first task's training examples, so
    that nothing of later months leaks into earlier tasks. In task- and class-incremental streams each batch has
    separate classes.

    Args:
        scenario: "domain", "task" or "class".
        tasks: number of batches to use, from the first; by default all.
        seed: seed of the test and validation splits.
        valid: share of each task's training examples to use for validation.
        root: folder of the data sets; by default EVERLEARN_DATA.
        test: share of each batch to use for testing.
    """
    if not 0 < test < 1:
        raise ValueError(f"The share of measurements for tests must lie between 0 and 1, got {test}.")
    data = load("gas_drift", root)
    if data.times is None:
        raise ValueError("The measurements have no batch numbers, so their chronological order is unknown.")

    # Each batch is split again, because the share and the seed may differ from those of the source.
    (x, y), (x_test, y_test) = data
    features = torch.cat([x, x_test])
    gases = torch.cat([y, y_test])
    batches = torch.cat(data.times)

    datasets = {}
    for batch in take_first(batches.unique().tolist(), tasks, "gas-drift"):
        rows = (batches == batch).nonzero().flatten()
        order = rows[torch.randperm(len(rows), generator=generator(seed, "stream", "test", batch))]
        num_test = max(1, round(test * len(rows)))
        test_rows = order[:num_test].sort().values
        train_rows = order[num_test:].sort().values

        months = MONTHS[batch]
        plural = "s" * ("-" in months)
        datasets[f"batch {batch} (month{plural} {months})"] = Data(
            (features[train_rows], gases[train_rows]), (features[test_rows], gases[test_rows]), names=data.names
        )

    stream = stream_of_datasets(datasets, None, scenario=scenario, seed=seed, valid=valid, name="gas-drift")
    _standardize(stream)
    stream.settings["test"] = test
    return stream


def _standardize(stream: Stream) -> None:
    """Standardize all tasks in place with the statistics of the first task's training examples."""
    reference = stream[0].train.x
    mean, std = reference.mean(0), reference.std(0)
    std[std == 0] = 1
    for task in stream:
        for split_name in ("train", "valid", "test"):
            source: Arrays | None = getattr(task, split_name)
            if source is not None:
                setattr(task, split_name, replace(source, x=(source.x - mean) / std))
