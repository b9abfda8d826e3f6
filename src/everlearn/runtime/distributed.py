"""Several processes that learn as one: what is added up, averaged, shared out or agreed on, wherever torch.distributed is in use.

Every process has the whole model and its share of every batch. Gradients are averaged after ``backward()``, before a method edits them,
and of whatever parameters there are at that moment: a head that a task has added cannot be left out, as it silently is
by a wrapper that was made before it. With one process all of this does nothing.
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
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, counted from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def all_reduce_(tensors: Iterable[Tensor]) -> None:
    """Each tensor becomes the sum over all processes, in place."""
    if world_size() > 1:
        _at_once(tensors, dist.all_reduce)


def sum_across(number: float) -> float:
    """The sum over all processes."""
    if world_size() == 1:
        return number
    all_reduce_([together := torch.tensor([number], dtype=torch.float64, device=_post())])
    return float(together)


def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Each tensor becomes what the first process has, in place."""
    if world_size() > 1:
        _at_once(tensors, partial(dist.broadcast, src=0))


def broadcast_object(thing: Any) -> Any:
    """What the first process says, to all."""
    if world_size() == 1:
        return thing
    dist.broadcast_object_list(box := [thing], 0)
    return box[0]


def all_gather_object(thing: Any) -> list[Any]:
    """What each process says, to all."""
    if world_size() == 1:
        return [thing]
    dist.all_gather_object(box := [None] * world_size(), thing)
    return box


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor], weight: float, loss: float) -> float:
    """``p.grad`` becomes the mean over all processes, each with its weight; the mean loss is returned, NaN if no weight is above 0.

    A parameter that no process has a gradient of stays without one, as optimizers know it. What a process of weight 0 has, which
    may be NaN, does not count.
    """
    if world_size() == 1:
        return loss
    has = [p.grad is not None for p in parameters]
    facts = torch.tensor([weight, weight * loss if weight else 0.0, *has], dtype=torch.float64, device=_post())
    dist.all_reduce(facts)
    whole = float(facts[0])
    if not whole:
        return math.nan
    moved = [p for p, count in zip(parameters, facts[2:].tolist(), strict=True) if count]
    for p in moved:
        p.grad = torch.zeros_like(p) if p.grad is None or not weight else p.grad.mul_(weight / whole)
    all_reduce_(p.grad for p in moved if p.grad is not None)
    return float(facts[1]) / whole


def own_share(order: Tensor, size: int) -> Tensor:
    """Of examples in this order, those of this process: its share of each batch of ``size`` examples per process.

    All have equally many: of a last batch that does not divide by the processes, the rest is left out.
    """
    batches = [some[: len(some) // world_size() * world_size()] for some in order.split(size * world_size())]
    return torch.cat([some.tensor_split(world_size())[rank()] for some in batches])


def _post() -> str:
    """Where a message must be: NCCL takes none from the CPU."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@torch.no_grad()
def _at_once(tensors: Iterable[Tensor], exchange: Callable[[Tensor], object]) -> None:
    """One message for all tensors of a kind, instead of one each."""
    kinds: dict[Any, list[Tensor]] = {}
    for t in tensors:
        kinds.setdefault((t.dtype, t.device), []).append(t)
    for kind in kinds.values():
        exchange(flat := torch.cat([t.flatten() for t in kind]))
        for t, value in zip(kind, flat.split([t.numel() for t in kind]), strict=True):
            t.copy_(value.view_as(t))
