"""One seed, many independent random sequences: stream, model, batches, augmentation and memory never share one."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Run code on random states of its own (torch on the CPU and the device, numpy, random) and put the old ones back."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = [device] if device is not None and device.type == "cuda" else []
    reseed(seed)
    try:
        with torch.random.fork_rng(devices=cuda, enabled=bool(cuda)):
            if cuda:
                torch.cuda.manual_seed(seed)
            yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
