"""Fisher information of a model on data, and the approximation by Adam's second moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everlearn.core.batch import Batch
from everlearn.core.forward import check_next_tokens
from everlearn.core.likelihood import Categorical, Likelihood
from everlearn.core.parameters import Params, trainable_parameters
from everlearn.core.task import as_task
from everlearn.curvature.cotangents import Labels, count_backward_passes, iterate_cotangents
from everlearn.curvature.diagonal import Diagonal
from everlearn.curvature.finite import check_finite
from everlearn.curvature.full import Full
from everlearn.curvature.kronecker import Kronecker, Pair
from everlearn.curvature.per_example.engine import PerExample
from everlearn.curvature.per_example.preserve_model import preserve_model
from everlearn.curvature.per_example.statistics import Elementwise, KroneckerFactors, OuterProducts, Statistic
from everlearn.curvature.progress import PassProgress
from everlearn.curvature.quadratic import Form
from everlearn.runtime import distributed
from everlearn.runtime.randomness import generator

__all__ = ["FisherEstimator", "Labels", "Structure", "fisher", "from_adam"]

# The full form of so many parameters has 3.6 GB in float32.
MAX_FULL_PARAMETERS = 30_000

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
    """Compute the Fisher information: how strongly the predicted distribution depends on each parameter.

        F = (1/N) Σ over examples x of E over y ~ p(y | x) of [g gᵀ],   g = ∂ log p(y | x) / ∂θ

    Inputs come from the data, labels from the *model*. The result does not depend on the batch size, and the model is
    left exactly as it was.

    N is the number of labels that the loss is a mean over, so that F is the curvature of the loss: the number of
    examples, or of tokens if every token has a label. Labels of -100 and their outputs do not count. An example's
    likelihood is that of all its tokens together. A complex parameter has one real number, the mean of ``|g|²``, in the
    diagonal.

    Args:
        model: any module; F is over its trainable parameters.
        data: a task, or anything a task can be made of; the allowed classes of a task are respected.
        labels: how the expectation over labels is computed. "exact" sums over all, in C - 1 backward passes for C
            classes, and is the default because it is deterministic. "signs" takes one backward pass of a random
            combination with the same expectation, unbiased and far less noisy than "sample", which draws one label from
            the model. "auto" is "exact" where that takes one backward pass, as for two classes, and otherwise "signs".
            "predicted" takes the most likely label and "true" the label in the data (the *empirical* Fisher): neither
            is the Fisher information, and both vanish as a model becomes confident.
        structure: "diagonal", "kronecker" (per layer) or "full".
        likelihood: of the outputs; by default the task's.
        samples: draws to average for "signs" and "sample". One is enough for most data: each draw adds the variance of
            one example, so that the error decreases with the number of examples.
        chunk: examples per pass; memory grows with it. By default chosen for the model.
        seed: of the draws.
        examples: number of examples to use, drawn at random; by default all.

    Returns:
        A ``Diagonal``, ``Kronecker`` or ``Full``.

    >>> model = nn.Linear(2, 3)
    >>> F = fisher(model, torch.randn(100, 2))
    >>> F.values["weight"].shape
    torch.Size([3, 2])
    """
    return FisherEstimator(model, labels, structure, likelihood, samples, chunk)(data, seed, examples)


class FisherEstimator:
    """``fisher`` with its arguments bound, for repeated calls: the model is probed once."""

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
        if labels not in get_args(Labels):
            raise ValueError(f"labels: got {labels!r}, allowed: {', '.join(map(repr, get_args(Labels)))}.")
        if samples < 1 or (chunk is not None and chunk < 1):
            raise ValueError(f"samples and chunk must be at least 1, got {samples} and {chunk}.")
        self.labels = labels
        self.structure = structure
        self.likelihood = likelihood
        self.samples = samples
        self.chunk = chunk
        self.engine = PerExample(model)
        self._outputs_checked = False
        self._num_passes = 0  # expected for a chunk

    def __call__(self, data: Any, seed: int = 0, examples: int | None = None) -> Form:
        """Compute the Fisher information on data."""
        self._check_full_structure()
        if examples is not None and examples < 1:
            raise ValueError(f"examples must be at least 1, got {examples}.")
        task = as_task(data, self.likelihood)
        engine = self.engine
        make_statistic, make_form = STRUCTURES[self.structure]
        statistic = make_statistic(engine.parameters)
        self._num_passes = 0

        random = generator(seed, "fisher")
        device = next(iter(engine.parameters.values())).device
        num_examples = 0
        num_labels = 0
        with preserve_model(engine.model), PassProgress(task, "Fisher information", examples) as progress:
            chunk_size = self.chunk or engine.choose_chunk_size(task)
            for chunk in task.examples(chunk_size, max_examples=examples, shared=True):
                batch = self._select_labeled(chunk)
                if not len(batch):
                    progress.finish_batch(len(chunk))
                    continue
                if device.type != "cpu":
                    batch = batch.to(device)
                if self.labels == "true" and not num_examples:
                    check_next_tokens(engine.model, batch.x, batch.y)

                label_counts: list[int] = []
                cotangents = partial(self._iterate_cotangents, batch, random, progress, label_counts)
                engine.update(batch.x, cotangents, statistic)
                num_examples += len(batch)
                num_labels += label_counts[-1]
                progress.finish_batch(len(chunk))

        counts_per_process = distributed.all_gather_object(num_examples)
        if min(counts_per_process) == 0 and max(counts_per_process):
            raise ValueError(f"{task} has fewer batches than there are processes: use fewer, or smaller batches.")
        statistic.all_reduce_()
        if not int(distributed.sum_across(num_examples)):
            raise ValueError(
                f"{task} has no examples to take the Fisher information on, or all its labels are ignored."
            )
        form = make_form(statistic, int(distributed.sum_across(num_labels)))
        check_finite(form, engine.model, task)
        return form

    def _check_full_structure(self) -> None:
        """Raise if the full structure is requested for too many or for complex parameters."""
        if self.structure != "full":
            return
        parameters = self.engine.parameters
        size = sum(p.numel() for p in parameters.values())
        if size > MAX_FULL_PARAMETERS:
            raise ValueError(
                f"The full form of {size:,} parameters would have {size**2 * 4 / 2**30:,.0f} GB; it is for up to "
                f"{MAX_FULL_PARAMETERS:,}: use structure='kronecker'."
            )
        complex_names = [name for name, p in parameters.items() if p.is_complex()]
        if complex_names:
            raise ValueError(
                f"structure='full' is for real parameters, and {', '.join(complex_names[:3])} is complex: use "
                "'diagonal' or 'kronecker', or make it of a real parameter (torch.view_as_complex)."
            )

    def _select_labeled(self, batch: Batch) -> Batch:
        """Select the examples with a label that counts, and set the likelihood."""
        batch = replace(batch, likelihood=self.likelihood or batch.likelihood)
        labeled_rows = batch.labeled_rows()
        if labeled_rows is None:
            return batch
        return batch[labeled_rows]

    def _iterate_cotangents(
        self, batch: Batch, random: torch.Generator, progress: PassProgress, label_counts: list[int], outputs: Tensor
    ) -> Iterator[Tensor]:
        """Yield the columns of a factor of the outputs' Fisher information; append the number of labels to a list."""
        likelihood = batch.likelihood
        label_counts.append(likelihood.label_count(outputs, batch.y))
        if not self._outputs_checked:
            self._outputs_checked = True
            likelihood.check_outputs(outputs)
        if isinstance(likelihood, Categorical) and outputs.shape[-1] == 1:
            raise ValueError("One output is no choice between classes: use likelihood=Gaussian() or Bernoulli().")
        if self.labels == "true" and batch.y is None:
            raise ValueError("labels='true' needs data with labels; these have no labels: use 'exact' or 'signs'.")
        if isinstance(likelihood, Categorical) and batch.y is not None:
            likelihood.check(outputs, batch.y)

        # Tokens with an ignored label have no gradient.
        counted = likelihood.counted(batch.y)
        if not self._num_passes:
            self._num_passes = count_backward_passes(self.labels, batch, outputs, self.samples)
        cotangents = iterate_cotangents(self.labels, batch, outputs, random, self.samples)
        for cotangent in progress.track(cotangents, len(batch), self._num_passes):
            if counted is not None:
                cotangent = cotangent * counted
            yield cotangent


