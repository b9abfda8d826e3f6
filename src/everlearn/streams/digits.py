"""The UCI handwritten digits, shipped with the package, for tests and examples without a download.

1,797 images of 8 × 8 pixels: Alpaydin, E. & Kaynak, C. (1998), Optical Recognition of Handwritten Digits, UCI Machine
Learning Repository, doi 10.24432/C50P49, licensed CC BY 4.0.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.runtime.randomness import generator
from everlearn.streams.builders import permuted, rotated, split
from everlearn.streams.from_tasks import from_tasks
from everlearn.streams.online import online
from everlearn.streams.subset import Permutation

Pair = tuple[Tensor, Tensor]


def load() -> tuple[Pair, Pair]:
    """Load training and test pairs (x, y): images (1, 8, 8) in [0, 1]; every fifth image of each digit is for testing.

    >>> (x, y), (x_test, y_test) = load()
    >>> x.shape, x_test.shape
    (torch.Size([1442, 1, 8, 8]), torch.Size([355, 1, 8, 8]))
    """
    (x, y), (x_test, y_test) = _read()
    # The tensors are cached, so callers get copies that they may modify.
    return (x.clone(), y.clone()), (x_test.clone(), y_test.clone())


@cache
def _read() -> tuple[Pair, Pair]:
    with files("everlearn.streams").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        x = torch.from_numpy(stored["images"]).float().unsqueeze(1) / 16
        y = torch.from_numpy(stored["labels"]).long()

    is_test = _count_earlier(y) % 5 == 4
    return (x[~is_test], y[~is_test]), (x[is_test], y[is_test])


def _count_earlier(y: Tensor) -> Tensor:
    """Count how many images of the same digit come before each image."""
    one_hot = torch.nn.functional.one_hot(y)
    return (one_hot.cumsum(0) * one_hot).sum(1) - 1


def digits(scenario: Scenario = "class", tasks: int = 5, seed: int = 0, valid: float = 0.0) -> Stream:
    """Split digits: two digits per task."""
    return split(*load(), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="digits")


def permuted_digits(scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0) -> Stream:
    """Permuted digits: all ten digits per task, with another pixel permutation each."""
    return permuted(*load(), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="permuted-digits")


def disjoint_digits(scenario: Scenario = "task", tasks: int = 4, seed: int = 0, valid: float = 0.0) -> Stream:
    """Permuted digits with disjoint images: a share of the training images per task, and another permutation each."""
    (x, y), (x_test, y_test) = load()
    # Count the images of the same digit before each image in a random order: every task gets its share of each digit.
    order = torch.randperm(len(y), generator=generator(seed, "stream", "shares"))
    share = torch.empty_like(y)
    share[order] = _count_earlier(y[order]) % tasks

    pairs = []
    for t in range(tasks):
        permute = Permutation(torch.randperm(64, generator=generator(seed, "stream", t)))
        pairs.append(((permute(x[share == t]), y[share == t]), (permute(x_test), y_test)))
    labels: Literal["own", "shared"] = "shared" if scenario == "domain" else "own"
    return from_tasks(pairs, scenario=scenario, labels=labels, seed=seed, valid=valid, name="disjoint-digits")


def rotated_digits(scenario: Scenario = "domain", tasks: int = 5, seed: int = 0, valid: float = 0.0) -> Stream:
    """Rotated digits: all ten digits per task, rotated by another angle each."""
    return rotated(*load(), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="rotated-digits")


def online_digits(scenario: Scenario = "class", tasks: int = 5, seed: int = 0, valid: float = 0.0) -> Stream:
    """Online split digits: chunks of ten images, each seen once."""
    return online(digits(scenario, tasks, seed, valid), chunk=10, seed=seed)
