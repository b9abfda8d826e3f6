"""Statistics of features by class: a pass over a task, sums in float64, and their sum over processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.check import format_bytes
from everlearn.core.data_source import unlisted
from everlearn.core.forward import arguments
from everlearn.core.likelihood import Categorical
from everlearn.core.parameters import evaluating, grown, unwrap
from everlearn.core.task import Task
from everlearn.curvature.progress import PassProgress
from everlearn.runtime import distributed
from everlearn.runtime.machine_memory import available_memory
from everlearn.surgery.features import compute_features

PASS_BATCH_SIZE = 256
IGNORED_LABEL = -100

# A larger step is a mistake in the labels.
MAX_NEW_CLASSES = 10_000

Statistics = dict[str, Tensor]


@torch.no_grad()
def features_of(model: nn.Module, output: str, x: Any) -> Tensor:
    """Return the features of some inputs, the input of the layer named ``output``, in evaluation mode."""
    inner = unwrap(model)
    args, kwargs = arguments(inner, unlisted(x))
    with evaluating(model):
        return compute_features(inner, output, *args, **kwargs)


def iterate_features(model: nn.Module, output: str, task: Task, shared: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Pass over a task once, and yield the features and the labels of each batch.

    Args:
        model: the model.
        output: name of the output layer.
        task: its training examples are passed over.
        shared: whether the examples are divided among the distributed processes.
    """
    device = next(model.parameters()).device
    with PassProgress(task, "features") as progress:
        for batch in task.examples(PASS_BATCH_SIZE, shared=shared):
            batch = batch.to(device)
            yield features_of(model, output, batch.x), batch.labels()
            progress.finish_batch(len(batch))


def match_labels(features: Tensor, y: Tensor, owner: str) -> tuple[Tensor, Tensor]:
    """Return a row of features for each label that is not ignored, and these labels; raise if they do not match.

    Args:
        features: of examples, or of tokens.
        y: their labels.
        owner: name of the method, for messages.
    """
    if features.dim() == y.dim():
        raise ValueError(
            f"Labels of shape {tuple(y.shape)} are not one class for each feature vector (features have the shape "
            f"{tuple(features.shape)}): give integers, y.argmax(-1) of one-hot labels, y.squeeze(-1) of a column."
        )
    features = features.flatten(0, -2)
    labels = y.flatten()
    if len(features) != len(labels):
        raise ValueError(
            f"There are {len(features)} feature vectors for {len(labels)} labels: the output layer must be called "
            "once for each label. Name the right layer, output=…."
        )

    is_labeled = labels != IGNORED_LABEL
    smallest = int(labels[is_labeled].min()) if bool(is_labeled.any()) else 0
    if smallest < 0:
        raise ValueError(f"{owner} got the label {smallest}: classes count from 0, and only -100 is ignored.")
    features = features[is_labeled]
    if not features.isfinite().all():
        raise ValueError(
            f"{owner} got features that are not finite numbers: look for NaN in the inputs, or for weights that "
            "overflow in half precision."
        )
    return features, labels[is_labeled]


def as_float64(features: Tensor) -> Tensor:
    """Convert features to float64; those on MPS, which has none, on the CPU."""
    device = torch.device("cpu") if features.device.type == "mps" else features.device
    return features.to(device, torch.float64)


def grow_statistic(statistics: Statistics, owner: str, key: str, like: Tensor, *shape: int) -> Tensor:
    """Return a sum on the device of ``like``, created with zeros or grown to this shape."""
    value = statistics.get(key)
    if value is None or tuple(value.shape) != shape:
        num_bytes = 8 * int(torch.Size(shape).numel())
        if like.device.type == "cpu":
            _check_memory(f"{owner}.{key} of shape {shape}", num_bytes)
    if value is None:
        value = like.new_zeros(shape, dtype=torch.float64)
    # A state may have been saved on another device than the model's.
    statistics[key] = grown(value.to(like.device), shape)
    return statistics[key]


def add_sums(statistics: Statistics, owner: str, h: Tensor, y: Tensor, sign: float = 1.0) -> None:
    """Add n_c = Σ 1 ("counts") and s_c = Σ h ("sums") of each class.

    Args:
        statistics: changed in place.
        owner: name of the method, for messages.
        h: representations, in float64.
        y: their classes.
        sign: 1, or -1 to subtract.
    """
    known_classes = len(statistics.get("counts", ()))
    largest = int(y.max())
    if largest >= known_classes + MAX_NEW_CLASSES:
        raise ValueError(
            f"{owner} got the label {largest}, and would need an output for each smaller number: number the classes "
            f"from 0 on, without large gaps ({known_classes} are known)."
        )
    num_classes = max(largest + 1, known_classes)
    counts = grow_statistic(statistics, owner, "counts", h, num_classes)
    sums = grow_statistic(statistics, owner, "sums", h, num_classes, h.shape[1])
    counts.index_add_(0, y, h.new_full((len(y),), sign))
    sums.index_add_(0, y, h, alpha=sign)


