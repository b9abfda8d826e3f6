"""CLINC150 as a stream: intent classification in ten domains (Larson et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.runtime.randomness import generator
from everlearn.sources import load
from everlearn.streams.bag_of_words import bag
from everlearn.streams.builders import split


def clinc150(
    scenario: Scenario = "class",
    tasks: int = 10,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    features: Literal["bag"] | Callable[[Sequence[str]], Tensor] = "bag",
) -> Stream:
    """Classify the intents of sentences: ten domains (banking, travel, …) of fifteen intents, one domain per task.

    In the domain-incremental scenario the label of an intent is its index within its domain.

    Args:
        scenario: "task", "domain" or "class".
        tasks: number of tasks; with 5, two domains per task; with 150, one intent per task.
        seed: seed of the order of the domains and of the validation split; seed 0 keeps the published order.
        valid: share of each task's training examples for validation; the published validation sentences are not used.
        root: folder of the data sets; by default EVERLEARN_DATA.
        features: "bag", hashed words and pairs of words (2,048 features), or a function from a list of sentences to a
            tensor with one row for each.
    """
    data = load("clinc150", root)
    (texts, y), (test_texts, y_test) = data
    extract_features = bag if features == "bag" else features
    if not callable(extract_features):
        raise TypeError(f"features are 'bag' or a function from a list of sentences to a tensor, got {features!r}.")

    domains = list(data.groups)
    if seed != 0:
        order = torch.randperm(len(domains), generator=generator(seed, "stream"))
        domains = [domains[i] for i in order.tolist()]

    stream = split(
        (extract_features(texts), y),
        (extract_features(test_texts), y_test),
        tasks=tasks,
        scenario=scenario,
        seed=seed,
        class_order=[intent for domain in domains for intent in data.groups[domain]],
        valid=valid,
        name="clinc150",
    )

    # Tasks and domains coincide only if there are equally many.
    if tasks == len(domains):
        for task, domain in zip(stream, domains, strict=False):
            task.name = domain

    feature_name = getattr(extract_features, "__name__", type(extract_features).__name__)
    stream.settings |= {"domains": domains, "features": feature_name}
    return stream