def from_adam(model: nn.Module, optimizer: Optimizer) -> Diagonal:
    """Return Adam's second moments as a diagonal, at no cost.

    vᵢ is a moving average of the squared gradient of *mini-batch means* with the labels in the data, bias-corrected
    here. It approximates the diagonal of the empirical Fisher information divided by the batch size (Pascanu & Bengio,
    2013, discuss the relation). The order of magnitude between parameters is right, the scale is not: measure the
    strength ("auto") or tune it again.

    Args:
        model: whose parameters are named.
        optimizer: the Adam, AdamW or RMSprop that trained it.
    """
    decays = {id(p): _second_moment_decay(group) for group in optimizer.param_groups for p in group["params"]}
    values: Params = {}
    for name, p in trainable_parameters(model).items():
        state = optimizer.state.get(p, {})
        second_moment = state.get("exp_avg_sq", state.get("square_avg"))
        if second_moment is None:
            # Never trained, so nothing learned depends on it.
            values[name] = torch.zeros_like(p, dtype=p.dtype.to_real())
            continue

        # For a complex parameter torch stores the squares of both parts, which add up to |g|².
        if second_moment.is_complex():
            second_moment = second_moment.real + second_moment.imag
        values[name] = second_moment.detach() / (1 - decays[id(p)] ** float(state["step"]))

    if not any(value.any() for value in values.values()):
        raise ValueError(
            f"{type(optimizer).__name__} holds no second moments of this model: give the Adam, AdamW or RMSprop that "
            "trained it, after at least one step."
        )
    return Diagonal(values)