def add_products(statistics: Statistics, owner: str, h: Tensor, y: Tensor, sign: float = 1.0) -> None:
    """Add Σ hhᵀ of each class ("products"), after ``add_sums``; the arguments are the same."""
    num_classes, num_features = statistics["sums"].shape
    products = grow_statistic(statistics, owner, "products", h, num_classes, num_features, num_features)
    for c in y.unique().tolist():
        rows = h[y == c]
        products[c].addmm_(rows.T, rows, alpha=sign)


def collect_moments(
    model: nn.Module, output: str, task: Task, previous: Statistics, owner: str, num_outputs: int
) -> tuple[Statistics, Tensor]:
    """Pass over a task, and return n_c, s_c and Σ hhᵀ of all classes, and which of them the task has examples of.

    Args:
        model: the model.
        output: name of the output layer.
        task: its training examples are divided among the distributed processes.
        previous: statistics of earlier tasks, which are not changed.
        owner: name of the method, for messages.
        num_outputs: number of outputs, for as many classes.
    """
    check_classes(task, owner)
    added: Statistics = {}
    for features, y in iterate_features(model, output, task, shared=True):
        rows, labels = match_labels(features, y, owner)
        if len(labels):
            h = as_float64(rows)
            add_sums(added, owner, h, labels)
            add_products(added, owner, h, labels)
    total = sum_statistics(added, previous)

    num_classes = len(total.get("counts", ()))
    if not num_classes:
        raise ValueError(f"{owner}: {task} has no labeled examples.")
    if num_classes > num_outputs:
        raise ValueError(
            f"{task} has examples of class {num_classes - 1}, and the output layer {output!r} has {num_outputs} "
            f"outputs: widen it with everlearn.surgery.heads.grow_output(model, {num_classes})."
        )
    previous_counts = previous.get("counts", torch.zeros(0)).to(total["counts"])
    is_new = total["counts"] - grown(previous_counts, [num_classes]) > 0.5
    return total, is_new.cpu()


def mean_and_covariance(statistics: Statistics, c: int) -> tuple[Tensor, Tensor]:
    """Return μ_c and Σ_c of a class with examples; the covariance of one example is zero."""
    count = statistics["counts"][c]
    mean = statistics["sums"][c] / count
    covariance = (statistics["products"][c] - count * mean.outer(mean)) / (count - 1).clamp(min=1)
    return mean, covariance


def mean_and_factor(statistics: Statistics, c: int, variance: float) -> tuple[Tensor, Tensor]:
    """Return μ_c and the lower Cholesky factor of Σ_c + variance · I."""
    mean, covariance = mean_and_covariance(statistics, c)
    covariance.diagonal().add_(variance)
    factor, failure = torch.linalg.cholesky_ex(covariance)
    if failure:
        raise ValueError(f"The covariance of class {c} is singular: raise the variance {variance:g} that is added.")
    return mean, factor


def sum_statistics(local: Statistics, previous: Statistics) -> Statistics:
    """Sum the statistics of all processes, and add those of before.

    Args:
        local: of this process; without any keys if it had no examples.
        previous: the same in all processes.
    """
    # Processes may have seen different classes.
    shapes: dict[str, torch.Size] = {}
    for statistics in distributed.all_gather_object({key: value.shape for key, value in local.items()}):
        for key, shape in statistics.items():
            largest = [max(sizes) for sizes in zip(shape, shapes.get(key, shape), strict=True)]
            shapes[key] = torch.Size(largest)

    device = next(iter({**local, **previous}.values()), torch.zeros(0)).device
    total = {}
    for key, shape in shapes.items():
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        total[key] = grown(local.get(key, zeros), shape).clone()
    distributed.all_reduce_(total.values())

    for key, previous_value in previous.items():
        value = previous_value.to(device)
        shape = total.get(key, value).shape
        largest_shape = [max(sizes) for sizes in zip(shape, value.shape, strict=True)]
        total[key] = grown(total.get(key, value.new_zeros(shape)), largest_shape) + grown(
            value.to(device), largest_shape
        )
    return total


def check_classes(task: Any, owner: str) -> None:
    """Raise unless the labels of a task are classes."""
    likelihood = getattr(task, "likelihood", None)
    if likelihood is not None and not isinstance(likelihood, Categorical):
        raise ValueError(
            f"{owner} keeps statistics by class, and the labels of {task} are {likelihood}: give classes, one for each "
            "example."
        )


def _check_memory(description: str, num_bytes: int) -> None:
    """Raise if a tensor and three more of its size, for the computation, do not fit into the memory."""
    free_bytes = available_memory()
    if free_bytes is not None and 4 * num_bytes > free_bytes:
        raise MemoryError(
            f"{description} needs {format_bytes(num_bytes)}, and three times as much to compute the output layer; "
            f"{format_bytes(free_bytes)} are available: choose a smaller dimension, or a model with fewer features."
        )
