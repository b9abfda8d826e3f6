"""Bad input, refused in one sentence that says what to do, before or where it does harm."""

from __future__ import annotations

import math
import numbers
from typing import get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from everlearn.batch import Batch
from everlearn.data import Arrays
from everlearn.likelihood import Categorical
from everlearn.method import Method
from everlearn.params import refuse_meta
from everlearn.stream import Split, Stream, Task


def check_run(method: object, stream: object, optimizer: object, seed: object, split: str) -> None:
    """Refuse arguments of the wrong kind."""
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
    """Refuse settings no training can come of."""
    for name, value in counts.items():
        if value is None and name == "iterations":
            continue
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
            hint = "; to test a model without training it use evaluate()" if name == "epochs" else ""
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}{hint}.")
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"clip must be above 0 and finite, got {clip}; None for no clipping.")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision: got {precision!r}, allowed: 'float32', 'bfloat16'.")


def check_task(task: Task) -> None:
    """Refuse arrays that are empty or have labels outside the scenario's table."""
    data = task.train
    if not isinstance(data, Arrays):
        return
    if not len(data):
        raise ValueError(f"{task} has no examples to train on: leave it out of the stream.")
    if isinstance(task.likelihood, Categorical) and data.y is not None and data.y.dim() == 1:
        if int(data.y.min()) < 0:
            raise ValueError(f"{task} has the label {int(data.y.min())}: classes are numbered from 0.")
        if task.allowed is not None and task.id is not None:
            named = set(data.y.unique().tolist())
            may = set(task.allowed[task.id].nonzero().flatten().tolist())
            if wrong := sorted(named - may):
                raise ValueError(
                    f"{task} has labels {wrong} that its scenario does not allow: the table allows it {sorted(may)}."
                )


def check_first_batch(task: Task, batch: Batch, parameters: list[nn.Parameter]) -> None:
    """Refuse a model without values and inputs of another dtype than its weights, once per task."""
    refuse_meta(parameters)
    weights = {p.dtype for p in parameters if p.is_floating_point()}
    for x in tree_leaves(batch.x):
        if isinstance(x, Tensor) and x.is_floating_point() and weights and x.dtype not in weights:
            kind, own = _dtype(x), str(min(weights, key=str)).removeprefix("torch.")
            raise TypeError(
                f"{task} gives {kind} inputs but the model's weights are {own}: convert the inputs with "
                f"x.to(torch.{own}) or the model with model.to(torch.{kind})."
            )


def check_outputs(task: Task, batch: Batch, out: Tensor) -> None:
    """Refuse to score outputs that are no numbers, or labels that no output stands for."""
    if not isinstance(out, Tensor):
        raise TypeError(
            f"The model must give a tensor of outputs, it gave a {type(out).__name__}: wrap it in a module whose forward(x) gives the outputs "
            "alone; for transformers' models that is everlearn.integrations.huggingface.Outputs(model)."
        )
    if out.isnan().any():
        blame = "its inputs hold NaN" if _broken(batch.x) else "the model's weights are no longer finite"
        raise FloatingPointError(f"The model's outputs for {task} are not numbers: {blame}.")
    classes = batch.y if isinstance(batch.likelihood, Categorical) else None
    if classes is not None and classes.dim() == 1 and task.allowed is not None and batch.t is not None:
        own = task.allowed.to(out.device)[batch.t]
        if (classes >= own.shape[1]).any() or not own.gather(1, classes[:, None]).all():
            raise ValueError(f"{task} is tested on classes that it does not have in training.")
    if classes is not None and classes.numel() and int(classes.max()) >= out.shape[-1]:
        raise ValueError(
            f"{task} is tested on class {int(classes.max())} but the model has only {out.shape[-1]} outputs: build it "
            "with more outputs, or renumber the labels from 0."
        )


def explain_error(error: Exception, task: Task, batch: Batch, first: bool) -> Exception:
    """An error of torch with what the model was given, if it is the inputs' fault; otherwise the error itself."""
    if "Expected more than 1 value per channel" in str(error):
        return ValueError(
            f"{task} has a batch of one example, which BatchNorm cannot learn from: change the batch size."
        )
    if not first or not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return error
    inputs = [x for x in tree_leaves(batch.x) if isinstance(x, Tensor)]
    given = ", ".join(f"{_dtype(x)} of shape {tuple(x.shape)}" for x in inputs)
    cure = "convert them, x.float() / 255 for images; " if any(x.dtype == torch.uint8 for x in inputs) else ""
    return TypeError(f"The model cannot take the inputs of {task} ({given}): {cure}torch says: {error}")


def explain_loss(value: float, task: Task, step: int, batch: Batch, model: nn.Module) -> str:
    """Say where the loss stopped being a number, and what is to blame; epochs and steps count from 1."""
    rows = batch.allowed_rows
    if _broken(batch.x):
        cure = f"{_blame(task)}has NaN or infinite inputs: clean the data"
    elif batch.y is not None and _broken(batch.y):
        cure = "the batch has NaN or infinite targets: clean the data"
    elif batch.y is not None and not batch.weight:
        cure = "none of the batch's labels counts, all are -100: leave such examples out, or take larger batches"
    elif rows is not None and batch.y is not None and batch.y.dim() == 1 and not _named(rows, batch.y):
        cure = "the batch has labels that the task's table of allowed classes does not name"
    elif any(not p.isfinite().all() for p in model.parameters()):
        cure = "the weights are no longer finite since the step before: lower the learning rate or the strength of the method, or clip gradients"
    else:
        cure = "lower the learning rate or the strength of the method, or clip gradients; the parameters are those before this step"
    return f"The loss is {value} in {task}, epoch {batch.epoch + 1}, step {step}: {cure}."


def _named(rows: Tensor, y: Tensor) -> bool:
    """Whether every label that is not ignored is an allowed one."""
    return bool((rows.gather(1, y.clamp(min=0)[:, None])[:, 0] | (y == -100)).all())


def _blame(task: Task) -> str:
    """How many of a task's examples are broken, where they can be counted."""
    if not isinstance(task.train, Arrays) or not isinstance(task.train.x, Tensor):
        return "the batch "
    rows = (~task.train.x.isfinite()).flatten(1).any(1)
    if not rows.any():
        return "after its transform the batch "
    return f"{int(rows.sum())} of {len(rows)} examples (first: example {int(rows.nonzero()[0])}) "


def _broken(value: object) -> bool:
    return any(v.is_floating_point() and not v.isfinite().all() for v in tree_leaves(value) if isinstance(v, Tensor))


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
