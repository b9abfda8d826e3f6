"""Independent random sequences from one seed: stream, model, batches, augmentation and memory never share one."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomStates(NamedTuple):
    """Global random states of torch, numpy and Python.

    Args:
        cpu: state of torch on the CPU.
        numpy: state of ``numpy.random``.
        python: state of ``random``.
        cuda: a CUDA device and its state, if there is one.
    """

    cpu: torch.Tensor
    numpy: Any
    python: tuple[Any, ...]
    cuda: tuple[Any, torch.Tensor] | None


def derive(seed: int, *purpose: str | int) -> int:
    """Derive a seed for one purpose, independent of those for all other purposes.

    >>> derive(0, "batches", 3) == derive(0, "batches", 3) != derive(0, "model")
    True
    """
    digest = hashlib.blake2b(repr((operator.index(seed), *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch accepts 63 bits


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Create a torch generator for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def reseed(seed: int) -> None:
    """Seed the global random states: torch on the CPU, numpy, random."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def get_random_states(device: torch.device | None = None) -> RandomStates:
    """Return the global random states: torch on the CPU and the device, numpy, random."""
    cuda = None
    if device is not None and device.type == "cuda":
        cuda = (device, torch.cuda.get_rng_state(device))
    return RandomStates(torch.get_rng_state(), np.random.get_state(), random.getstate(), cuda)


def restore_random_states(saved: RandomStates) -> None:
    """Restore global random states."""
    torch.set_rng_state(saved.cpu)
    np.random.set_state(saved.numpy)
    random.setstate(saved.python)
    if saved.cuda is not None:
        device, state = saved.cuda
        torch.cuda.set_rng_state(state, device)


def pack_random_states(saved: RandomStates) -> list[Any]:
    """Convert random states to tensors and numbers, for a file."""
    algorithm, keys, *position = saved.numpy
    numpy_state = [algorithm, torch.from_numpy(keys.astype(np.int64)), *position]
    _, numbers, next_gauss = saved.python
    cuda_state = None if saved.cuda is None else saved.cuda[1]
    return [saved.cpu, numpy_state, list(numbers), next_gauss, cuda_state]


def unpack_random_states(content: list[Any], device: torch.device | None = None) -> RandomStates:
    """Convert the content of such a file back to random states."""
    cpu_state, (algorithm, keys, *position), numbers, next_gauss, cuda_state = content
    numpy_state = (algorithm, keys.numpy().astype(np.uint32), *position)
    python_state = (random.getstate()[0], tuple(numbers), next_gauss)
    cuda = None if cuda_state is None else (device, cuda_state)
    return RandomStates(cpu_state, numpy_state, python_state, cuda)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Run code with freshly seeded global random states (torch, numpy, random), then restore the previous ones."""
    saved = get_random_states(device)
    reseed(seed)
    if saved.cuda is not None:
        with torch.cuda.device(saved.cuda[0]):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        restore_random_states(saved)
