"""How much a data file may unpack to: no more than this machine can hold."""

from __future__ import annotations

import os
from pathlib import Path

LARGEST = 16 * 2**30  # bytes, where the machine does not say how much memory it has


def memory() -> int:
    """Bytes of this machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return LARGEST


def check_fits(size: int, path: str | Path) -> None:
    """Refuse a file whose content would not fit into memory."""
    if size > (most := memory()):
        raise ValueError(
            f"{path} unpacks to {size:,} bytes, but this machine has a memory of {most:,}: it is damaged, or must be cut into parts."
        )
