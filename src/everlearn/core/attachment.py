"""Run a method inside an external training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everlearn.core import attachment_checks as checks
from everlearn.core.batch import Batch
from everlearn.core.data_source import unlisted
from everlearn.core.forward import read_outputs
from everlearn.core.likelihood import Categorical, Likelihood
from everlearn.core.loss_weight import check_weight
from everlearn.runtime import distributed

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

    Hooks of the optimizer call ``before_step`` and ``after_step``. A loop that clips calls ``attached.before_step()``
    before clipping, so that methods edit gradients before they are clipped.

    Methods whose penalty depends on the parameters only (EWC, SI, MAS, L2) also work without the line: the gradient of
    the penalty is then added before each step. Do not add ``method.loss`` or ``method.penalty`` to the loss yourself.

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
        self.method = method
        self.model = model
        self.optimizer = checks.torch_optimizer(optimizer)
        self.likelihood = likelihood or Categorical()
        checks.check_attachable(method, model, self.optimizer)

        # Whether the method calls the model itself: integrations do not add terms to such a pass.
        self.is_computing = False
        self.is_stepping = False  # whether p.grad has the gradients of the loop's loss
        self._is_weight_checked = False
        self._checked_parameters: list[int] = []
        # Of the current step: whether its gradients contain the method's terms, and whether the method has edited them.
        self._has_terms = False
        self._is_edited = False
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
            register_optimizer_step_pre_hook(checks.warn_of_other_optimizers(self)),
        ]
        distributed.broadcast_(method.parameters())  # DistributedDataParallel does not have them
        self.optimizer.everlearn_attachment = self  # type: ignore[attr-defined]
        for part in checks.list_parts(method):
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
        if isinstance(weight, (int, float)) and weight == 0:  # no label of the micro-batch counts
            self._has_terms = True
            return loss

        # Only the first batch is checked, because this synchronizes with the device.
        if not self._is_weight_checked and outputs is not None and y is not None:
            self._is_weight_checked = True
            check_weight(loss, self._make_batch(loss, x, y, outputs), float(weight), self.method)

        with self._computing():
            if self.method.needs_batch:
                total = self.method.loss(self.model, self._make_batch(loss / weight, x, y, outputs)) * weight
            else:
                total = loss + weight * self.method.penalty(self.model)
        if total.requires_grad:
            total.register_hook(self._note_gradient)
        return total

    def _note_gradient(self, gradient: Tensor) -> None:
        """Note that a result of ``loss`` is differentiated; one that the loop throws away has no effect."""
        self._has_terms = True

    @contextmanager
    def _computing(self, stepping: bool = False) -> Iterator[None]:
        """Mark forward passes and losses inside as the method's."""
        self.is_computing = True
        self.is_stepping = stepping and not self._has_terms
        try:
            yield
        finally:
            self.is_computing = False

    def _make_batch(self, loss: Tensor, x: Any, y: Tensor | None, outputs: Any) -> Batch:
        """Create the batch of a loop that has computed its loss, and perhaps its outputs."""
        if x is None:
            raise checks.missing_examples(self.method)
        if outputs is None:
            checks.refuse_second_pass(self.model)
        labels = None if y is None else self.likelihood.labels(unlisted(y))
        outputs = None if outputs is None else read_outputs(outputs)
        return Batch(x, labels, likelihood=self.likelihood, outputs=outputs, loop_loss=loss)

    def before_step(self) -> None:
        """Add the penalty's gradient if no loss contains it, then let the method edit the gradients."""
        if all(p.grad is None for p in self.model.parameters()):
            return
        # A later begin_task may have added parameters that the optimizer lacks.
        method_parameters = list(self.method.parameters())
        parameters = [id(p) for p in (*self.model.parameters(), *method_parameters)]
        if parameters != self._checked_parameters:
            checks.check_parameters(self.method, self.model, self.optimizer)
            self._checked_parameters = parameters
        if not self._has_terms and self.method.needs_batch:
            raise checks.missing_examples(self.method)
        if method_parameters:
            distributed.average_gradients(method_parameters, weight=1.0, loss=0.0)
        with self._computing(stepping=True), torch.enable_grad():
            if not self._has_terms:
                penalty = self.method.penalty(self.model)
                if isinstance(penalty, Tensor) and penalty.requires_grad:
                    penalty.backward()
            self.method.before_step(self.model)
        self._has_terms = False
        self._is_edited = True

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Edit the gradients before the step, or after the closure that computes them."""
        checks.refuse_scaled_gradients(optimizer)
        kwargs = dict(kwargs)  # args[0] is the optimizer
        closure = args[1] if len(args) > 1 else kwargs.pop("closure", None)
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

        return (args[0], closure_and_edit, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A closure may have stopped the step before any gradient was computed.
        if self._is_edited:
            self._is_edited = False
            with self._computing():
                self.method.after_step(self.model)

    def remove(self) -> None:
        """Detach the method from the loop."""
        for handle in self._handles:
            handle.remove()
        if self.optimizer.everlearn_attachment is self:  # type: ignore[attr-defined]
            self.optimizer.everlearn_attachment = None
            for part in checks.list_parts(self.method):
                part._attached = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied or saved method is not attached
