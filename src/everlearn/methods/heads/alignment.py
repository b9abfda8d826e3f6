"""Alignment of an output layer: a few epochs on samples of Gaussians of the features, logits normalized by task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.parameters import Params, accumulate_dtype, grown
from everlearn.curvature.progress import PassProgress
from everlearn.runtime import distributed

# Settings of the authors.
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
MIN_NORM = 1e-7


class Gaussian(NamedTuple):
    """N(μ, L Lᵀ) of the features of a class.

    Args:
        label: the class.
        task: number of its task.
        mean: μ.
        factor: L, the lower Cholesky factor of the covariance.
    """

    label: int
    task: int
    mean: Tensor
    factor: Tensor

    def sample(self, size: int, random: torch.Generator) -> Tensor:
        """Draw samples; the random numbers are drawn on the CPU, so that they do not depend on the device."""
        noise = torch.randn(size, len(self.mean), generator=random, dtype=self.mean.dtype)
        return self.mean + noise.to(self.mean.device) @ self.factor.T


def align_output(
    layer: nn.Linear,
    gaussians: Iterable[Gaussian],
    epochs: int,
    samples: int,
    lr: float,
    temperature: float,
    seed: int,
) -> None:
    """Fit rows of an output layer to samples of a Gaussian for each class; other rows stay as they are.

        L = CE(z / (τ n)),   z = W h + b,   n = mean over tasks k of ‖z_k‖

    z_k are the logits of the classes of task k. The optimizer is SGD with momentum, weight decay and a cosine schedule.

    Args:
        layer: the output layer, changed in place.
        gaussians: of the features of each class.
        epochs: number of epochs.
        samples: of each class in each epoch; also the batch size.
        lr: learning rate.
        temperature: τ.
        seed: of the samples.
    """
    device = layer.weight.device
    dtype = accumulate_dtype(layer.weight)
    classes = []
    for gaussian in gaussians:
        mean = gaussian.mean.to(device, dtype)
        factor = gaussian.factor.to(device, dtype)
        classes.append(gaussian._replace(mean=mean, factor=factor))
    labels = torch.tensor([gaussian.label for gaussian in classes], device=device)
    tasks = torch.tensor([gaussian.task for gaussian in classes], device=device)
    columns_by_task = [(tasks == k).nonzero().flatten() for k in tasks.unique()]
    targets = torch.arange(len(classes), device=device).repeat_interleave(samples)

    # A copy of the rows: momentum and weight decay must not move the others.
    rows = {name: p.detach()[labels].to(dtype).requires_grad_(True) for name, p in layer.named_parameters()}
    optimizer = torch.optim.SGD(rows.values(), lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs))
    random = torch.Generator().manual_seed(seed)
    with torch.enable_grad(), PassProgress(epochs * len(targets), "alignment") as progress:
        for _ in range(epochs):
            h = torch.cat([gaussian.sample(samples, random) for gaussian in classes])
            for indices in torch.randperm(len(h), generator=random).to(device).split(samples):
                z = F.linear(h[indices], rows["weight"], rows.get("bias"))
                norms = torch.stack([z[:, columns].norm(dim=1) for columns in columns_by_task])
                n = norms.mean(0) + MIN_NORM
                loss = F.cross_entropy(z / (temperature * n[:, None]), targets[indices])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.finish_batch(len(indices))
            schedule.step()

    # The same rows in all processes, even if their devices round differently.
    distributed.broadcast_(rows.values())
    write_rows(layer, labels, rows)


@torch.no_grad()
def write_rows(layer: nn.Linear, labels: Tensor, rows: Params) -> None:
    """Write the rows of some classes into an output layer.

    Args:
        layer: the output layer.
        labels: the classes.
        rows: a row for each of them, by name of the parameter.
    """
    for name, p in layer.named_parameters():
        p[labels.to(p.device)] = rows[name].to(p)


@torch.no_grad()
def restore_rows(layer: nn.Linear, stored: Params, is_restored: Tensor) -> Params:
    """Set the rows of some classes back to stored ones; return the rows of all classes, to be stored.

    Args:
        layer: the output layer.
        stored: earlier rows, by name of the parameter, perhaps of fewer classes.
        is_restored: whether a class gets its stored row.
    """
    rows = {}
    for name, p in layer.named_parameters():
        rows[name] = p[: len(is_restored)].clone()
        if name in stored:
            rows[name][is_restored] = grown(stored[name].to(p), rows[name].shape)[is_restored]
    write_rows(layer, torch.arange(len(is_restored)), rows)
    return rows
