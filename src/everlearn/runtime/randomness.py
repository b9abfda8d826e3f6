"""One seed, many independent random sequences: stream, model, batches, augmentation and memory never share one."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A seed for one purpose, independent of those for all others.

    >>> derive(0, "batches", 3) == derive(0, "batches", 3) != derive(0, "model")
    True
    """
    digest = hashlib.blake2b(repr((operator.index(seed), *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes 63 bits


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A torch generator of its own for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def reseed(seed: int) -> None:
    """Set the global random states: torch on the CPU, numpy, random."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def states(device: torch.device | None = None) -> tuple[Any, ...]:
    """The global random states as they are: torch on the CPU and the device, numpy, random."""
    cuda = device if device is not None and device.type == "cuda" else None
    own = None if cuda is None else (cuda, torch.cuda.get_rng_state(cuda))
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), own


def restore(before: tuple[Any, ...]) -> None:
    """Put random states back."""
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])
    if before[3] is not None:
        torch.cuda.set_rng_state(before[3][1], before[3][0])


def pack(before: tuple[Any, ...]) -> list[Any]:
    """Random states as tensors and numbers, for a file."""
    cpu, (kind, keys, *rest), python, own = before
    return [cpu, [kind, torch.from_numpy(keys.astype(np.int64)), *rest], list(python[1]), python[2], own and own[1]]


def unpack(content: list[Any], device: torch.device | None = None) -> tuple[Any, ...]:
    """Random states from such a file."""
    cpu, (kind, keys, *rest), numbers, gauss, own = content
    numpys = (kind, keys.numpy().astype(np.uint32), *rest)
    return cpu, numpys, (random.getstate()[0], tuple(numbers), gauss), own if own is None else (device, own)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Run code on random states of its own (torch on the CPU and the device, numpy, random) and put the old ones back."""
    before = states(device)
    reseed(seed)
    if before[3] is not None:
        with torch.cuda.device(before[3][0]):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        restore(before)
