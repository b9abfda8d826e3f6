"""Collective operations over the processes of ``torch.distributed``; with one process they do nothing.

Every process has the full model and its share of every batch. Gradients are averaged after ``backward()`` and before a
method edits them, over the parameters that exist at that moment. A head that a task has added is therefore included; a
``DistributedDataParallel`` wrapper created before the head would silently ignore it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Return the number of processes."""
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def rank() -> int:
    """Return the number of this process, counted from 0."""
    if world_size() > 1:
        return dist.get_rank()
    return 0


def all_reduce_(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor with its sum over all processes, in place."""
    if world_size() > 1:
        _exchange_flattened(tensors, dist.all_reduce)


def sum_across(number: float) -> float:
    """Return the sum of a number over all processes."""
    if world_size() == 1:
        return number
    total = torch.tensor([number], dtype=torch.float64, device=_message_device())
    all_reduce_([total])
    return float(total)


def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor with that of process 0, in place."""
    if world_size() > 1:
        _exchange_flattened(tensors, partial(dist.broadcast, src=0))


def broadcast_object(value: Any) -> Any:
    """Return the object of process 0 in every process."""
    if world_size() == 1:
        return value
    buffer = [value]
    dist.broadcast_object_list(buffer, 0)
    return buffer[0]


def initial_seed() -> int:
    """Return torch's seed of process 0 in every process, for random numbers that all processes must agree on."""
    return int(broadcast_object(torch.initial_seed()))


def all_gather_object(value: Any) -> list[Any]:
    """Return the objects of all processes, in every process."""
    if world_size() == 1:
        return [value]
    gathered = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor], weight: float, loss: float) -> float:
    """Replace ``p.grad`` with the weighted mean over all processes and return the mean loss.

    A parameter without a gradient in any process keeps ``grad = None``, so that optimizers skip it. Loss and gradients
    of a process with weight 0, which may be NaN, are ignored.

    Args:
        parameters: the parameters, in the same order in every process.
        weight: weight of this process, usually its number of examples.
        loss: loss of this process.

    Returns:
        The weighted mean loss; NaN if all weights are 0.
    """
    if world_size() == 1:
        return loss

    # One message carries the total weight, the weighted loss, and how many processes have each gradient.
    weighted_loss = weight * loss if weight else 0.0
    has_gradient = [p.grad is not None for p in parameters]
    sums = torch.tensor([weight, weighted_loss, *has_gradient], dtype=torch.float64, device=_message_device())
    dist.all_reduce(sums)
    total_weight = float(sums[0])
    if not total_weight:
        return math.nan

    gradients = []
    for p, gradient_count in zip(parameters, sums[2:].tolist(), strict=True):
        if not gradient_count:
            continue
        if p.grad is None or not weight:
            p.grad = torch.zeros_like(p)
        else:
            p.grad.mul_(weight / total_weight)
        gradients.append(p.grad)
    all_reduce_(gradients)
    return float(sums[1]) / total_weight


def shard_batches(order: Tensor, size: int) -> Tensor:
    """Select the examples of this process: its share of each joint batch.

    All processes get equally many examples; the remainder of a last batch that cannot be divided equally is dropped.

    Args:
        order: indices of the examples, in the order of training.
        size: examples per batch and process.
    """
    shares = []
    for batch in order.split(size * world_size()):
        divisible_length = len(batch) // world_size() * world_size()
        shares.append(batch[:divisible_length].tensor_split(world_size())[rank()])
    return torch.cat(shares)


def _message_device() -> str:
    """Return the device of messages: NCCL sends none from the CPU."""
    if dist.get_backend() == "nccl":
        return "cuda"
    return "cpu"


@torch.no_grad()
def _exchange_flattened(tensors: Iterable[Tensor], exchange: Callable[[Tensor], object]) -> None:
    """Send one message for all tensors of a dtype and device, instead of one message per tensor."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in groups.values():
        message = torch.cat([tensor.flatten() for tensor in group])
        exchange(message)
        received = message.split([tensor.numel() for tensor in group])
        for tensor, value in zip(group, received, strict=True):
            tensor.copy_(value.view_as(tensor))
