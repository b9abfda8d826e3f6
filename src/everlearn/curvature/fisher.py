"""The Fisher information of a model on some data, and Adam's free approximation of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everlearn import distributed
from everlearn.batch import Batch
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.finite import check_finite
from everlearn.curvature.full import Full
from everlearn.curvature.kronecker import Kronecker, Pair
from everlearn.curvature.persample.engine import PerExample
from everlearn.curvature.persample.statistics import Elementwise, InFull, KroneckerFactors, Statistic
from everlearn.curvature.persample.untouched import untouched
from everlearn.curvature.quadratic import Form
from everlearn.forward import check_next_tokens
from everlearn.likelihood import Categorical, Likelihood
from everlearn.params import Params, named
from everlearn.seeds import generator
from everlearn.stream import as_task

MOST_IN_FULL = 30_000  # 3.6 GB in float32
Labels = Literal["exact", "signs", "sample", "predicted", "true"]
Structure = Literal["diagonal", "kronecker", "full"]


def fisher(
    model: nn.Module,
    data: Any,
    labels: Labels = "exact",
    structure: Structure = "diagonal",
    likelihood: Likelihood | None = None,
    samples: int = 1,
    chunk: int | None = None,
    seed: int = 0,
    examples: int | None = None,
) -> Form:
    """The Fisher information: how strongly the predicted distribution reacts to each parameter.

        F = (1/N) Σ over examples x of E over y ~ p(y | x) of [g gᵀ],   g = ∂ log p(y | x) / ∂θ

    Inputs come from the data, labels from the *model*. The result does not depend on the batch size; the model is left
    exactly as it was. N is the number of labels that the loss is a mean over, so that F is the curvature of the loss: of
    examples, or of tokens where every token has a label; labels of -100 and what they belong to do not count. An example's
    likelihood is that of all its tokens together. A complex parameter has one real number, of ``|g|²``, in the diagonal.

    Args:
        model: any module; its trainable parameters are meant.
        data: a task, or anything a task can be made of; a task's table of allowed classes is respected.
        labels: how the expectation over labels is taken. "exact" sums over all, C - 1 backward passes for C classes.
            "signs" takes one backward pass of a random combination with the same expectation, unbiased and far less noisy
            than "sample", one label drawn from the model. "predicted" takes the most likely label and "true" the data's
            (the *empirical* Fisher): neither is the Fisher information, and both vanish as a model becomes sure.
        structure: "diagonal", "kronecker" (per layer) or "full".
        likelihood: what the outputs mean; by default the task's.
        samples: draws to average for "signs" and "sample".
        chunk: examples per pass; memory grows with it. By default what suits the model.
        seed: of the draws.
        examples: how many to take it on, drawn at random; by default all.

    >>> model = nn.Linear(2, 3)
    >>> F = fisher(model, torch.randn(100, 2))
    >>> F.values["weight"].shape
    torch.Size([3, 2])
    """
    return FisherEstimator(model, labels, structure, likelihood, samples, chunk)(data, seed, examples)


class FisherEstimator:
    """``fisher`` with its arguments bound, for calls again and again: the model is probed once."""

    def __init__(
        self,
        model: nn.Module,
        labels: Labels = "exact",
        structure: Structure = "diagonal",
        likelihood: Likelihood | None = None,
        samples: int = 1,
        chunk: int | None = None,
    ) -> None:
        if structure not in STRUCTURES:
            raise ValueError(f"structure: got {structure!r}, allowed: {', '.join(map(repr, STRUCTURES))}.")
        if labels not in COLUMNS:
            raise ValueError(f"labels: got {labels!r}, allowed: {', '.join(map(repr, COLUMNS))}.")
        if samples < 1 or (chunk is not None and chunk < 1):
            raise ValueError(f"samples and chunk must be at least 1, got {samples} and {chunk}.")
        self.labels, self.structure, self.likelihood = labels, structure, likelihood
        self.samples = samples if labels in ("signs", "sample") else 1
        self.chunk, self.engine = chunk, PerExample(model)
        self._checked = False  # whether the outputs were looked at

    def __call__(self, data: Any, seed: int = 0, examples: int | None = None) -> Form:
        """The Fisher information on these data."""
        engine, task = self.engine, as_task(data, self.likelihood)
        size = sum(p.numel() for p in engine.parameters.values())
        if self.structure == "full" and size > MOST_IN_FULL:
            raise ValueError(
                f"The full form of {size:,} parameters would have {size**2 * 4 / 2**30:,.0f} GB; it is for up to "
                f"{MOST_IN_FULL:,}: use structure='kronecker'."
            )
        if self.structure == "full" and (complex_ := [n for n, p in engine.parameters.items() if p.is_complex()]):
            raise ValueError(
                f"structure='full' is for real parameters, and {', '.join(complex_[:3])} is complex: use 'diagonal' or 'kronecker', "
                "or make it of a real parameter (torch.view_as_complex)."
            )
        if examples is not None and examples < 1:
            raise ValueError(f"examples must be at least 1, got {examples}.")
        make, finish = STRUCTURES[self.structure]
        statistic = make(engine.parameters)
        random, seen = generator(seed + distributed.rank(), "fisher"), 0
        labels = 0
        device = next(iter(engine.parameters.values())).device
        with untouched(engine.model):
            for batch in task.examples(self.chunk or engine.chunk(task), most=examples, shared=True):
                batch = self._labeled(batch)
                if len(batch):
                    here = batch if device.type == "cpu" else batch.to(device)
                    if self.labels == "true" and not seen:
                        check_next_tokens(engine.model, here.x, here.y)
                    counts: list[int] = []
                    engine.update(here.x, partial(self._columns, here, random, counts), statistic)
                    seen += len(batch)
                    labels += counts[-1]
        if min(have := distributed.every(seen)) == 0 and max(have):
            raise ValueError(f"{task} has fewer batches than there are processes: use fewer, or smaller batches.")
        statistic.add_up()
        seen = int(distributed.total(seen))
        if not seen:
            raise ValueError(
                f"{task} has no examples to take the Fisher information on, or all its labels are ignored."
            )
        form = finish(statistic, seen, int(distributed.total(labels)) * self.samples)
        check_finite(form, engine.model, task)
        return form

    def _labeled(self, batch: Batch) -> Batch:
        """The examples that have a label which counts, with the likelihood that was asked for."""
        batch = replace(batch, likelihood=self.likelihood or batch.likelihood)
        rows = batch.labeled_rows()
        return batch if rows is None else batch[rows]

    def _columns(self, batch: Batch, random: torch.Generator, counts: list[int], out: Tensor) -> Iterator[Tensor]:
        """The columns of the outputs' Fisher information; the number of labels goes into ``counts``."""
        likelihood = batch.likelihood
        counts.append(likelihood.label_count(out, batch.y))
        if not self._checked:
            self._checked = True
            likelihood.check_outputs(out)
        if isinstance(likelihood, Categorical) and out.shape[-1] == 1:
            raise ValueError("One output is no choice between classes: use likelihood=Gaussian() or Bernoulli().")
        if self.labels == "true" and batch.y is None:
            raise ValueError("labels='true' needs data with labels; these have no labels: use 'exact' or 'signs'.")
        if isinstance(likelihood, Categorical) and batch.y is not None:
            likelihood.check(out, batch.y)
        counted = likelihood.counted(batch.y)
        for _ in range(self.samples):
            for column in COLUMNS[self.labels](likelihood, out, batch, random):
                yield column if counted is None else column * counted


