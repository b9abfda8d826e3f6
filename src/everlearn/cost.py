"""What a run costs: seconds by purpose, peak memory, parameters, bytes of method state."""

from __future__ import annotations

import ctypes
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Clock:
    """Seconds spent, by purpose."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, purpose: str) -> Iterator[None]:
        """Count what runs inside for this purpose."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] += time.perf_counter() - start

    def add(self, seconds: dict[str, float]) -> None:
        """Count what another clock has measured."""
        for purpose, spent in seconds.items():
            self.seconds[purpose] += spent


def reset_peak_memory(device: torch.device) -> int:
    """Start measuring the peak anew, where the system can, and return what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        try:
            _give_back()
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is resident now
        except OSError:
            return 0
    return peak_memory(device)


def peak_memory(device: torch.device) -> int:
    """Most bytes held at once: on a GPU by torch, on the CPU by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return _peak_of_the_process()


def _give_back() -> None:
    """Memory that earlier runs have freed goes back to the system, or a run in it would seem to need none."""
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def _peak_of_the_process() -> int:
    """Where the system cannot start anew: since the process began; 0 where it does not tell at all."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def state_bytes(state: dict[str, Any]) -> int:
    """Bytes of all tensors in a state.

    >>> state_bytes({"anchor": {"weight": torch.zeros(10, 10)}, "tasks": 3})
    400
    """
    return sum(v.numel() * v.element_size() for v in tree_leaves(state) if isinstance(v, Tensor))
