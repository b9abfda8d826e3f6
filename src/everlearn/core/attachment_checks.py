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
from everlearn.core.parameters import refuse_meta

if TYPE_CHECKING:
    from everlearn.core.attachment import Attachment
    from everlearn.core.method import Method

# Relative difference between two ways to compute the same loss, in any precision.
TOLERANCE = 1e-3


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
    if method._attached is not None and method._attached._handles:
        raise ValueError(
            "This method is attached already: call attached.remove() first. To use two methods, chain them: "
            "EWC() + ER()."
        )

    optimized_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and id(p) not in optimized_ids for p in method.parameters()):
        raise ValueError(
            f"{type(method).__name__} has parameters that this optimizer does not have: create it after "
            "begin_task(model, task), with [*model.parameters(), *method.parameters()]."
        )
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in optimized_ids]
    if missing:
        names = ", ".join(missing[:3])
        if len(missing) > 3:
            names += ", …"
        raise ValueError(
            f"This optimizer does not have {names}: a method needs one optimizer with all trainable parameters. "
            "Freeze the others with p.requires_grad_(False)."
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
def has_weight(loss: Tensor, batch: Batch, weight: float) -> bool:
    """Return whether a loss is the likelihood's mean loss of the batch times a weight."""
    if batch.outputs is None or batch.y is None:
        return False
    mean_loss = float(batch.likelihood.loss(batch.outputs, batch.y, batch.allowed_rows))
    return mean_loss > 0 and math.isclose(float(loss), weight * mean_loss, rel_tol=TOLERANCE)


def check_weight(loss: Tensor, batch: Batch, weight: float | Tensor) -> None:
    """Raise if the loop's loss is a well-known multiple of the mean over labels, but not the given one.

    A loss that is no such multiple is the loop's own, as with label smoothing, and is used as it is.
    """
    if has_weight(loss, batch, float(weight)):
        return
    for name, common_weight in common_weights(batch).items():
        if has_weight(loss, batch, common_weight):
            raise ValueError(
                f"This loss is {name}, {common_weight:g} times the mean loss per label of {batch.likelihood}: give "
                f"attached.loss(…, weight={common_weight:g}), or take the mean."
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
