"""The scale of a training loop's loss: which multiple of a mean over labels it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everlearn.core.batch import Batch
from everlearn.core.likelihood import Bernoulli, Gaussian
from everlearn.core.parameters import accumulate_dtype

if TYPE_CHECKING:
    from everlearn.core.method import Method

# Relative difference between two ways to compute the same loss, in single and in half precision.
TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2
EXACT_DTYPES = (torch.float32, torch.float64)


def common_weights(batch: Batch) -> dict[str, float]:
    """Return factors of a mean over labels by which common losses differ from the loss of the likelihood."""
    weights = {"a sum over labels": batch.weight}
    if batch.outputs is None:
        return weights
    num_outputs = batch.outputs.shape[-1]
    if isinstance(batch.likelihood, Gaussian):
        weights = {
            "a mean squared error": 2 * batch.likelihood.variance / num_outputs,
            "a sum of squared errors": 2 * batch.likelihood.variance * batch.weight,
        }
    elif isinstance(batch.likelihood, Bernoulli):
        weights["a mean over labels and outputs"] = 1 / num_outputs
    return weights


@torch.no_grad()
def find_ratio(loss: Tensor, batch: Batch) -> float | None:
    """Return the ratio of a loss to the likelihood's mean loss of the batch; None if it is unknown."""
    if batch.outputs is None or batch.y is None or loss.dim():
        return None
    outputs = batch.outputs.to(accumulate_dtype(batch.outputs))
    mean_loss = float(batch.likelihood.loss(outputs, batch.y, batch.allowed_rows))
    if not mean_loss > 0 or not 0 < float(loss) < math.inf:
        return None
    return float(loss) / mean_loss


def is_close(ratio: float, weight: float, loss: Tensor) -> bool:
    """Return whether a ratio is a weight, up to the rounding of the loss."""
    tolerance = TOLERANCE if loss.dtype in EXACT_DTYPES else HALF_TOLERANCE
    return math.isclose(ratio, weight, rel_tol=tolerance)


def check_weight(loss: Tensor, batch: Batch, weight: float, method: Method) -> None:
    """Raise if the loop's loss is a well-known multiple of the mean over labels, but not the given one.

    A loss that is no such multiple is the loop's own, as with label smoothing, and is used as it is, unless a method
    computes the loss itself: then it raises, too.
    """
    if loss.dim():
        raise ValueError(f"The loss must be a single number, got shape {tuple(loss.shape)}: take its mean.")
    if not weight > 0:
        raise ValueError(f"weight must be a tensor or number above 0, or the number 0, got {weight:g}.")
    ratio = find_ratio(loss, batch)
    if ratio is None or is_close(ratio, weight, loss):
        return

    # A sum that is given as a mean, a mean that is given as a sum, or a loss that is divided before it is passed.
    factor = max(ratio / weight, weight / ratio)
    is_multiple = loss.dtype in EXACT_DTYPES and math.isclose(factor, max(2, round(factor)), rel_tol=1e-5)
    if is_multiple or any(is_close(ratio, common_weight, loss) for common_weight in common_weights(batch).values()):
        raise ValueError(
            f"This loss is {ratio:g} times the mean loss per label of {batch.likelihood}, but its weight is "
            f"{weight:g}: give weight={ratio:g}, or take the mean. In a loop that accumulates, divide the result: "
            "attached.loss(…) / 4."
        )
    replacing = [type(part).__name__ for part in getattr(method, "methods", [method]) if part.replaces_loss]
    if replacing:
        raise ValueError(
            f"{replacing[0]} computes the loss itself, over some of the classes, and would ignore that of this loop, "
            f"which is not the mean loss per label of {batch.likelihood} (label smoothing, class weights?): use that "
            "one, or another method."
        )
