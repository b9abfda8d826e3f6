"""Sensitivity of the outputs to each parameter: the importance of memory aware synapses (MAS)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.likelihood import Categorical, Gaussian, Likelihood
from everlearn.core.task import Task, as_task
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.finite import check_finite
from everlearn.curvature.per_example.engine import PerExample
from everlearn.curvature.per_example.preserve_model import preserve_model
from everlearn.curvature.per_example.statistics import Elementwise
from everlearn.curvature.progress import PassProgress
from everlearn.runtime import distributed

log = logging.getLogger("everlearn")
Norm = Literal["squared", "vector", "local"]


def sensitivity(model: nn.Module, data: Any, norm: Norm = "squared", chunk: int | None = None) -> Diagonal:
    """Compute the mean over examples of the absolute gradient of the output's norm (Aljundi et al., 2018).

        squared:  Ωᵢ = mean of |∂ ‖f(x)‖² / ∂θᵢ|
        vector:   Ωᵢ = mean of Σ over outputs c of |∂ f_c(x) / ∂θᵢ|, a backward pass per output
        local:    as squared, for each layer separately: with its input fixed, and its output as the next layer gets it

    The local form is Hebb's rule. In it a skip connection carries what a later layer passes on back to earlier layers.
    No labels are needed. Absolute values are taken per example, so the result does not depend on the batch size. Only
    outputs that the task allows count, at all tokens of an example. The vector form is a sum over outputs as in the
    authors' code; the paper writes a norm.

    Args:
        model: any module; left exactly as it was.
        data: inputs, or anything a task can be made of; labels are ignored.
        norm: which form.
        chunk: examples per pass; memory grows with it. By default chosen for the model.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[1.0, -2.0]])
    >>> torch.allclose(sensitivity(model, x).values["weight"], 2 * (model(x) * x).abs())
    True
    """
    if norm not in ("squared", "vector", "local"):
        raise ValueError(f"norm: got {norm!r}, allowed: 'squared', 'vector', 'local'.")
    engine = PerExample(model)
    task = as_task(data, Gaussian())  # which accepts any labels; none is used
    likelihood: Likelihood = Categorical()
    if isinstance(data, Task):
        likelihood = task.likelihood

    magnitudes = Elementwise(engine.parameters, squared=False)
    without_layer: set[str] = set()
    device = next(iter(engine.parameters.values())).device
    num_examples = 0
    with preserve_model(engine.model), PassProgress(task, "Sensitivity") as progress:
        for batch in task.examples(chunk or engine.choose_chunk_size(task), shared=True):
            if device.type != "cpu":
                batch = batch.to(device)

            # The outputs are checked once, unless real-valued labels show that it is a regression.
            is_regression = not isinstance(data, Task) and batch.y is not None and batch.y.is_floating_point()
            checker = None
            if not num_examples and not is_regression:
                checker = likelihood

            if norm == "local":
                without_layer |= engine.update_locally(batch.x, partial(_output_mask, batch), magnitudes)
            elif norm == "squared":
                engine.update(batch.x, partial(_squared_cotangents, batch, checker), magnitudes)
            else:
                engine.update(batch.x, partial(_vector_cotangents, batch, checker, progress), magnitudes)
            num_examples += len(batch)
            progress.finish_batch(len(batch))

    magnitudes.all_reduce_()
    num_examples = int(distributed.sum_across(num_examples))
    if not num_examples:
        raise ValueError(f"{task} has no examples to take the sensitivity on.")
    if without_layer:
        names = ", ".join(sorted(without_layer))
        log.warning("No layer was recognized for %s: their local importance is 0.", names)
    form = Diagonal(magnitudes.sums) * (1 / num_examples)
    check_finite(form, engine.model, task)
    return form


def _squared_cotangents(batch: Batch, checker: Likelihood | None, outputs: Tensor) -> Iterator[Tensor]:
    """Yield ∂ ‖f(x)‖² / ∂f = 2 f(x), over the allowed outputs."""
    if checker is not None:
        checker.check_outputs(outputs)
    yield 2 * outputs * _output_mask(batch, outputs)


def _vector_cotangents(
    batch: Batch, checker: Likelihood | None, progress: PassProgress, outputs: Tensor
) -> Iterator[Tensor]:
    """Yield the unit vector of every allowed output."""
    if checker is not None:
        checker.check_outputs(outputs)
    num_passes = count_sensitivity_passes("vector", batch, outputs)
    yield from progress.track(_iterate_unit_vectors(batch, outputs), len(batch), num_passes)


def count_sensitivity_passes(norm: Norm, batch: Batch, outputs: Tensor) -> int:
    """Count the backward passes over the data that ``sensitivity`` takes.

    Args:
        norm: which form.
        batch: some examples, with allowed classes.
        outputs: of the model for them.
    """
    if norm != "vector":
        return 1
    mask = _output_mask(batch, outputs).expand_as(outputs)
    return int(mask.any(0).sum())


def _iterate_unit_vectors(batch: Batch, outputs: Tensor) -> Iterator[Tensor]:
    """Yield a cotangent for every output that is allowed for any example."""
    mask = _output_mask(batch, outputs).expand_as(outputs)
    for c in range(outputs[0].numel()):
        s = torch.zeros_like(outputs).flatten(1)
        s[:, c] = mask.flatten(1)[:, c]
        if s.any():
            yield s.view_as(outputs)


def _output_mask(batch: Batch, outputs: Tensor) -> Tensor:
    """Return 1 for allowed outputs and 0 for others, in a shape that broadcasts with the outputs."""
    allowed = batch.allowed_rows
    if allowed is None:
        return outputs.new_ones(())

    # Outputs beyond the table of allowed classes are not allowed.
    mask = outputs.new_zeros(len(outputs), outputs.shape[-1])
    mask[:, : allowed.shape[1]] = allowed.to(outputs.dtype)
    return mask.reshape(len(outputs), *[1] * (outputs.dim() - 2), -1)
