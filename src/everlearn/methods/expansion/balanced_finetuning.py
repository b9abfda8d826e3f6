"""Class-balanced fine-tuning of a classifier on fixed features."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from everlearn.core.batch import Batch, Transform
from everlearn.runtime.randomness import generator

BATCH_SIZE = 128


def balanced_indices(groups: Tensor, group_size: int, rng: torch.Generator) -> Tensor:
    """Draw the same number of rows from every group, in random order.

    The rows of a smaller group repeat, as evenly as possible.

    >>> groups = torch.tensor([0, 0, 0, 1])
    >>> indices = balanced_indices(groups, 2, generator(0))
    >>> sorted(groups[indices].tolist()), (indices == 3).sum().item()
    ([0, 0, 1, 1], 2)
    """
    drawn_indices = []
    for group in range(int(groups.max()) + 1):
        members = (groups == group).nonzero().flatten()
        rounds = -(-group_size // len(members))
        permutations = [members[torch.randperm(len(members), generator=rng)] for _ in range(rounds)]
        drawn_indices.append(torch.cat(permutations)[:group_size])

    indices = torch.cat(drawn_indices)
    return indices[torch.randperm(len(indices), generator=rng)]


def fit_classifier(
    start: nn.Linear,
    pool: Batch,
    groups: Tensor,
    group_size: int,
    epochs: int,
    seed: int,
    *,
    lr: float,
    temperature: float,
    decay: float = 5e-4,
) -> nn.Linear:
    """Fit a copy of a classifier to features, with the same number of examples from every group.

        L = mean of CE(softmax((W φ + b) / temperature), y)

    The optimizer is SGD with momentum 0.9. Its learning rate is at most 2 · temperature² / mean ‖φ‖², because larger
    steps diverge on long features.

    Args:
        start: the classifier to start from; it is not changed.
        pool: a batch of features, with their labels and scenario mask.
        groups: the group of each row, on the CPU.
        group_size: number of examples per group and epoch, drawn again in every epoch.
        epochs: number of epochs.
        seed: seed of the draws.
        lr: learning rate.
        temperature: of the softmax.
        decay: weight decay.
    """
    # The curvature of the loss grows with mean ‖φ‖² / temperature².
    mean_squared_norm = float(pool.x.square().sum(1).mean())
    lr = min(lr, 2 * temperature**2 / max(mean_squared_norm, 1e-12))
    classifier = copy.deepcopy(start).requires_grad_(True)
    optimizer = torch.optim.SGD(classifier.parameters(), lr, momentum=0.9, weight_decay=decay)

    rng = generator(seed)
    with torch.enable_grad():
        for _ in range(epochs):
            epoch_indices = balanced_indices(groups, group_size, rng).to(pool.x.device)
            for rows in epoch_indices.split(BATCH_SIZE):
                batch = pool[rows]
                optimizer.zero_grad()
                batch.loss(classifier(batch.x) / temperature).backward()
                optimizer.step()
    return classifier


@torch.no_grad()
def scale_outputs_(layer: nn.Linear, factor: float) -> nn.Linear:
    """Multiply the outputs of a layer by a factor, in place."""
    for p in layer.parameters():
        p.mul_(factor)
    return layer


def transform_by_task(x: Any, t: Tensor, transforms: dict[int, Transform | None], default: Transform | None) -> Any:
    """Apply to each example the transform of its task.

    Args:
        x: inputs of several tasks.
        t: task index of each example.
        transforms: transform of each task; None for the identity.
        default: transform of the tasks that ``transforms`` does not list.
    """
    task_transforms = {k: transforms.get(k, default) for k in t.unique().tolist()}
    if not any(task_transforms.values()):
        return x

    task_rows = []
    transformed_parts = []
    for k, transform in task_transforms.items():
        rows = (t == k).nonzero().flatten()
        part = tree_map(lambda v, rows=rows: v[rows], x)
        if transform is not None:
            part = transform(part)
        task_rows.append(rows)
        transformed_parts.append(part)

    # The parts are ordered by task, the result as the inputs.
    original_order = torch.cat(task_rows).argsort()
    return tree_map(lambda *parts: torch.cat(parts)[original_order], *transformed_parts)
