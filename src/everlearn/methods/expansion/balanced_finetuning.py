"""Balanced fine-tuning: a classifier that learns from features, every group of examples as often as any other."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from everlearn.core.batch import Batch, Transform
from everlearn.runtime.randomness import generator

SIZE = 128  # examples per step


def balanced(groups: Tensor, share: int, draws: torch.Generator) -> Tensor:
    """Places of so many rows of every group, in random order; those of a smaller group repeat, as evenly as can be.

    >>> places = balanced(torch.tensor([0, 0, 0, 1]), 2, generator(0))
    >>> sorted(torch.tensor([0, 0, 0, 1])[places].tolist()), (places == 3).sum().item()
    ([0, 0, 1, 1], 2)
    """
    chosen = []
    for g in range(int(groups.max()) + 1):
        own = (groups == g).nonzero().flatten()
        again = [own[torch.randperm(len(own), generator=draws)] for _ in range(-(-share // len(own)))]
        chosen.append(torch.cat(again)[:share])
    every = torch.cat(chosen)
    return every[torch.randperm(len(every), generator=draws)]


def fitted(
    start: nn.Linear,
    pool: Batch,
    groups: Tensor,
    share: int,
    epochs: int,
    seed: int,
    *,
    lr: float,
    temperature: float,
    decay: float = 5e-4,
) -> nn.Linear:
    """A classifier that has learned on, from features in place of inputs.

        L = mean of CE(softmax((W φ + b) / temperature), y)

    by SGD with momentum 0.9. A step larger than 2 · temperature² / mean ‖φ‖² is not taken: features that are long would make it
    diverge.

    Args:
        start: the classifier to start from; it stays as it is.
        pool: features, their labels, and what may be said of them.
        groups: the group of each, on the CPU.
        share: how many examples of every group an epoch has; they are drawn anew each time.
        epochs: how many.
        seed: of the draws.
        lr: learning rate.
        temperature: of the softmax.
        decay: of the weights.
    """
    draws, made = generator(seed), copy.deepcopy(start).requires_grad_(True)
    length = float(pool.x.square().sum(1).mean())
    lr = min(lr, 2 * temperature**2 / max(length, 1e-12))
    optimizer = torch.optim.SGD(made.parameters(), lr, momentum=0.9, weight_decay=decay)
    with torch.enable_grad():
        for _ in range(epochs):
            for at in balanced(groups, share, draws).to(pool.x.device).split(SIZE):
                part = pool.like(pool.x[at], pool.labels()[at], None if pool.t is None else pool.t[at])
                optimizer.zero_grad()
                part.loss(made(part.x) / temperature).backward()
                optimizer.step()
    return made


@torch.no_grad()
def scaled(layer: nn.Linear, by: float) -> nn.Linear:
    """The same layer, its outputs so many times as large; changed in place."""
    for p in layer.parameters():
        p.mul_(by)
    return layer


def viewed(x: Any, t: Tensor, views: dict[int, Transform | None], now: Transform | None) -> Any:
    """Inputs of several tasks, each through the view of its own task; through ``now`` where there is none."""
    own = {k: views.get(k, now) for k in t.unique().tolist()}
    if not any(own.values()):
        return x
    parts = [(t == k).nonzero().flatten() for k in own]
    seen = [tree_map(lambda v, at=at: v[at], x) for at in parts]
    seen = [part if view is None else view(part) for part, view in zip(seen, own.values(), strict=True)]
    back = torch.cat(parts).argsort()
    return tree_map(lambda *v: torch.cat(v)[back], *seen)
