"""What people ask an assistant: the 150 intents of CLINC150 in ten domains (Larson et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from everlearn.seeds import generator
from everlearn.sources import load
from everlearn.stream import Scenario, Stream
from everlearn.streams.build import split
from everlearn.streams.words import bag


def clinc150(
    scenario: Scenario = "class",
    tasks: int = 10,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    features: Literal["bag"] | Callable[[Sequence[str]], Tensor] = "bag",
) -> Stream:
    """Intents from sentences: ten domains (banking, travel, …) of fifteen intents, a domain per task.

    Domain-incremental, an intent's label is its place within its domain.

    Args:
        scenario: "task", "domain" or "class".
        tasks: with 5, two domains per task; with 150, an intent per task.
        seed: of the order of the domains and of the validation share; seed 0 keeps the published order.
        valid: share of each task's training examples held back; the published validation sentences are not used.
        root: the folder of data sets; by default EVERLEARN_DATA.
        features: how sentences become numbers: "bag", hashed words and pairs of words (2,048 numbers a sentence), or a
            function from a list of sentences to a tensor with a row for each.
    """
    (texts, y), (texts_test, y_test) = data = load("clinc150", root)
    numbers = bag if features == "bag" else features
    if not callable(numbers):
        raise TypeError(f"features are 'bag' or a function from a list of sentences to a tensor, got {features!r}.")
    domains = list(data.groups)
    if seed != 0:
        domains = [domains[i] for i in torch.randperm(len(domains), generator=generator(seed, "stream")).tolist()]
    stream = split(
        (numbers(texts), y),
        (numbers(texts_test), y_test),
        tasks=tasks,
        scenario=scenario,
        seed=seed,
        class_order=[intent for domain in domains for intent in data.groups[domain]],
        valid=valid,
        name="clinc150",
    )
    for task, domain in zip(stream, domains if tasks == len(domains) else [], strict=False):
        task.name = domain
    stream.settings |= {"domains": domains, "features": getattr(numbers, "__name__", type(numbers).__name__)}
    return stream
