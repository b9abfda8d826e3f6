"""Limit how much a data file may unpack to: no more than the memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_MEMORY = 16 * 2**30  # bytes, if the system does not report its memory


def machine_memory() -> int:
    """Return the physical memory of this machine in bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return DEFAULT_MEMORY


def check_fits(size: int, path: str | Path) -> None:
    """Raise if the unpacked content of a file would not fit into memory.

    Args:
        size: bytes of the unpacked content.
        path: the file, for the message.
    """
    limit = machine_memory()
    if size > limit:
        raise ValueError(
            f"{path} unpacks to {size:,} bytes, but this machine has a memory of {limit:,}: "
            "the file is damaged, or must be split into parts."
        )
