"""Checks of arguments and data, and explanations of errors during training."""

from __future__ import annotations

import math
import numbers
from typing import get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from everlearn.core.batch import Batch
from everlearn.core.data_source import Arrays
from everlearn.core.likelihood import Categorical
from everlearn.core.method import Method
from everlearn.core.parameters import refuse_meta
from everlearn.core.stream import Stream
from everlearn.core.task import Split, Task


def check_run(method: object, stream: object, optimizer: object, seed: object, split: str) -> None:
    """Raise for arguments of ``run`` that have a wrong type."""
    if not isinstance(method, Method):
        raise TypeError(f"method must be a method such as Method() or L2(), got {method!r}.")
    if not isinstance(stream, Stream):
        raise TypeError(f"stream must be a Stream, got a {type(stream).__name__}; streams.from_tasks makes one.")
    if not callable(optimizer):
        raise TypeError(
            "optimizer must be a function of the parameters, such as lambda ps: torch.optim.SGD(ps, lr=0.1)."
        )
    if not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed must be a whole number, got {seed!r}.")
    if split not in get_args(Split):
        raise ValueError(f"split: got {split!r}, allowed: {', '.join(map(repr, get_args(Split)))}.")


def check_settings(counts: dict[str, int | None], clip: float | None, precision: str) -> None:
    """Raise for training settings outside their ranges."""
    for name, value in counts.items():
        if value is None and name == "iterations":
            continue
        lowest = 0 if name == "epochs" else 1
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < lowest:
            raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}.")
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"clip must be above 0 and finite, got {clip}; None for no clipping.")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision: got {precision!r}, allowed: 'float32', 'bfloat16'.")


def check_num_epochs(method: Method, epochs: int, iterations: int | None) -> None:
    """Raise if a method that trains gets no epochs."""
    if method.trains and iterations is None and epochs < 1:
        raise ValueError(
            f"epochs must be a whole number of at least 1, got {epochs!r}; to test a model without training it use "
            "evaluate()."
        )


def check_task(task: Task) -> None:
    """Raise for arrays that are empty or have labels outside the scenario's table of allowed classes."""
    data = task.train
    if not isinstance(data, Arrays):
        return
    if not len(data):
        raise ValueError(f"{task} has no examples to train on: leave it out of the stream.")

    if not isinstance(task.likelihood, Categorical) or data.y is None or data.y.dim() != 1:
        return
    if int(data.y.min()) < 0:
        raise ValueError(f"{task} has the label {int(data.y.min())}: classes are numbered from 0.")
    if task.allowed is not None and task.id is not None:
        labels = set(data.y.unique().tolist())
        allowed_labels = set(task.allowed[task.id].nonzero().flatten().tolist())
        wrong_labels = sorted(labels - allowed_labels)
        if wrong_labels:
            raise ValueError(
                f"{task} has labels {wrong_labels} that its scenario does not allow: the table allows it "
                f"{sorted(allowed_labels)}."
            )


def check_first_batch(task: Task, batch: Batch, parameters: list[nn.Parameter]) -> None:
    """Raise for a model on the meta device, and for inputs of another dtype than the weights; called once per task."""
    refuse_meta(parameters)
    weight_dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    for x in tree_leaves(batch.x):
        if isinstance(x, Tensor) and x.is_floating_point() and weight_dtypes and x.dtype not in weight_dtypes:
            input_dtype = _dtype_name(x.dtype)
            weight_dtype = _dtype_name(min(weight_dtypes, key=str))
            raise TypeError(
                f"{task} gives {input_dtype} inputs but the model's weights are {weight_dtype}: convert the inputs "
                f"with x.to(torch.{weight_dtype}) or the model with model.to(torch.{input_dtype})."
            )


def check_outputs(task: Task, batch: Batch, outputs: Tensor) -> None:
    """Raise for outputs that are NaN, and for test labels without an output."""
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"The model must give a tensor of outputs, it gave a {type(outputs).__name__}: wrap it in a module whose "
            "forward(x) gives the outputs alone; for transformers' models that is "
            "everlearn.integrations.huggingface.Outputs(model)."
        )
    if outputs.isnan().any():
        cause = "its inputs contain NaN" if _has_nonfinite(batch.x) else "the model's weights are no longer finite"
        raise FloatingPointError(f"The model's outputs for {task} are not numbers: {cause}.")

    labels = batch.y if isinstance(batch.likelihood, Categorical) else None
    if labels is None:
        return
    if labels.dim() == 1 and task.allowed is not None and batch.t is not None:
        task_allowed = task.allowed.to(outputs.device)[batch.t]
        if (labels >= task_allowed.shape[1]).any() or not task_allowed.gather(1, labels[:, None]).all():
            raise ValueError(f"{task} is tested on classes that it does not have in training.")
    if labels.numel() and int(labels.max()) >= outputs.shape[-1]:
        raise ValueError(
            f"{task} is tested on class {int(labels.max())} but the model has only {outputs.shape[-1]} outputs: build "
            "it with more outputs, or renumber the labels from 0."
        )


