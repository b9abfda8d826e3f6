"""The vectors s whose s·output is differentiated for the Fisher information, and how many backward passes they take.

The Fisher information of the outputs is F_out = E[r rᵀ] over labels, with r the residual. Each kind of labels stands
for vectors s whose Σ s sᵀ is F_out, or has it as its expectation, or replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from everlearn.core.batch import Batch
from everlearn.runtime import distributed

Labels = Literal["auto", "exact", "signs", "sample", "predicted", "true"]

# Kinds of labels that are drawn at random, of which several draws can be averaged.
RANDOM_LABELS = {"signs", "sample"}

# Costs in training steps: of a forward pass, and of a backward pass for per-example gradients, which are squared.
FORWARD_COST = 1 / 3
BACKWARD_COST = 0.8


def iterate_cotangents(
    labels: Labels, batch: Batch, outputs: Tensor, random: torch.Generator, samples: int = 1
) -> Iterator[Tensor]:
    """Yield the vectors s of a batch, each of which takes a backward pass.

    Args:
        labels: their kind, see ``fisher``.
        batch: with labels, likelihood and allowed classes.
        outputs: of the model.
        random: generator of the draws.
        samples: draws to average if the labels are random.
    """
    labels = resolve_labels(labels, batch, outputs)
    num_draws = 1
    if labels in RANDOM_LABELS:
        num_draws = samples

    # Divided by √draws, so that s sᵀ is averaged over the draws.
    for _ in range(num_draws):
        for cotangent in COTANGENTS[labels](batch, outputs, random):
            if num_draws > 1:
                yield cotangent / num_draws**0.5
            else:
                yield cotangent


def resolve_labels(labels: Labels, batch: Batch, outputs: Tensor) -> Labels:
    """Replace "auto" by "exact" where that takes at most one backward pass, otherwise by "signs"."""
    if labels != "auto":
        return labels
    first_columns = list(islice(_single_example_columns(batch, outputs), 2))
    if len(first_columns) < 2:
        return "exact"
    return "signs"


def count_backward_passes(labels: Labels, batch: Batch, outputs: Tensor, samples: int = 1) -> int:
    """Count the backward passes over the data that ``fisher`` takes.

    Args:
        labels: their kind, see ``fisher``.
        batch: some examples, with likelihood and allowed classes.
        outputs: of the model for them.
        samples: draws to average if the labels are random.

    >>> batch = Batch(torch.zeros(2, 3))
    >>> outputs = torch.zeros(2, 10)
    >>> [count_backward_passes(labels, batch, outputs) for labels in ("exact", "signs", "auto")]
    [9, 1, 1]
    """
    labels = resolve_labels(labels, batch, outputs)
    if labels in RANDOM_LABELS:
        return samples
    if labels == "exact":
        return sum(1 for _ in _single_example_columns(batch, outputs))
    return 1


def estimate_epochs(num_backward_passes: int) -> float:
    """Estimate the cost of backward passes for per-example gradients, in training epochs on the same data.

    >>> f"{estimate_epochs(1):.1f} {estimate_epochs(149):.0f}"
    '1.1 120'
    """
    return FORWARD_COST + BACKWARD_COST * num_backward_passes


def _single_example_columns(batch: Batch, outputs: Tensor) -> Iterator[Tensor]:
    """Iterate over the columns of a factor of F_out for one example, which are as many as for the batch."""
    allowed = batch.allowed_rows
    if allowed is not None:
        allowed = allowed.any(0, keepdim=True)
    return batch.likelihood.factor(outputs[:1], allowed)


def _exact(batch: Batch, outputs: Tensor, random: torch.Generator) -> Iterable[Tensor]:
    """Iterate over the columns of a factor of F_out."""
    return batch.likelihood.factor(outputs, batch.allowed_rows)


def _signs(batch: Batch, outputs: Tensor, random: torch.Generator) -> Iterable[Tensor]:
    """Draw a random combination of the columns of a factor of F_out."""
    draw = partial(batch.likelihood.signs, generator=random)
    return [_draw_for_process(draw, batch, outputs)]


def _sample(batch: Batch, outputs: Tensor, random: torch.Generator) -> Iterable[Tensor]:
    """Compute the residual of labels drawn from the model."""
    draw = partial(batch.likelihood.sample, generator=random)
    y = _draw_for_process(draw, batch, outputs)
    return [batch.likelihood.residual(outputs, y, batch.allowed_rows)]


def _predicted(batch: Batch, outputs: Tensor, random: torch.Generator) -> Iterable[Tensor]:
    """Compute the residual of the most likely labels."""
    y = batch.likelihood.predicted(outputs, batch.allowed_rows)
    return [batch.likelihood.residual(outputs, y, batch.allowed_rows)]


def _true(batch: Batch, outputs: Tensor, random: torch.Generator) -> Iterable[Tensor]:
    """Compute the residual of the labels in the data."""
    return [batch.likelihood.residual(outputs, batch.labels(), batch.allowed_rows)]


def _draw_for_process(draw: Callable[..., Tensor], batch: Batch, outputs: Tensor) -> Tensor:
    """Draw for the examples of all processes and select those of this one, so that their number does not matter.

    Process r of n has the examples r, r + n, r + 2n, … of the data, and all processes have the same generator.

    Args:
        draw: from outputs and allowed classes.
        batch: the examples of this process.
        outputs: of the model for them.
    """
    num_processes = distributed.world_size()
    if num_processes == 1:
        return draw(outputs, allowed=batch.allowed_rows)
    allowed = batch.allowed_rows
    if allowed is not None:
        allowed = allowed.repeat_interleave(num_processes, 0)
    draws = draw(outputs.repeat_interleave(num_processes, 0), allowed=allowed)
    return draws[distributed.rank() :: num_processes]


COTANGENTS: dict[str, Callable[[Batch, Tensor, torch.Generator], Iterable[Tensor]]] = {
    "exact": _exact,
    "signs": _signs,
    "sample": _sample,
    "predicted": _predicted,
    "true": _true,
}
