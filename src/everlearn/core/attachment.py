"""Run a method inside an external training loop, through hooks of the optimizer and the model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everlearn.core.batch import Batch
from everlearn.core.clipping import Clipping
from everlearn.core.data_source import row_count
from everlearn.core.forward import forward
from everlearn.core.likelihood import Categorical, Likelihood
from everlearn.core.loops import (
    GradSamples,
    MicroBatch,
    compared_rows,
    gradient_scale_since,
    infer_labels,
    loss_weights,
    on_gradient,
    sample_entries,
    sample_gradients,
)
from everlearn.core.parameters import refuse_meta, refuse_sharded
from everlearn.runtime import distributed

if TYPE_CHECKING:
    from everlearn.core.method import Method


MOST_WAITING = 64  # forward passes without a backward pass
WATCHED_STEPS = 50  # look for clipping in the first 50 steps, and then in every 50th


class Attachment:
    """Connection of a method to a model and an optimizer, created by ``method.attach``.

    The loop leaves the gradient g of its loss in ``p.grad``. Before the optimizer's step the method adds its part, for all
    micro-batches b of the step:

        g ← g + Σ_b c_b ∇[ L_method(b) - L_task(b) ],    then before_step(model)

    After the step it calls ``after_step(model)``. At that point gradients are accumulated, unscaled and averaged over
    processes, and the loop's own loss is unchanged. c_b is the factor of L_task(b) in g. It is measured at every step, at
    the outputs and at samples of the gradients, since a scaler or clipping may have changed them. Labels that are not
    announced by ``see`` are inferred from the gradient of a cross-entropy. Where c_b cannot be measured, methods that
    depend on it are refused. A loss that is no multiple of L_task counts as a mean over its examples, and is refused for
    methods that replace the task loss, such as replay. Penalties on parameters are added as they are. Clipping by norm is
    undone before and applied again after (``Clipping``). Methods that need examples receive those that pass the model in
    training mode or are announced by ``see``. Passes without a step are dropped when gradients are reset.

    Args:
        method: the method.
        model: such that ``model(x)`` gives the outputs.
        optimizer: whose steps count; it has all that learns, the method's parameters too.
        likelihood: what the outputs mean.
    """

    def __init__(
        self, method: Method, model: nn.Module, optimizer: Optimizer, likelihood: Likelihood | None = None
    ) -> None:
        optimizer = _torch_optimizer(optimizer)
        _check(method, model, optimizer)
        self.method, self.model, self.likelihood = method, model, likelihood or Categorical()
        self._micro_batches: list[MicroBatch] = []
        self.busy = self._after_step_due = False  # running its own forward pass; after_step not called yet
        self._counted_twice = False  # whether the loop's loss contains the method's part already
        self._missed_batch = True  # whether the last step had no batch
        self._warned = set[str]()
        self._steps = 0
        self._clipping, self._optimizer = Clipping(model), weakref.ref(optimizer)
        self._watch_clipping = True  # whether to look for clipping before a penalty is added
        self._replaces = method.changes("join") or method.changes("task_loss")
        self._has_batchnorm = any(isinstance(m, _BatchNorm) for m in model.modules())
        self._backward = 0  # number of backward passes
        self._callback_queued = False  # whether a callback at the end of backward() is queued
        self._grad_samples: GradSamples = []  # sampled after the last backward pass
        self._before_pass: list[tuple[Tensor, Tensor]] = []  # running statistics before the step's first pass
        self._statistics: list[tuple[Tensor, Tensor]] = []  # running statistics before a repeated pass
        self._repeated_inputs: Any = None  # inputs of a pass that is being repeated
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            model.register_forward_pre_hook(self.before_pass, with_kwargs=True),
            model.register_forward_hook(self._after_pass, with_kwargs=True),
            register_optimizer_step_pre_hook(_Watch(self, optimizer)),  # of all optimizers
        ]
        for part in (method, *getattr(method, "methods", ())):
            part._attached = self
        weakref.finalize(self, self._handles[-1].remove)

    def see(self, x: Any, y: Tensor | None = None, *, out: Tensor | None = None) -> None:
        """Announce the next micro-batch.

        Args:
            x: its inputs, or a ``Batch``.
            y: its labels.
            out: the model's outputs, where they are known.
        """
        if self.method.of_parameters:
            self._await_clipping(out)
            return
        if not isinstance(x, Batch):
            x = Batch(x, None if y is None else self.likelihood.labels(y), likelihood=self.likelihood)
        self._micro_batches.append(MicroBatch(x))
        if out is not None:
            self._record_outputs(self._micro_batches[-1], out)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._micro_batches = [], []
        for part in (self.method, *getattr(self.method, "methods", ())):
            if part._attached is self:
                part._attached = None

    def note_loss(self, loss: Tensor | float) -> None:
        """Detect a penalty or loss that the loop adds itself: it would count twice."""
        if not self.busy and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._counted)

    def _counted(self, gradient: Tensor) -> None:
        self._counted_twice = True

    def warn_once(self, message: str, stacklevel: int) -> None:
        """Warn, but not twice with the same message."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return a state whose hooks do nothing: a copied or saved model has no method attached."""
        return {"busy": True, "_repeated_inputs": None, "_after_step_due": False, "_micro_batches": [], "_handles": []}

    def before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save running statistics where they must be restored later."""
        if self.busy and self._is_again(args, kwargs):
            self._statistics = self._all_statistics()  # a repeated pass must not count twice
        elif (
            not self.busy
            and self._has_batchnorm
            and self._replaces
            and not self._before_pass
            and self._is_training_pass(model)
        ):
            self._before_pass = self._all_statistics()

    def _after_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record the batch and the outputs of a training pass."""
        if self.busy and self._is_again(args, kwargs):
            _restore(self._statistics)
        if self.busy or not self._is_training_pass(model):
            return
        if self.method.of_parameters:
            self._await_clipping(out)
            return
        passed = self._batch(args, kwargs)
        if not self._micro_batches or self._micro_batches[-1].passed:
            self._micro_batches.append(MicroBatch(passed))
        micro_batch = self._micro_batches[-1]
        if len(unused := [s for s in self._micro_batches if s.waits]) > MOST_WAITING:
            self._micro_batches.remove(unused[0])
        if len(passed) == len(micro_batch.batch) and micro_batch.batch.raw is None:
            micro_batch.batch = replace(
                micro_batch.batch, x=_merge_inputs(micro_batch.batch.x, passed.x)
            )  # normalized by the loop
        self._record_outputs(micro_batch, out)

    def _is_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this pass repeats one of the loop."""
        if self._repeated_inputs is None:
            return False
        if isinstance(self._repeated_inputs, Mapping) and kwargs:
            return all(kwargs.get(name) is value for name, value in self._repeated_inputs.items())
        if isinstance(self._repeated_inputs, tuple) and len(args) > 1:
            return all(a is b for a, b in zip(args, self._repeated_inputs, strict=False))
        return bool(args) and args[0] is self._repeated_inputs

    def _is_training_pass(self, model: nn.Module) -> bool:
        """Return whether the loop trains on this pass: in training mode, or announced by ``see``."""
        is_announced = bool(self._micro_batches) and not self._micro_batches[-1].passed
        return (model.training or is_announced) and torch.is_grad_enabled()

    def _all_statistics(self) -> list[tuple[Tensor, Tensor]]:
        return [(b, b.clone()) for b in self.model.buffers()]

    def _record_outputs(self, micro_batch: MicroBatch, out: Any) -> None:
        """Record the outputs, and register a hook for their gradient."""
        micro_batch.passed, self._callback_queued = True, False
        device = next(self.model.parameters()).device.type
        micro_batch.precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        out = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if not isinstance(out, Tensor) or not out.dim():
            return
        micro_batch.out = (
            out.detach().clone() if self.method.changes("observe") else out.detach()
        )  # the loop may overwrite it
        if out.requires_grad:
            micro_batch.waits = True
            on_gradient(out, partial(self._on_output_grad, micro_batch))

    def _on_output_grad(self, micro_batch: MicroBatch, gradient: Tensor) -> None:
        """Record the gradient of the loop's loss in the outputs."""
        if micro_batch not in self._micro_batches:
            return
        infer_labels(micro_batch, gradient)
        if micro_batch.output_grad is None:
            micro_batch.rows = compared_rows(micro_batch, gradient)
        sampled_grad = gradient.detach()[micro_batch.rows].clone()
        micro_batch.output_grad = (
            sampled_grad if micro_batch.output_grad is None else micro_batch.output_grad + sampled_grad
        )
        if not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
            self._update_earlier_batches()
        micro_batch.waits, micro_batch.backward = False, self._backward

    def _update_earlier_batches(self) -> None:
        """Drop earlier micro-batches after ``zero_grad``; otherwise update the scale of their gradients."""
        earlier = [s for s in self._micro_batches if 0 <= s.backward < self._backward]
        if not earlier or not self._grad_samples:
            return
        if all(p.grad is None or not p.grad.any() for p, _ in self._grad_samples):
            self._micro_batches = [s for s in self._micro_batches if s not in earlier]
            return
        grad_scale = gradient_scale_since(self._grad_samples)
        for s in earlier:
            s.grad_scale = None if s.grad_scale is None or grad_scale is None else s.grad_scale * grad_scale

    def _on_backward_end(self) -> None:
        """Sample gradients after the callbacks of DistributedDataParallel, which are queued later than this one."""
        self._backward, self._callback_queued = self._backward + 1, False
        if distributed.world_size() == 1:
            self._sample_gradients()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._sample_gradients)

    def _sample_gradients(self) -> None:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        self._grad_samples = self._clipping.sample_gradients(p for group in groups for p in group["params"])

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        if len(args) == 1 and not kwargs:
            return Batch(args[0], likelihood=self.likelihood)
        return Batch(args or kwargs, likelihood=self.likelihood)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add the method's part before the step, or after the closure that computes the gradients."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ValueError(
                "This optimizer unscales gradients inside its step, after the method has edited them: call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if closure is None:
            self._edit()
            return None

        def wrapped() -> Any:
            loss = closure()
            self._edit()
            return loss

        return ((args[0], wrapped), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._after_step_due:  # a closure may have stopped the step
            self._after_step_due = False
            self.method.after_step(self.model)

    def _edit(self) -> None:
        """Add the method's part to the gradients, then let the method edit them."""
        missed = not self._micro_batches
        reached_batches = [
            micro_batch for micro_batch in self._micro_batches if micro_batch.output_grad is not None
        ] or [micro_batch for micro_batch in self._micro_batches if not micro_batch.waits]
        micro_batches, self._micro_batches = (
            [micro_batch for micro_batch in reached_batches or self._micro_batches if micro_batch.batch.weight],
            [],
        )
        grad_samples, self._grad_samples = self._grad_samples, []
        if all(p.grad is None for p in self.model.parameters()):
            return
        self._check_loop(missed)
        grad_scale = self._clipping.undo(grad_samples)
        before = sample_gradients(self.model.parameters()) if self._clipping.is_unknown else []
        scale = 1 / grad_scale if grad_scale is not None and grad_scale < 1 else 1.0
        with self._preserve_rng(bool(micro_batches)):
            counts = loss_weights(micro_batches, grad_scale, type(self.method).__name__ if self._replaces else None)
            learning = [] if self.method.of_parameters else [*self.model.parameters(), *self.method.parameters()]
            with _averaged(learning):
                for micro_batch, count in zip(micro_batches, counts, strict=True):
                    with _autocast(micro_batch, self.model), _hint(micro_batch.batch):
                        extra = self._weight_extra(self._extra_loss(micro_batch), *count)
                    _backward(extra, learning, scale if micro_batch.precision == torch.float16 else 1.0)
            if not micro_batches:
                _backward(self._penalty_without_batch(missed), learning)
            self.method.pull(self.model)
            self.method.before_step(self.model)
            self._clipping.redo()
            if any(
                (current := sample_entries(p)) is not None and not torch.equal(earlier, current)
                for p, earlier in before
            ):
                self._warn_unclipped()
        self._after_step_due, self._before_pass = True, []
        self._steps += 1

    def _check_loop(self, missed: bool) -> None:
        """Report a loop in which the method would count twice, or not at all."""
        name = type(self.method).__name__
        if self._counted_twice:
            self._counted_twice = False
            sentence = (
                f"The loss of this loop has the penalty or the loss of {name} in it, which the attachment adds by itself: it counts "
                f"twice. Leave {name}.penalty() and {name}.loss() out of the loop, or attachment.remove()."
            )
            if self._replaces:  # the recorded batch is not the loop's either
                raise ValueError(sentence)
            self.warn_once(sentence, stacklevel=5)
        looks = self._replaces or self.method.changes("observe")
        if looks and missed and (self._missed_batch or not self.model.training):
            raise ValueError(self._no_batch_message())
        self._missed_batch = missed

    def _warn_unclipped(self) -> None:
        name = type(self.method).__name__
        self._watch_clipping = False
        self.warn_once(
            f"This loop shortens its gradients before {name} adds its part, but not to one fixed norm of them all, or they are sharded: a "
            "penalty of the parameters is added as it is, what is added for a batch is shortened alike. To clip the whole loss "
            "take it from method.loss(model, batch), without an attachment.",
            stacklevel=5,
        )

    def _await_clipping(self, out: Any) -> None:
        """Sample gradients after backward(): at every step of a loop that clips, otherwise at the first and some later.

        Sampling synchronizes with the device.
        """
        out = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        samples = self._watch_clipping and (self._steps < WATCHED_STEPS or not self._steps % WATCHED_STEPS)
        looks = samples or self._clipping.threshold is not None
        edits = self.method.changes("penalty") or self.method.changes("before_step")
        if looks and edits and isinstance(out, Tensor) and out.requires_grad:
            self._callback_queued = False
            on_gradient(out, self._await_arrival)

    def _await_arrival(self, gradient: Tensor) -> None:
        if not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _no_batch_message(self) -> str:
        reason = "the model is in evaluation mode" if not self.model.training else "its layers are called one by one"
        return (
            f"{type(self.method).__name__} looks at examples, and none went through the model in this step: {reason}. Call model.train() and "
            "the model itself, model(x), or tell of each batch, attachment.see(x, y) before the model is called."
        )

    def _penalty_without_batch(self, missed: bool) -> Tensor | float:
        """Return the penalty of a step without a batch, for methods that need none."""
        try:
            return self.method._in_graph_penalty(self.model, None, None)
        except ValueError as error:
            raise ValueError(self._no_batch_message() if missed else str(error)) from error

    def _weight_extra(self, extra: Tensor | float, count: float, unknown: str) -> Tensor | float:
        if not isinstance(extra, Tensor) or not extra.requires_grad:
            return 0.0
        if unknown:
            raise ValueError(
                f"{type(self.method).__name__} cannot be weighed against this loop's loss: {unknown}. Or take the loss from "
                "method.loss(model, batch), without an attachment."
            )
        return count * extra

    def _extra_loss(self, micro_batch: MicroBatch) -> Tensor | float:
        """Return the difference between the method's loss and the loop's."""
        method, batch, out = self.method, micro_batch.batch, None
        extra: Tensor | float = 0.0
        self._repeated_inputs = batch.x
        joint_batch = method.join(batch) if self._replaces else batch
        if joint_batch is not batch or method.changes("task_loss"):
            if joint_batch is not batch:  # this pass replaces the loop's
                _restore(self._before_pass)
                self._before_pass = []
            joint_outputs = forward(self.model, joint_batch.x)
            out = joint_outputs if joint_batch is batch else joint_outputs[: len(batch)]
            alone = forward(self.model, batch.x) if self._has_batchnorm and joint_batch is not batch else out
            extra = method.task_loss(joint_batch, joint_outputs) - batch.loss(alone)
        labels = batch.y if batch.y is not None else micro_batch.labels  # distillation skips ignored labels
        extra = extra + method._in_graph_penalty(self.model, replace(batch, y=labels), out)
        if method.changes("observe"):
            if micro_batch.out is None:
                with torch.no_grad():
                    micro_batch.out = forward(self.model, batch.x) if out is None else out.detach()
            method.observe(batch, micro_batch.out)
        return extra

    @contextmanager
    def _preserve_rng(self, passes: bool) -> Iterator[None]:
        """Restore the random state afterwards, as if there had been no further forward pass."""
        self.busy = True
        cuda = [device] if (device := next(self.model.parameters()).device).type == "cuda" else []
        try:
            with torch.random.fork_rng(cuda, enabled=passes), torch.enable_grad():
                yield
        finally:
            self.busy, self._repeated_inputs = False, None


class _Watch:
    """Warn when another optimizer moves the model; holds weak references only."""

    def __init__(self, attachment: Attachment, optimizer: Optimizer) -> None:
        self.attachment, self.optimizer = weakref.ref(attachment), weakref.ref(optimizer)
        self.known = weakref.WeakSet[Optimizer]()  # optimizers that were checked

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        attached_optimizer, attachment = self.optimizer(), self.attachment()
        if optimizer is attached_optimizer or attachment is None or attachment.busy or optimizer in self.known:
            return
        self.known.add(optimizer)
        if any(value is attached_optimizer for value in vars(optimizer).values()):  # it wraps the attached one
            return
        parameters = {id(p) for p in attachment.model.parameters() if p.requires_grad}
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
            name = type(attachment.method).__name__
            attachment.warn_once(
                f"{name} is attached to another optimizer than the {type(optimizer).__name__} that makes this step, so that nothing of "
                f"{name} is in it: attachment.remove(), then {name}.attach(model, optimizer) with the new one.",
                stacklevel=3,
            )


def _merge_inputs(is_announced: Any, passed: Any) -> Any:
    """Return the inputs of the pass: the announced ones, and other tensors with one row per example.

    Options of the call that nobody told of are no inputs.
    """
    if not isinstance(is_announced, Mapping) or not isinstance(passed, Mapping):
        return passed
    rows = row_count(is_announced)
    other_tensors = {
        n: v
        for n, v in passed.items()
        if n not in is_announced and isinstance(v, Tensor) and v.dim() and len(v) == rows
    }
    return {**{n: passed.get(n, v) for n, v in is_announced.items()}, **other_tensors}


def _restore(statistics: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in statistics:
        buffer.data.copy_(value)


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside wrappers of Accelerate, Lightning or two-step optimizers such as SAM."""
    while not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith("accelerate"):
        inner = getattr(optimizer, "optimizer", getattr(optimizer, "_optimizer", None))
        if inner is None:
            raise TypeError(f"A method is attached to a torch optimizer, got a {type(optimizer).__name__}.")
        optimizer = inner
    base = getattr(optimizer, "base_optimizer", None)
    return base if isinstance(base, Optimizer) else optimizer


def _check(method: Method, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse optimizers and models whose steps the hooks cannot serve."""
    refuse_meta(model.parameters())
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS looks at the loss many times in a step: call the method's verbs in your own loop.")
    if any(type(component).__module__.startswith("deepspeed") for component in (optimizer, *model.modules())):
        raise TypeError("DeepSpeed's engine keeps gradients to itself, so that no method can edit them.")
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters()):
        raise TypeError(
            "Something acts on each gradient as soon as it is there, as optimizers do that step inside backward(): a "
            "method needs all gradients of a step together."
        )
    hooks: list[Any] = [*optimizer._optimizer_step_pre_hooks.values(), *model._forward_hooks.values()]
    if any(isinstance(owner := getattr(hook, "__self__", None), Attachment) and not owner.busy for hook in hooks):
        raise ValueError(
            "A method is attached here already: attachment.remove() takes it off, and EWC() + ER() is one method of two."
        )
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and id(p) not in moved for p in method.parameters()):
        raise ValueError(
            f"{type(method).__name__} has parameters of its own that this optimizer does not move: make it after "
            "begin_task(model, task), of [*model.parameters(), *method.parameters()]."
        )
    if missing := [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in moved]:
        raise ValueError(
            f"This optimizer does not move {', '.join(missing[:3])}{', …' * (len(missing) > 3)}: a method goes with one optimizer that has "
            "all that learns; freeze the others, p.requires_grad_(False)."
        )


