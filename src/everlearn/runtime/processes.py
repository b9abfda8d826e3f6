"""Worker processes: how many there may be, and that they end with their parent."""

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


def count_cores() -> int:
    """Count the cores that this process may use; under torchrun 1, because its processes share each run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return 1
    # Not every system can bind a process to some of its cores.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