def from_adam(model: nn.Module, optimizer: Optimizer) -> Diagonal:
    """Adam's second moments as a diagonal, free of cost.

    vᵢ is a moving average of the squared gradient of *mini-batch means* with the data's labels, bias-corrected here: an
    approximation of the diagonal of the empirical Fisher information over the batch size (Pascanu & Bengio, 2013, discuss
    the kinship). Right in order of magnitude between parameters, not in scale: tune the strength anew.

    Args:
        model: whose parameters are named.
        optimizer: an Adam, AdamW or RMSprop that has trained it.
    """
    decays = {id(p): _decay(group) for group in optimizer.param_groups for p in group["params"]}
    values: Params = {}
    for name, p in named(model).items():
        state = optimizer.state.get(p, {})
        second = state.get("exp_avg_sq", state.get("square_avg"))
        if second is None:
            values[name] = torch.zeros_like(p, dtype=p.dtype.to_real())  # never trained, so nothing depends on it yet
        else:
            # Of a complex parameter torch keeps the squares of both parts, which add up to |g|².
            second = second.real + second.imag if second.is_complex() else second
            values[name] = second.detach() / (1 - decays[id(p)] ** float(state["step"]))
    if not any(v.any() for v in values.values()):
        raise ValueError(
            f"{type(optimizer).__name__} holds no second moments of this model: give the Adam, AdamW or RMSprop that trained "
            "it, after at least one step."
        )
    return Diagonal(values)


def _decay(group: dict[str, Any]) -> float:
    """Of the running average of squared gradients: Adam's second beta, RMSprop's alpha."""
    return float(group["betas"][1] if "betas" in group else group.get("alpha", 0.0))


def _diagonal(statistic: Any, examples: int, labels: int) -> Diagonal:
    return Diagonal(statistic.sums) * (1 / labels)


def _kronecker(statistic: Any, examples: int, labels: int) -> Kronecker:
    """Inputs are the same in every draw and in every column, so only the outputs' factor is a mean over labels and draws."""
    covered = {name for key in statistic.inputs for name in key}
    rest = {n: v for n, v in statistic.rest.sums.items() if n in statistic.squared or n not in covered}
    form = Kronecker(rest=Diagonal(rest) * (1 / labels))
    for (weight, bias), inputs in statistic.inputs.items():
        pair = Pair(inputs / statistic.users[weight, bias], statistic.outputs[weight, bias] / labels)
        biases = {} if bias is None else {weight: bias}
        shapes = {weight: statistic.shapes[weight]} if len(statistic.shapes[weight]) > 2 else {}
        form = form + Kronecker({weight: [pair]}, biases, Diagonal(), shapes)
    return form


def _full(statistic: Any, examples: int, labels: int) -> Full:
    rows = statistic.rows
    if rows is None and statistic.matrix is None:  # not a single direction: the prediction cannot change
        rows = torch.zeros(1, sum(torch.Size(s).numel() for s in statistic.shapes.values()))
    return Full(statistic.shapes, rows, statistic.matrix) * (1 / labels)


STRUCTURES: dict[str, tuple[Callable[[Params], Statistic], Callable[[Any, int, int], Form]]] = {
    "diagonal": (Elementwise, _diagonal),
    "kronecker": (KroneckerFactors, _kronecker),
    "full": (InFull, _full),
}
COLUMNS: dict[str, Callable[[Likelihood, Tensor, Batch, torch.Generator], Any]] = {
    "exact": lambda p, out, b, random: p.factor(out, b.allowed_rows),
    "signs": lambda p, out, b, random: [p.signs(out, random, b.allowed_rows)],
    "sample": lambda p, out, b, random: [p.residual(out, p.sample(out, random, b.allowed_rows), b.allowed_rows)],
    "predicted": lambda p, out, b, random: [p.residual(out, p.predicted(out, b.allowed_rows), b.allowed_rows)],
    "true": lambda p, out, b, random: [p.residual(out, b.labels(), b.allowed_rows)],
}
