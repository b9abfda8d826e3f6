"""Checks of a training loop that a method is attached to."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from everlearn.core.parameters import refuse_meta

if TYPE_CHECKING:
    from everlearn.core.attachment import Attachment
    from everlearn.core.method import Method


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
    attachments = [getattr(optimizer, "everlearn_attachment", None), *(m._attached for m in list_parts(method))]
    if any(attachments):
        raise ValueError(
            "A method is attached here already: call attached.remove() first. To use two methods, chain them: "
            "EWC() + ER()."
        )
    check_parameters(method, model, optimizer)


def check_parameters(method: Method, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if an optimizer lacks trainable parameters of the method or of the model."""
    optimized = optimized_ids(optimizer)
    if any(p.requires_grad and id(p) not in optimized for p in method.parameters()):
        raise ValueError(
            f"{name_method(method)} has parameters that this optimizer does not have: create it after "
            "begin_task(model, task), with [*model.parameters(), *method.parameters()], and attach to it."
        )
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in optimized]
    if missing:
        names = ", ".join(missing[:3]) + ", …" * (len(missing) > 3)
        raise ValueError(
            f"This optimizer does not have {names}: a method needs one optimizer with all trainable parameters, "
            "created after begin_task(model, task). Freeze the others with p.requires_grad_(False)."
        )


def optimized_ids(optimizer: Optimizer) -> set[int]:
    """Identify the parameters of an optimizer."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def list_parts(method: Method) -> tuple[Method, ...]:
    """List a method and, of a chain, its methods."""
    return (method, *getattr(method, "methods", ()))


def name_method(method: Method) -> str:
    """Name a method by its class; a chain by the classes of its methods."""
    return " + ".join(type(m).__name__ for m in getattr(method, "methods", [method]))


def missing_examples(method: Method) -> ValueError:
    """Return the error of a loop whose gradients lack the terms of a method that needs the batch."""
    return ValueError(
        f"{name_method(method)} needs the examples of each step: after the model's outputs, write loss = "
        "attached.loss(loss, x, y, outputs), and call backward() of this loss."
    )


def refuse_second_pass(model: nn.Module) -> None:
    """Raise if a second forward pass of the same examples would change the model."""
    if any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
        raise ValueError(
            "A second forward pass would update the running statistics of BatchNorm twice: give the outputs, "
            "attached.loss(loss, x, y, outputs)."
        )


def refuse_scaled_gradients(optimizer: Optimizer) -> None:
    """Raise if the gradients that a method would edit are still scaled."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ValueError(
            "This optimizer unscales gradients inside its step, after the method has edited them: call "
            "scaler.unscale_(optimizer) before scaler.step(optimizer)."
        )


def refuse_gradient(loss: Tensor | float, method: Method, attached_method: Method) -> None:
    """Raise when a loop itself differentiates a loss or penalty of a method that is attached, also as a part."""
    name = type(method).__name__

    def refuse(gradient: Tensor) -> None:
        raise ValueError(
            f"The loss of this loop contains {name}.loss() or {name}.penalty(), but {name_method(attached_method)} is "
            "attached and would add these terms twice: take the loss from attached.loss(…) only."
        )

    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.register_hook(refuse)


def warn_of_other_optimizers(attachment: Attachment) -> Callable[[Optimizer, Any, Any], None]:
    """Return a hook that warns once for each other optimizer that moves the model: the method would have no effect."""
    reference = weakref.ref(attachment)  # the hook outlives an attachment that is forgotten
    checked_optimizers = weakref.WeakSet[Optimizer]()

    def warn(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        attachment = reference()
        if attachment is None or optimizer is attachment.optimizer or optimizer in checked_optimizers:
            return
        checked_optimizers.add(optimizer)
        is_wrapper = any(value is attachment.optimizer for value in vars(optimizer).values())
        model_ids = {id(p) for p in attachment.model.parameters() if p.requires_grad}
        if model_ids & optimized_ids(optimizer) and not is_wrapper:
            name = type(attachment.method).__name__
            warnings.warn(
                f"A {type(optimizer).__name__} takes this step, but {name} is attached to another optimizer and has no "
                f"effect: attached.remove(), then {name}.attach(model, optimizer) with the new one.",
                UserWarning,
                stacklevel=3,
            )

    return warn