def explain_error(error: Exception, task: Task, batch: Batch, first: bool) -> Exception:
    """Add the types and shapes of the inputs to an error of torch, if they may be its cause.

    Args:
        error: the error of the forward or backward pass.
        task: the current task.
        batch: the current batch.
        first: whether it is the first batch; later ones are like it, so that they are not the cause.

    Returns:
        An error to raise; ``error`` itself if the inputs are not the cause.
    """
    if "Expected more than 1 value per channel" in str(error):
        return ValueError(
            f"{task} has a batch of one example, which BatchNorm cannot learn from: change the batch size."
        )
    if not first or not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return error

    inputs = [x for x in tree_leaves(batch.x) if isinstance(x, Tensor)]
    shapes = ", ".join(f"{_dtype_name(x.dtype)} of shape {tuple(x.shape)}" for x in inputs)
    advice = ""
    if any(x.dtype == torch.uint8 for x in inputs):
        advice = "convert them, x.float() / 255 for images; "
    return TypeError(f"The model cannot take the inputs of {task} ({shapes}): {advice}torch says: {error}")


def explain_loss(
    value: float, task: Task, step: int, batch: Batch | None, model: nn.Module, steps_since: int = 0
) -> str:
    """Explain a loss that is not finite: where it occurred and the likely cause.

    Args:
        value: the loss.
        task: the current task.
        step: the step within the task, counted from 1.
        batch: the batch of that step; None if unknown.
        model: the model.
        steps_since: updates of the weights since the loss was computed; on an accelerator it is read later.
    """
    cause = None
    epoch = ""
    if batch is not None:
        cause = _explain_batch(batch, task)
        epoch = f" epoch {batch.epoch + 1},"
    if cause is None:
        cause = _explain_weights(model, steps_since)
    return f"The loss is {value} in {task},{epoch} step {step}: {cause}."


def _explain_batch(batch: Batch, task: Task) -> str | None:
    """Find the cause of a loss that is not finite in the data of its batch."""
    allowed_rows = batch.allowed_rows
    if _has_nonfinite(batch.x):
        return f"{_count_nonfinite(task)}has NaN or infinite inputs: clean the data"
    if batch.y is None:
        return None
    if _has_nonfinite(batch.y):
        return "the batch has NaN or infinite targets: clean the data"
    if not batch.weight:
        return "all labels of the batch are -100, which are ignored: leave such examples out, or use larger batches"
    if allowed_rows is not None and batch.y.dim() == 1 and not _are_allowed(batch.y, allowed_rows):
        return "the batch has labels that the task's table of allowed classes does not name"
    return None


def _explain_weights(model: nn.Module, steps_since: int) -> str:
    """Explain a loss that is not finite although the data of its batch are."""
    if steps_since:
        return (
            "lower the learning rate or the strength of the method, or clip gradients; it was read after "
            f"{steps_since} further updates of the weights: load those of a checkpoint"
        )
    if any(not p.isfinite().all() for p in model.parameters()):
        return (
            "the weights are no longer finite since the step before: lower the learning rate or the strength of the "
            "method, or clip gradients"
        )
    return (
        "lower the learning rate or the strength of the method, or clip gradients; the parameters are those "
        "before this step"
    )


def _are_allowed(labels: Tensor, allowed_rows: Tensor) -> bool:
    """Return whether every label that is not ignored (-100) is allowed."""
    is_allowed = allowed_rows.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return bool((is_allowed | (labels == -100)).all())


def _count_nonfinite(task: Task) -> str:
    """Count the examples with NaN or infinite inputs, if the task's data are arrays."""
    if not isinstance(task.train, Arrays) or not isinstance(task.train.x, Tensor):
        return "the batch "
    is_nonfinite = (~task.train.x.isfinite()).flatten(1).any(1)
    if not is_nonfinite.any():
        return "after its transform the batch "
    first_example = int(is_nonfinite.nonzero()[0])
    return f"{int(is_nonfinite.sum())} of {len(is_nonfinite)} examples (first: example {first_example}) "


def _has_nonfinite(value: object) -> bool:
    """Return whether a tensor, or a container of tensors, has NaN or infinite values."""
    return any(v.is_floating_point() and not v.isfinite().all() for v in tree_leaves(value) if isinstance(v, Tensor))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
