"""The UCI handwritten digits, shipped with the package: a real data set that is always there.

1,797 images of 8 × 8 pixels: Alpaydin, E. & Kaynak, C. (1998), Optical Recognition of Handwritten Digits, UCI Machine
Learning Repository, doi 10.24432/C50P49, licensed CC BY 4.0.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from everlearn.stream import Scenario, Stream
from everlearn.streams.build import permuted, rotated, split
from everlearn.streams.chunks import online

Pair = tuple[Tensor, Tensor]


def load() -> tuple[Pair, Pair]:
    """Training and test pairs (x, y): images of shape (1, 8, 8) in [0, 1]; every fifth image of each digit is for tests.

    >>> (x, y), (x_test, y_test) = load()
    >>> x.shape, x_test.shape
    (torch.Size([1442, 1, 8, 8]), torch.Size([355, 1, 8, 8]))
    """
    (x, y), (x_test, y_test) = _read()
    return (x.clone(), y.clone()), (x_test.clone(), y_test.clone())  # what the caller changes stays the caller's


@cache
def _read() -> tuple[Pair, Pair]:
    with files("everlearn.streams").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        x = torch.from_numpy(stored["images"]).float().unsqueeze(1) / 16
        y = torch.from_numpy(stored["labels"]).long()
    one_hot = torch.nn.functional.one_hot(y)
    occurrence = (one_hot.cumsum(0) * one_hot).sum(1) - 1  # how many images of the same digit came before
    test = occurrence % 5 == 4
    return (x[~test], y[~test]), (x[test], y[test])


def digits(scenario: Scenario = "class", tasks: int = 5, seed: int = 0, valid: float = 0.0) -> Stream:
    """Split digits: two digits per task."""
    return split(*load(), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="digits")


def permuted_digits(scenario: Scenario = "domain", tasks: int = 10, seed: int = 0, valid: float = 0.0) -> Stream:
    """All ten digits per task, pixels in another order each time."""
    return permuted(*load(), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="permuted-digits")


def rotated_digits(scenario: Scenario = "domain", tasks: int = 5, seed: int = 0, valid: float = 0.0) -> Stream:
    """All ten digits per task, turned by another angle each time."""
    return rotated(*load(), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name="rotated-digits")


def online_digits(scenario: Scenario = "class", tasks: int = 5, seed: int = 0, valid: float = 0.0) -> Stream:
    """Split digits in chunks of ten images that come once."""
    return online(digits(scenario, tasks, seed, valid), chunk=10, seed=seed)
