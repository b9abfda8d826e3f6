"""Run a method inside an external training loop."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everlearn.core.attachment_checks import OtherOptimizerWarning, check_attachable, check_weight, torch_optimizer
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

    ``before_step`` and ``after_step`` are called by hooks of the optimizer. Scaling, accumulation and clipping act on
    the method's terms as on the rest of the loss.

    Methods whose penalty depends on the parameters only (EWC, SI, MAS, L2) also work without that line. The gradient
    of the penalty is then added right before the step, once per step. Clipping comes earlier in a loop and does not
    include it: in a loop that clips, write the line.

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

        # Of the current step: whether the loop's loss has the method's terms by ``loss`` or by the loop's own call.
        self._is_in_loss = False
        self._is_added_by_loop = False
        self.is_computing = False
        self._is_edited = False
        self._is_step_due = False
        self._is_weight_checked = False

        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            register_optimizer_step_pre_hook(OtherOptimizerWarning(self, optimizer)),
        ]
        weakref.finalize(self, self._handles[-1].remove)
        for part in _parts(method):
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
        self.is_computing = True
        try:
            if not self.method.needs_batch:
                return loss + weight * self.method.penalty(self.model)
            batch = self._make_batch(loss / weight, x, y, outputs)
            if not self._is_weight_checked:
                self._is_weight_checked = True
                check_weight(loss, batch, weight)
            return self.method.loss(self.model, batch) * weight
        finally:
            self.is_computing = False

    def _make_batch(self, loss: Tensor, x: Any, y: Tensor | None, outputs: Any) -> Batch:
        """Create the batch of a loop that has computed its loss, and perhaps its outputs."""
        if x is None:
            raise ValueError(f"{type(self.method).__name__} needs the examples: attached.loss(loss, x, y, outputs).")
        labels = None if y is None else self.likelihood.labels(unlisted(y))
        outputs = None if outputs is None else read_outputs(outputs)
        return Batch(x, labels, likelihood=self.likelihood, outputs=outputs, loop_loss=loss)

    def note_loss(self, loss: Tensor | float) -> None:
        """Notice when the loop itself differentiates a loss or penalty of the method."""
        if not self.is_computing and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._note_gradient)

    def _note_gradient(self, gradient: Tensor) -> None:
        self._is_added_by_loop = True

    def before_step(self) -> None:
        """Add the penalty's gradient if no loss contains it, then let the method edit the gradients; once per step."""
        has_gradient = any(p.grad is not None for p in self.model.parameters())
        if self._is_edited or not has_gradient:
            return
        self._is_edited = True
        name = type(self.method).__name__
        is_in_loss = self._is_in_loss
        is_added_by_loop = self._is_added_by_loop
        self._is_in_loss = False
        self._is_added_by_loop = False

        if is_in_loss and is_added_by_loop:
            raise ValueError(
                f"The loss of this loop contains terms of {name} twice: by attached.loss(…) and by {name}.loss() or "
                f"{name}.penalty(). Leave out one of them."
            )
        if not is_in_loss and not is_added_by_loop:
            self._add_penalty_gradient()

        self.method.before_step(self.model)
        self._is_step_due = True

    def _add_penalty_gradient(self) -> None:
        """Add the gradient of a penalty that depends on the parameters only."""
        if self.method.needs_batch:
            raise ValueError(
                f"{type(self.method).__name__} needs the examples of each step: after the model's outputs and before "
                "backward(), write loss = attached.loss(loss, x, y, outputs)."
            )
        self.is_computing = True
        with torch.enable_grad():
            penalty = self.method.penalty(self.model)
            if isinstance(penalty, Tensor) and penalty.requires_grad:
                penalty.backward()
        self.is_computing = False

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
            self.before_step()
            return None

        def closure_and_edit() -> Any:
            loss = closure()
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
            self.method.after_step(self.model)

    def remove(self) -> None:
        """Detach the method from the loop."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for part in _parts(self.method):
            if part._attached is self:
                part._attached = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> Any:
        # A copied or saved method is not attached.
        return type(None), ()


def _parts(method: Method) -> tuple[Method, ...]:
    """Return a method and, of a chain, its methods."""
    return (method, *getattr(method, "methods", ()))
