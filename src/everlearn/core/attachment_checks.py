"""Checks of a training loop that a method is attached to: its optimizer, its model and the scale of its loss."""

from __future__ import annotations

import math
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everlearn.core.batch import Batch
from everlearn.core.likelihood import Bernoulli, Gaussian
from everlearn.core.parameters import accumulate_dtype, refuse_meta

if TYPE_CHECKING:
    from everlearn.core.attachment import Attachment
    from everlearn.core.method import Method

# Relative difference between two ways to compute the same loss, in single and in half precision.
TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside wrappers of Accelerate, Lightning or two-step optimizers such as SAM."""
    while not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith("accelerate"):
        inner = getattr(optimizer, "optimizer", getattr(optimizer, "_optimizer", None))
        if inner is None:
            raise TypeError(f"A method is attached to a torch optimizer, got a {type(optimizer).__name__}.")
        optimizer = inner
    base = getattr(optimizer, "base_optimizer", None)
    if isinstance(base, Optimizer):
        return base
    return optimizer


def check_attachable(method: Method, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise for optimizers and models whose steps the hooks cannot serve."""
    refuse_meta(model.parameters())
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the loss several times per step: call the method's hooks in your own loop.")
    if any(type(part).__module__.startswith("deepspeed") for part in (optimizer, *model.modules())):
        raise TypeError("DeepSpeed's engine does not give access to its gradients, so no method can edit them.")
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters()):
        raise TypeError(
            "Parameters of this model have hooks that use each gradient during backward(), as optimizers do that step "
            "there: a method needs all gradients of a step together."
        )
    other = getattr(optimizer, "everlearn_attachment", lambda: None)()
    is_optimizer_taken = other is not None and other.is_attached
    is_method_taken = any(part._attached is not None and part._attached.is_attached for part in method_parts(method))
    if is_optimizer_taken or is_method_taken:
        raise ValueError(
            "A method is attached here already: call attached.remove() first. To use two methods, chain them: "
            "EWC() + ER()."
        )
    check_method_parameters(method, optimizer)

    optimized_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in optimized_ids]
    if missing:
        names = ", ".join(missing[:3])
        if len(missing) > 3:
            names += ", …"
        raise ValueError(
            f"This optimizer does not have {names}: a method needs one optimizer with all trainable parameters. "
            "Freeze the others with p.requires_grad_(False)."
        )


def method_parts(method: Method) -> tuple[Method, ...]:
    """Return a method and, of a chain, its methods."""
    return (method, *getattr(method, "methods", ()))


def check_method_parameters(method: Method, optimizer: Optimizer) -> None:
    """Raise if an optimizer lacks parameters of the method, because it was created before ``begin_task``."""
    optimized_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and id(p) not in optimized_ids for p in method.parameters()):
        raise ValueError(
            f"{type(method).__name__} has parameters that this optimizer does not have: create it after "
            "begin_task(model, task), with [*model.parameters(), *method.parameters()], and attach to it."
        )


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
    if not mean_loss > 0:
        return None
    return float(loss) / mean_loss


def is_close(ratio: float, weight: float, loss: Tensor) -> bool:
    """Return whether a ratio is a weight, up to the rounding of the loss."""
    tolerance = TOLERANCE if loss.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    return math.isclose(ratio, weight, rel_tol=tolerance)


def check_weight(loss: Tensor, batch: Batch, weight: float | Tensor) -> None:
    """Raise if the loop's loss is a well-known multiple of the mean over labels, but not the given one.

    A loss that is no such multiple is the loop's own, as with label smoothing, and is used as it is.
    """
    if loss.dim():
        raise ValueError(f"The loss must be a single number, got shape {tuple(loss.shape)}: take its mean.")
    if float(weight) < 0:
        raise ValueError(f"weight must be 0 or more, got {float(weight):g}.")
    ratio = find_ratio(loss, batch)
    if ratio is None or is_close(ratio, float(weight), loss):
        return
    for name, common_weight in common_weights(batch).items():
        if is_close(ratio, common_weight, loss):
            raise ValueError(
                f"This loss is {name}, {common_weight:g} times the mean loss per label of {batch.likelihood}: give "
                f"weight={common_weight:g}, or take the mean."
            )

    # A mean with the weight of a sum, or a loss that is divided before it is passed.
    factor = ratio / float(weight)
    multiple = max(round(factor), round(1 / factor))
    is_exact = loss.dtype in (torch.float32, torch.float64)
    if is_exact and multiple > 1 and min(abs(factor / multiple - 1), abs(factor * multiple - 1)) < 1e-5:
        raise ValueError(
            f"This loss is {ratio:g} times the mean loss per label of {batch.likelihood}, but its weight is "
            f"{float(weight):g}: give weight={ratio:g}. In a loop that accumulates, divide the result: "
            "attached.loss(…) / 4."
        )


class OtherOptimizerWarning:
    """Warn when another optimizer moves the model: the method would have no effect. Holds weak references only."""

    def __init__(self, attachment: Attachment, optimizer: Optimizer) -> None:
        self.attachment = weakref.ref(attachment)
        self.optimizer = weakref.ref(optimizer)
        self.checked_optimizers = weakref.WeakSet[Optimizer]()

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn once for each other optimizer that has trainable parameters of the model."""
        attached_optimizer = self.optimizer()
        attachment = self.attachment()
        if optimizer is attached_optimizer or attachment is None or optimizer in self.checked_optimizers:
            return
        self.checked_optimizers.add(optimizer)

        is_wrapper = any(value is attached_optimizer for value in vars(optimizer).values())
        model_ids = {id(p) for p in attachment.model.parameters() if p.requires_grad}
        moves_model = any(id(p) in model_ids for group in optimizer.param_groups for p in group["params"])
        if moves_model and not is_wrapper:
            name = type(attachment.method).__name__
            warnings.warn(
                f"A {type(optimizer).__name__} takes this step, but {name} is attached to another optimizer and has no "
                f"effect: attached.remove(), then {name}.attach(model, optimizer) with the new one.",
                UserWarning,
                stacklevel=3,
            )
