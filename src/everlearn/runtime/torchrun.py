"""A command that several processes run as one, as torchrun starts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist


def together(command: Callable[[], int]) -> int:
    """Run a command; under torchrun together with the other processes, of which the first one speaks."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return command()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # so that 'cuda' is another one in each process
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    code = command()
    if code == 0:
        dist.barrier()  # who leaves early would take the others' connections along; after a failure nobody waits
    dist.destroy_process_group()
    return code