@contextmanager
def _averaged(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Average the gradients computed inside over processes, and add them to those present before."""
    if distributed.world_size() == 1 or not parameters:
        yield
        return
    refuse_sharded(parameters, "What this method adds to a loop that it is attached to")
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    yield
    distributed.average_gradients(parameters, 1.0, 0.0)
    for p, g in zip(parameters, before, strict=True):
        p.grad = g if p.grad is None else p.grad if g is None else g + p.grad


def _backward(extra: Tensor | float, learning: list[nn.Parameter], scale: float = 1.0) -> None:
    """Backpropagate a loss, scaled so that float16 gradients do not underflow."""
    if not isinstance(extra, Tensor) or not extra.requires_grad:
        return
    if scale == 1.0:
        extra.backward()
        return
    learning = [p for p in learning if p.requires_grad]
    for p, g in zip(learning, torch.autograd.grad(extra * scale, learning, allow_unused=True), strict=True):
        if g is not None:
            p.grad = g / scale if p.grad is None else p.grad + g / scale


@contextmanager
def _hint(batch: Batch) -> Iterator[None]:
    """Add advice to errors about missing labels."""
    try:
        yield
    except ValueError as error:
        if batch.y is not None or "no labels" not in str(error):
            raise
        raise ValueError(
            f"{error} Here: attachment.see(x, y) before the model is called. A trainer's callback does so if labels are in the batch, from which "
            "Hugging Face's Trainer takes them for compute_loss_func and label smoothing."
        ) from error


def _autocast(micro_batch: MicroBatch, model: nn.Module) -> AbstractContextManager[Any]:
    device = next(model.parameters()).device.type
    return torch.autocast(device, micro_batch.precision, enabled=micro_batch.precision is not None)
