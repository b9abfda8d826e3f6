"""Terminate worker processes when their parent exits."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Terminate this ``multiprocessing`` worker when the process that created it ends, in whatever way.

    The operating system's parent may be a fork server, which outlives the process that requested the worker.
    """
    parent = multiprocessing.parent_process()

    def wait_for_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()
