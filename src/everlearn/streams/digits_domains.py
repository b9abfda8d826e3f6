"""Digits from two domains: MNIST, then USPS."""

from __future__ import annotations

from pathlib import Path

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.sources.registry import load_raw
from everlearn.streams.dataset_sequence import stream_of_datasets, take_first
from everlearn.streams.subset import ImageResizer


def digits_domains(
    scenario: Scenario = "domain",
    tasks: int | None = None,
    seed: int = 0,
    valid: float = 0.0,
    root: str | Path | None = None,
    size: int = 28,
) -> Stream:
    """Load MNIST, then USPS: a domain shift, with all images resized to ``size`` × ``size`` pixels."""
    dataset_names = take_first(["mnist", "usps"], tasks, "digits-domains")
    datasets = {name: load_raw(name, root) for name in dataset_names}
    stream = stream_of_datasets(
        datasets, ImageResizer(1, size), scenario=scenario, seed=seed, valid=valid, name="digits-domains"
    )
    stream.settings["size"] = size
    return stream