def _second_moment_decay(group: dict[str, Any]) -> float:
    """Return the decay of the squared gradients' average: the second beta of Adam, alpha of RMSprop."""
    if "betas" in group:
        return float(group["betas"][1])
    return float(group.get("alpha", 0.0))


def _make_diagonal(statistic: Any, num_labels: int) -> Diagonal:
    """Divide the sums of squares by the number of labels."""
    return Diagonal(statistic.sums) * (1 / num_labels)


def _make_kronecker(statistic: Any, num_labels: int) -> Kronecker:
    """Normalize the factors.

    The inputs are the same in every draw and backward pass. A is therefore a mean over the examples that use the layer,
    and G a mean over labels and draws.
    """
    factored_names = {name for key in statistic.inputs for name in key}
    rest = {}
    for name, squares in statistic.rest.sums.items():
        if name in statistic.squared_names or name not in factored_names:
            rest[name] = squares

    form = Kronecker(rest=Diagonal(rest) * (1 / num_labels))
    for (weight, bias), inputs in statistic.inputs.items():
        a = inputs / statistic.num_users[weight, bias]
        g = statistic.outputs[weight, bias] / num_labels
        layer = Kronecker({weight: [Pair(a, g)]})
        if bias is not None:
            layer.biases[weight] = bias
        if len(statistic.shapes[weight]) > 2:
            layer.shapes[weight] = statistic.shapes[weight]
        form = form + layer
    return form


def _make_full(statistic: Any, num_labels: int) -> Full:
    """Divide the outer products by the number of labels."""
    rows = statistic.rows
    if rows is None and statistic.matrix is None:  # no cotangent at all: the prediction cannot change
        rows = torch.zeros(1, sum(torch.Size(shape).numel() for shape in statistic.shapes.values()))
    return Full(statistic.shapes, rows, statistic.matrix) * (1 / num_labels)


# How the gradients are accumulated, and how the form is made of the sums and the number of labels.
STRUCTURES: dict[str, tuple[Callable[[Params], Statistic], Callable[[Any, int], Form]]] = {
    "diagonal": (Elementwise, _make_diagonal),
    "kronecker": (KroneckerFactors, _make_kronecker),
    "full": (OuterProducts, _make_full),
}
