"""Digits from two places: the same question of other images."""

from __future__ import annotations

from pathlib import Path

from everlearn.sources.published import raw
from everlearn.stream import Scenario, Stream
from everlearn.streams.parts import Fitted
from everlearn.streams.sets import a_task_per_set, first_of


def digits_domains(
    scenario: Scenario = "domain",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    size: int = 28,
) -> Stream:
    """MNIST, then USPS: a shift of domain, the images of USPS scaled to MNIST's 28 × 28 pixels (or both to ``size``)."""
    sets = {name: raw(name, root) for name in first_of(["mnist", "usps"], tasks, "digits-domains")}
    stream = a_task_per_set(sets, Fitted(1, size), scenario=scenario, seed=seed, valid=valid, name="digits-domains")
    stream.settings["size"] = size
    return stream
