"""Run a command in several processes that torchrun starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def run_distributed(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; under torchrun as one of several processes, of which rank 0 prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return command()

    # Only here, so that the command line starts without torch.
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        # 'cuda' then means a different GPU in each process.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives

    code = command()
    # A process that exits early would close the connections of the others. After a failure there is no waiting.
    if code == 0:
        dist.barrier()
    dist.destroy_process_group()
    return code
