"""Run a method inside an external training loop."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everlearn.core.attachment_checks import (
    OtherOptimizerWarning,
    check_attachable,
    check_method_parameters,
    check_weight,
    method_parts,
    torch_optimizer,
)
from everlearn.core.batch import Batch
from everlearn.core.data_source import unlisted
from everlearn.core.forward import read_outputs
from everlearn.core.likelihood import Categorical, Likelihood

if TYPE_CHECKING:
    from everlearn.core.method import Method


class Attachment:
    """A method in an external training loop, created by ``method.attach(model, optimizer)``.

    The loop keeps its own loss; one line adds the method's terms to it::

        attached = method.attach(model, optimizer)
        for x, y in loader:
            outputs = model(x)
            loss = attached.loss(cross_entropy(outputs, y), x, y, outputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    ``before_step`` and ``after_step`` are called by hooks of the optimizer. Scaling and accumulation act on the
    method's terms as on the rest of the loss. In a loop that clips, call ``attached.before_step()`` before clipping, so
    that methods edit gradients before they are clipped, as in a loop of the method's own hooks.

    Methods whose penalty depends on the parameters only (EWC, SI, MAS, L2) also work without the line. The gradient of
    the penalty is then added before the step, once per step.

    Args:
        method: any method. Call its ``begin_task`` before the optimizer is created, and its ``end_task`` after the
            loop.
        model: the model whose outputs the loop computes.
        optimizer: has all trainable parameters of model and method.
        likelihood: the distribution that the outputs parameterize; by default classes.
    """

    def __init__(
        self, method: Method, model: nn.Module, optimizer: Optimizer, likelihood: Likelihood | None = None
    ) -> None:
        optimizer = torch_optimizer(optimizer)
        check_attachable(method, model, optimizer)
        self.method = method
        self.model = model
        self.likelihood = likelihood or Categorical()

        # Of the current step: whether the loss has the method's terms by ``loss``, and what the loop itself has added.
        self._is_in_loss = False
        self._added_by_loop: set[str] = set()
        self._is_edited = False
        self._is_step_due = False

        # Whether the method calls the model itself: integrations do not add terms to such a pass.
        self.is_computing = False
        self._is_weight_checked = False
        self._checked_parameters: list[int] = []

        self._optimizer = weakref.ref(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            register_optimizer_step_pre_hook(OtherOptimizerWarning(self, optimizer)),
        ]
        optimizer.everlearn_attachment = weakref.ref(self)  # type: ignore[attr-defined]
        for part in method_parts(method):
            part._attached = self

    def loss(
        self, loss: Tensor, x: Any = None, y: Tensor | None = None, outputs: Any = None, *, weight: float | Tensor = 1.0
    ) -> Tensor:
        """Return the loss of the method, with the loop's loss in place of the loss of the new examples.

        Args:
            loss: the loop's loss of one micro-batch.
            x: its inputs, as the model got them. They and all that follows are for methods that need the batch.
            y: its labels.
            outputs: the model's outputs for them, with their graph. Without them the model is called again.
            weight: the loop's factor of a mean over the micro-batch's labels, such as their number for a sum. Not
                needed if the loop multiplies the result: ``attached.loss(…) / 4``.
        """
        self._is_in_loss = True
        if isinstance(weight, (int, float)) and weight == 0:  # no label of the micro-batch counts
            return loss
        if not self.method.needs_batch:
            if outputs is not None and y is not None:
                self._check_weight(loss, self._make_batch(loss / weight, x, y, outputs), weight)
            with self._computing():
                return loss + weight * self.method.penalty(self.model)

        batch = self._make_batch(loss / weight, x, y, outputs)
        self._check_weight(loss, batch, weight)
        with self._computing():
            return self.method.loss(self.model, batch) * weight

    def _check_weight(self, loss: Tensor, batch: Batch, weight: float | Tensor) -> None:
        """Check the scale of the loop's loss, on the first batch only: the check synchronizes with the device."""
        if not self._is_weight_checked:
            self._is_weight_checked = True
            check_weight(loss, batch, weight)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Mark forward passes and losses inside as the method's."""
        self.is_computing = True
        try:
            yield
        finally:
            self.is_computing = False

    def _make_batch(self, loss: Tensor, x: Any, y: Tensor | None, outputs: Any) -> Batch:
        """Create the batch of a loop that has computed its loss, and perhaps its outputs."""
        if x is None:
            raise ValueError(f"{self._name} needs the examples: attached.loss(loss, x, y, outputs).")
        trains_batch_norm = any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules())
        if outputs is None and trains_batch_norm:
            raise ValueError(
                "A second forward pass would update the running statistics of BatchNorm twice: give the outputs, "
                "attached.loss(loss, x, y, outputs)."
            )
        labels = None if y is None else self.likelihood.labels(unlisted(y))
        outputs = None if outputs is None else read_outputs(outputs)
        return Batch(x, labels, likelihood=self.likelihood, outputs=outputs, loop_loss=loss)

    def note_loss(self, method: Method, loss: Tensor | float) -> None:
        """Notice when the loop itself differentiates a loss or penalty of the method, or of a part of a chain."""
        if not self.is_computing and isinstance(loss, Tensor) and loss.requires_grad:
            name = type(method).__name__
            loss.register_hook(lambda gradient: self._added_by_loop.add(name))

    def before_step(self) -> None:
        """Add the penalty's gradient if no loss contains it, then let the method edit the gradients."""
        if all(p.grad is None for p in self.model.parameters()):
            return
        is_in_loss = self._is_in_loss
        added_by_loop = sorted(self._added_by_loop)
        self._is_in_loss = False
        self._added_by_loop = set()

        self._check_parameters()
        if is_in_loss and added_by_loop:
            name = added_by_loop[0]
            raise ValueError(
                f"The loss of this loop contains terms of {name} twice: by attached.loss(…) and by {name}.loss() or "
                f"{name}.penalty(). Leave out one of them."
            )
        has_parts = len(method_parts(self.method)) > 1
        if added_by_loop and has_parts and type(self.method).__name__ not in added_by_loop:
            raise ValueError(
                f"This loop adds the terms of {', '.join(added_by_loop)}, but {self._name} is attached: take the loss "
                "from attached.loss(…), which adds all terms."
            )
        if not is_in_loss and not added_by_loop:
            self._add_penalty_gradient()

        with self._computing():
            self.method.before_step(self.model)
        self._is_edited = True
        self._is_step_due = True

    def _check_parameters(self) -> None:
        """Raise if the method has got parameters that the optimizer lacks, as after a later ``begin_task``."""
        parameters = [id(p) for p in self.method.parameters()]
        optimizer = self._optimizer()
        if parameters != self._checked_parameters and optimizer is not None:
            self._checked_parameters = parameters
            check_method_parameters(self.method, optimizer)

    @property
    def _name(self) -> str:
        """The method's name; of a chain, its methods' names."""
        parts = method_parts(self.method)
        return " + ".join(type(part).__name__ for part in parts[1:] or parts)

    def _add_penalty_gradient(self) -> None:
        """Add the gradient of a penalty that depends on the parameters only."""
        if self.method.needs_batch:
            raise ValueError(
                f"{self._name} needs the examples of each step: after the model's outputs and before "
                "backward(), write loss = attached.loss(loss, x, y, outputs)."
            )
        with self._computing(), torch.enable_grad():
            penalty = self.method.penalty(self.model)
            if isinstance(penalty, Tensor) and penalty.requires_grad:
                penalty.backward()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Edit the gradients before the step, or after the closure that computes them."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ValueError(
                "This optimizer unscales gradients inside its step, after the method has edited them: call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        # The first of the arguments is the optimizer.
        is_positional = len(args) > 1
        closure = args[1] if is_positional else kwargs.get("closure")
        if closure is None:
            if not self._is_edited:
                self.before_step()
            return None

        # A line search evaluates the closure several times, each time with new gradients.
        def closure_and_edit() -> Any:
            self._is_edited = False
            loss = closure()
            if not self._is_edited:
                self.before_step()
            return loss

        if is_positional:
            return (args[0], closure_and_edit), kwargs
        return args, {**kwargs, "closure": closure_and_edit}

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A closure may have stopped the step before any gradient was computed.
        is_step_due = self._is_step_due
        self._is_edited = False
        self._is_step_due = False
        if is_step_due:
            with self._computing():
                self.method.after_step(self.model)

    @property
    def is_attached(self) -> bool:
        """Whether the method is still attached."""
        return bool(self._handles)

    def remove(self) -> None:
        """Detach the method from the loop."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for part in method_parts(self.method):
            if part._attached is self:
                part._attached = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> Any:
        # A copied or saved method is not attached.
        return type(None), ()
