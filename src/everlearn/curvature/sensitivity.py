"""How strongly the output reacts to each parameter: the importance of memory aware synapses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from everlearn import distributed
from everlearn.batch import Batch
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.finite import check_finite
from everlearn.curvature.persample.engine import PerExample
from everlearn.curvature.persample.statistics import Elementwise
from everlearn.curvature.persample.untouched import untouched
from everlearn.likelihood import Categorical, Gaussian, Likelihood
from everlearn.stream import Task, as_task

log = logging.getLogger("everlearn")
Norm = Literal["squared", "vector", "local"]


def sensitivity(model: nn.Module, data: Any, norm: Norm = "squared", chunk: int | None = None) -> Diagonal:
    """Mean over examples of the absolute gradient of the output's size; no labels are needed (Aljundi et al., 2018).

        squared:  Ωᵢ = mean of |∂ ‖f(x)‖² / ∂θᵢ|
        vector:   Ωᵢ = mean of Σ over outputs c of |∂ f_c(x) / ∂θᵢ|, a backward pass per output
        local:    as squared, for each layer apart: its input given, its output as the next layer receives it (Hebb's rule)

    In the local form a skip connection carries what a later layer hands on back to the layers before it.
    Absolute values are taken per example, so the result does not depend on the batch size. Only outputs that the task
    allows count, at all tokens of an example where there are tokens. The authors' code sums the vector form over outputs as here, where the paper writes a norm.

    Args:
        model: any module; left exactly as it was.
        data: inputs, or anything a task can be made of; labels are ignored.
        norm: which form.
        chunk: examples per pass; memory grows with it. By default what suits the model.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[1.0, -2.0]])
    >>> torch.allclose(sensitivity(model, x).values["weight"], 2 * (model(x) * x).abs())
    True
    """
    if norm not in ("squared", "vector", "local"):
        raise ValueError(f"norm: got {norm!r}, allowed: 'squared', 'vector', 'local'.")
    engine, task, examples = PerExample(model), as_task(data, Gaussian()), 0  # which takes any labels; none is used
    likelihood = task.likelihood if isinstance(data, Task) else Categorical()
    magnitudes = Elementwise(engine.parameters, squared=False)
    unseen: set[str] = set()
    device = next(iter(engine.parameters.values())).device
    with untouched(engine.model):
        for batch in task.examples(chunk or engine.chunk(task), shared=True):
            here = batch if device.type == "cpu" else batch.to(device)
            is_regression = not isinstance(data, Task) and here.y is not None and here.y.is_floating_point()
            first = None if examples or is_regression else likelihood  # which looks at the outputs once
            if norm == "local":
                unseen |= engine.update_locally(here.x, partial(_allowed, here), magnitudes)
            else:
                engine.update(here.x, partial(_squared if norm == "squared" else _vector, here, first), magnitudes)
            examples += len(batch)
    magnitudes.add_up()
    examples = int(distributed.total(examples))
    if not examples:
        raise ValueError(f"{task} has no examples to take the sensitivity on.")
    if unseen:
        log.warning("No layer of its own for %s: their local importance is 0.", ", ".join(sorted(unseen)))
    form = Diagonal(magnitudes.sums) * (1 / examples)
    check_finite(form, engine.model, task)
    return form


def _squared(batch: Batch, first: Likelihood | None, out: Tensor) -> Iterator[Tensor]:
    if first is not None:
        first.check_outputs(out)
    yield 2 * out * _allowed(batch, out)


def _vector(batch: Batch, first: Likelihood | None, out: Tensor) -> Iterator[Tensor]:
    if first is not None:
        first.check_outputs(out)
    ok = _allowed(batch, out).expand_as(out)
    for c in range(out[0].numel()):
        s = torch.zeros_like(out).flatten(1)
        s[:, c] = ok.flatten(1)[:, c]
        if s.any():
            yield s.view_as(out)


def _allowed(batch: Batch, out: Tensor) -> Tensor:
    rows = batch.allowed_rows
    if rows is None:
        return out.new_ones(())
    wide = out.new_zeros(len(out), out.shape[-1])
    wide[:, : rows.shape[1]] = rows.to(out.dtype)
    return wide.reshape(len(out), *[1] * (out.dim() - 2), -1)
