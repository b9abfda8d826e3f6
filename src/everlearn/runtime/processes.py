"""Processes that do not outlive who has started them."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Have this process, one of ``multiprocessing``'s, end with the one that has started it, in whatever way that ends.

    Its parent by the system's count may be a server that only makes processes, and outlives who has asked for them.
    """
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
