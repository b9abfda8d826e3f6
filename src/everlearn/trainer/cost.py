"""Costs of a run: seconds by purpose, peak memory, bytes of method state."""

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
        """Add the time of the code inside to a purpose."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[purpose] += time.perf_counter() - start

    def add(self, seconds: dict[str, float]) -> None:
        """Add the seconds of another clock."""
        for purpose, spent in seconds.items():
            self.seconds[purpose] += spent


def reset_peak_memory(device: torch.device) -> int:
    """Reset the peak to the current memory, where the system can, and return it in bytes; else return 0."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return peak_memory(device)
    try:
        _trim_heap()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: reset VmHWM to the resident size
    except OSError:
        return 0
    return peak_memory(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated by torch on a GPU, resident in the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return _peak_since_start()


def _trim_heap() -> None:
    """Return freed memory to the system; otherwise a run that reuses it would seem to need none."""
    with suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _peak_since_start() -> int:
    """Return the peak since the process started, for systems without a reset; 0 on Windows."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    # macOS counts bytes, other systems kilobytes.
    return peak if sys.platform == "darwin" else 1024 * peak


def state_bytes(state: dict[str, Any]) -> int:
    """Sum the bytes of all tensors in a state.

    >>> state_bytes({"anchor": {"weight": torch.zeros(10, 10)}, "tasks": 3})
    400
    """
    return sum(v.numel() * v.element_size() for v in tree_leaves(state) if isinstance(v, Tensor))
