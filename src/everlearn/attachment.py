"""A method in a loop that knows nothing of it, carried by the hooks of the optimizer's step."""

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

from everlearn import distributed
from everlearn.batch import Batch
from everlearn.data import row_count
from everlearn.forward import ask
from everlearn.likelihood import Categorical, Likelihood
from everlearn.loops import (
    Came,
    Seen,
    arrived,
    few_entries,
    is_clipped,
    left_of,
    on_gradient,
    read_labels,
    rows_compared,
    weights_of,
)
from everlearn.params import refuse_meta, refuse_sharded

if TYPE_CHECKING:
    from everlearn.method import Method


MOST_WAITING = 64  # passes that no backward pass has gone through
WATCHED_STEPS = 50  # the first so many, and then each of so many, are looked at for clipping


class Attachment:
    """What ties a method to a model and an optimizer; made by ``method.attach``.

    Whoever owns the loop leaves the gradient of their loss in ``p.grad``. Before the optimizer moves, once per step, of however
    many micro-batches b it is made, the method adds its part:

        g ← g + Σ_b c_b ∇[ L_method(b) - L_task(b) ],    then before_step(model)

    and after the move it has ``after_step(model)``. At that place gradients are summed, unscaled and averaged over processes, so
    that accumulation and mixed precision need not be known, and the loop's own loss stays what it is. c_b is how much of L_task(b)
    is in g: where labels are known it is measured at every step, at the outputs and at a parameter, since a scaler or a clipping
    may have come between. Labels that nobody tells are read off the gradient of a cross-entropy; where c_b cannot be seen, what
    depends on it is refused. A loss that is no multiple of L_task counts as a mean over its examples. A method whose task loss
    is another than the likelihood's, as that of replay is, subtracts the latter, and refuses a loop whose loss is no multiple of
    it. Penalties of the parameters alone are added as they are. Methods that look at examples see those that pass the model in
    training mode, or that ``see`` has told of, which also tells the labels. What has passed without a step, because a gradient scaler skipped it or the loop did, is forgotten
    when gradients begin anew.

    Args:
        method: the method.
        model: such that ``model(x)`` gives the outputs.
        optimizer: whose steps count; it has all that learns, the method's parameters too.
        likelihood: what the outputs mean.
    """

    def __init__(
        self, method: Method, model: nn.Module, optimizer: Optimizer, likelihood: Likelihood | None = None
    ) -> None:
        optimizer = _plain(optimizer)
        _check(method, model, optimizer)
        self.method, self.model, self.likelihood = method, model, likelihood or Categorical()
        self._seen: list[Seen] = []
        self.busy = self._edited = False  # asking the model itself; owing an after_step
        self._twice = False  # whether the loop's own loss has had the method's part in this step
        self._missed = True  # whether no batch was seen in the last step
        self._warned = set[str]()
        self._steps = 0
        self._watches_clipping = True  # that a penalty of the parameters would follow unshortened
        self._replaces = method.changes("join") or method.changes("task_loss")
        self._mixes = any(isinstance(m, _BatchNorm) for m in model.modules())
        self._backward = 0  # the loop's backward passes so far
        self._queued = False  # whether the end of this one is awaited
        self._came: Came = []  # gradients after the last of them
        self._before_pass: list[tuple[Tensor, Tensor]] = []  # running statistics, as the step's first pass found them
        self._statistics: list[tuple[Tensor, Tensor]] = []  # as an asking again has found them
        self._again: Any = None  # inputs that the loop has passed, while the model is asked again
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            model.register_forward_pre_hook(self.before_pass, with_kwargs=True),
            model.register_forward_hook(self._passed, with_kwargs=True),
            register_optimizer_step_pre_hook(_Watch(self, optimizer)),  # of all optimizers
        ]
        for part in (method, *getattr(method, "methods", ())):
            part._attached = self
        weakref.finalize(self, self._handles[-1].remove)

    def see(self, x: Any, y: Tensor | None = None, *, out: Tensor | None = None) -> None:
        """Tell of the micro-batch that goes through the model next.

        Args:
            x: its inputs, or a ``Batch``.
            y: its labels.
            out: what the model has said to it, where that is known.
        """
        if self.method.of_parameters:
            return
        if not isinstance(x, Batch):
            x = Batch(x, None if y is None else self.likelihood.labels(y), likelihood=self.likelihood)
        self._seen.append(Seen(x))
        if out is not None:
            self._note(self._seen[-1], out)

    def remove(self) -> None:
        """Leave the loop as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], []
        for part in (self.method, *getattr(self.method, "methods", ())):
            if part._attached is self:
                part._attached = None

    def note_loss(self, loss: Tensor | float) -> None:
        """A penalty or a loss that the loop itself has asked for: if it goes into the gradients, it is there twice."""
        if not self.busy and isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._counted)

    def _counted(self, gradient: Tensor) -> None:
        self._twice = True

    def warn_of(self, what: str, stacklevel: int) -> None:
        """Say it once."""
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(what, UserWarning, stacklevel=stacklevel + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model, or one in a file, is a model without a method: its hooks do nothing."""
        return {"busy": True, "_again": None, "_edited": False, "_seen": [], "_handles": []}

    def before_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Running statistics are noted where something must be taken back later."""
        if self.busy and self._is_again(args, kwargs):
            self._statistics = self._all_statistics()  # what the loop has passed must not count twice
        elif not self.busy and self._mixes and self._replaces and not self._before_pass and self._learns(model):
            self._before_pass = self._all_statistics()

    def _passed(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note what goes through the model while it learns."""
        if self.busy and self._is_again(args, kwargs):
            _put_back(self._statistics)
        if self.busy or not self._learns(model):
            return
        if self.method.of_parameters:
            if self.method.changes("penalty"):
                self._await_clipping(out)
            return
        passed = self._batch(args, kwargs)
        if not self._seen or self._seen[-1].passed:
            self._seen.append(Seen(passed))
        one = self._seen[-1]
        if len(lost := [s for s in self._seen if s.waits]) > MOST_WAITING:
            self._seen.remove(lost[0])
        if len(passed) == len(one.batch) and one.batch.raw is None:
            one.batch = replace(one.batch, x=_as_told(one.batch.x, passed.x))  # as the loop has normalised it
        self._note(one, out)

    def _is_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model is asked what the loop has asked it already."""
        if self._again is None:
            return False
        if isinstance(self._again, Mapping) and kwargs:
            return all(kwargs.get(name) is value for name, value in self._again.items())
        if isinstance(self._again, tuple) and len(args) > 1:
            return all(a is b for a, b in zip(args, self._again, strict=False))
        return bool(args) and args[0] is self._again

    def _learns(self, model: nn.Module) -> bool:
        """Whether the loop learns from this pass: in training mode, or if it was told of."""
        told = bool(self._seen) and not self._seen[-1].passed
        return (model.training or told) and torch.is_grad_enabled()

    def _all_statistics(self) -> list[tuple[Tensor, Tensor]]:
        return [(b, b.clone()) for b in self.model.buffers()]

    def _note(self, one: Seen, out: Any) -> None:
        """What the model has said, where it is needed, and what becomes of it."""
        one.passed, self._queued = True, False
        device = next(self.model.parameters()).device.type
        one.precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        out = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if not isinstance(out, Tensor) or not out.dim():
            return
        one.out = out.detach().clone() if self.method.changes("observe") else out.detach()  # the loop may overwrite it
        if out.requires_grad:
            one.waits = True
            on_gradient(out, partial(self._pulled, one))

    def _pulled(self, one: Seen, gradient: Tensor) -> None:
        """The loop goes backward: where it does so with no gradients yet, what earlier passes left has made no step."""
        if one not in self._seen:
            return
        read_labels(one, gradient)
        if one.pull is None:
            one.rows = rows_compared(one, gradient)
        some = gradient.detach()[one.rows].clone()
        one.pull = some if one.pull is None else one.pull + some
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._arriving)
            self._settle_earlier()
        one.waits, one.backward = False, self._backward

    def _settle_earlier(self) -> None:
        """What earlier passes brought is forgotten where gradients begin anew, or is what is left of it, as after a clipping."""
        earlier = [s for s in self._seen if 0 <= s.backward < self._backward]
        if not earlier or not self._came:
            return
        if all(p.grad is None or not p.grad.any() for p, _ in self._came):
            self._seen = [s for s in self._seen if s not in earlier]
            return
        left = left_of(self._came)
        for s in earlier:
            s.left = None if s.left is None or left is None else s.left * left

    def _arriving(self) -> None:
        """The loop's backward pass is over but for what DistributedDataParallel does then, whose callback came after this one."""
        self._backward, self._queued = self._backward + 1, False
        if distributed.world() == 1:
            self._arrived()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._arrived)

    def _arrived(self) -> None:
        self._came = arrived(self.model.parameters())

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        if len(args) == 1 and not kwargs:
            return Batch(args[0], likelihood=self.likelihood)
        return Batch(args or kwargs, likelihood=self.likelihood)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The method's part, now or after the closure that makes the gradient."""
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
        if self._edited:  # not where a closure has stopped the step
            self._edited = False
            self.method.after_step(self.model)

    def _edit(self) -> None:
        """Add the method's part to the gradients, and let it edit them."""
        missed = not self._seen
        pulled = [one for one in self._seen if one.pull is not None] or [one for one in self._seen if not one.waits]
        seen, self._seen = [one for one in pulled or self._seen if one.batch.weight], []
        came, self._came = self._came, []
        if all(p.grad is None for p in self.model.parameters()):
            return
        self._tell(missed)
        left = left_of(came)
        penalizes = self.method.of_parameters and self.method.changes("penalty")
        before = arrived(self.model.parameters()) if penalizes and is_clipped(left) else []
        scale = 1 / left if left is not None and left < 1 else 1.0
        with self._unnoticed(bool(seen)):
            counts = weights_of(seen, left, type(self.method).__name__ if self._replaces else None)
            learning = [] if self.method.of_parameters else [*self.model.parameters(), *self.method.parameters()]
            with _averaged(learning):
                for one, count in zip(seen, counts, strict=True):
                    with _autocast(one, self.model), _hint(one.batch):
                        extra = self._weighed(self._extra(one), *count)
                    if isinstance(extra, Tensor) and is_clipped(left):
                        self._tell_of_clipping()
                    _backward(extra, learning, scale if one.precision == torch.float16 else 1.0)
            if not seen:
                _backward(self._unseen(missed), learning)
            self.method.pull(self.model)
            self.method.before_step(self.model)
            if any((now := few_entries(p)) is not None and not torch.equal(then, now) for p, then in before):
                self._tell_of_unclipped()
        self._edited, self._before_pass = True, []
        self._steps += 1

    def _tell(self, missed: bool) -> None:
        """Of a loop that would make the method count twice, or not at all."""
        name = type(self.method).__name__
        if self._twice:
            self._twice = False
            sentence = (
                f"The loss of this loop has the penalty or the loss of {name} in it, which the attachment adds by itself: it counts "
                f"twice. Leave {name}.penalty() and {name}.loss() out of the loop, or attachment.remove()."
            )
            if self._replaces:  # what passed the model is not the loop's batch either
                raise ValueError(sentence)
            self.warn_of(sentence, stacklevel=5)
        looks = self._replaces or self.method.changes("observe")
        if looks and missed and (self._missed or not self.model.training):
            raise ValueError(self._nothing_seen())
        self._missed = missed

    def _tell_of_clipping(self) -> None:
        name = type(self.method).__name__
        self.warn_of(
            f"This loop clips its gradients before {name} adds its part, which is shortened by the same factor: the direction is that of "
            "the whole loss, the length is not, and a step may be longer or much shorter than the clipping would leave it. To clip "
            "the whole loss take it from method.loss(model, batch), without an attachment.",
            stacklevel=5,
        )

    def _tell_of_unclipped(self) -> None:
        name = type(self.method).__name__
        self._watches_clipping = False
        self.warn_of(
            f"This loop clips its gradients before {name} adds its penalty, which is not shortened: the stronger the clipping, the more the "
            "penalty outweighs the loop's loss. To clip the whole loss take it from method.loss(model, batch), without an attachment.",
            stacklevel=5,
        )

    def _await_clipping(self, out: Any) -> None:
        """Note the gradients after a backward pass, at the first steps and then at some, since looking waits for the device."""
        out = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        looks = self._watches_clipping and (self._steps < WATCHED_STEPS or not self._steps % WATCHED_STEPS)
        if looks and isinstance(out, Tensor) and out.requires_grad:
            self._queued = False
            on_gradient(out, self._await_arrival)

    def _await_arrival(self, gradient: Tensor) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._arriving)

    def _nothing_seen(self) -> str:
        how = "the model is in evaluation mode" if not self.model.training else "its layers are called one by one"
        return (
            f"{type(self.method).__name__} looks at examples, and none went through the model in this step: {how}. Call model.train() and "
            "the model itself, model(x), or tell of each batch, attachment.see(x, y) before the model is called."
        )

    def _unseen(self, missed: bool) -> Tensor | float:
        """The penalty of a step without examples, for methods that need none."""
        try:
            return self.method.unpulled(self.model, None, None)
        except ValueError as error:
            raise ValueError(self._nothing_seen() if missed else str(error)) from error

    def _weighed(self, extra: Tensor | float, count: float, unknown: str) -> Tensor | float:
        if not isinstance(extra, Tensor) or not extra.requires_grad:
            return 0.0
        if unknown:
            raise ValueError(
                f"{type(self.method).__name__} cannot be weighed against this loop's loss: {unknown}. Or take the loss from "
                "method.loss(model, batch), without an attachment."
            )
        return count * extra

    def _extra(self, one: Seen) -> Tensor | float:
        """What the method's loss has beyond the loop's."""
        method, batch, out = self.method, one.batch, None
        extra: Tensor | float = 0.0
        self._again = batch.x
        whole = method.join(batch) if self._replaces else batch
        if whole is not batch or method.changes("task_loss"):
            if whole is not batch:  # the loop's pass is taken back, this one counts
                _put_back(self._before_pass)
                self._before_pass = []
            said = ask(self.model, whole.x)
            out = said if whole is batch else said[: len(batch)]
            alone = ask(self.model, batch.x) if self._mixes and whole is not batch else out
            extra = method.task_loss(whole, said) - batch.loss(alone)
        labels = batch.y if batch.y is not None else one.labels  # a distillation leaves out those that are ignored
        extra = extra + method.unpulled(self.model, replace(batch, y=labels), out)
        if method.changes("observe"):
            if one.out is None:
                with torch.no_grad():
                    one.out = ask(self.model, batch.x) if out is None else out.detach()
            method.observe(batch, one.out)
        return extra

    @contextmanager
    def _unnoticed(self, passes: bool) -> Iterator[None]:
        """The loop finds its random numbers as if the model had not been asked again."""
        self.busy = True
        cuda = [device] if (device := next(self.model.parameters()).device).type == "cuda" else []
        try:
            with torch.random.fork_rng(cuda, enabled=passes), torch.enable_grad():
                yield
        finally:
            self.busy, self._again = False, None


class _Watch:
    """Tells when another optimizer moves the model; it keeps neither the attachment nor its optimizer alive."""

    def __init__(self, attachment: Attachment, optimizer: Optimizer) -> None:
        self.attachment, self.optimizer = weakref.ref(attachment), weakref.ref(optimizer)
        self.known = weakref.WeakSet[Optimizer]()  # others that have been looked at

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own, attachment = self.optimizer(), self.attachment()
        if optimizer is own or attachment is None or attachment.busy or optimizer in self.known:
            return
        self.known.add(optimizer)
        if any(value is own for value in vars(optimizer).values()):  # it only wraps the one that is known
            return
        parameters = {id(p) for p in attachment.model.parameters() if p.requires_grad}
        if any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
            name = type(attachment.method).__name__
            attachment.warn_of(
                f"{name} is attached to another optimizer than the {type(optimizer).__name__} that makes this step, so that nothing of "
                f"{name} is in it: attachment.remove(), then {name}.attach(model, optimizer) with the new one.",
                stacklevel=3,
            )


def _as_told(told: Any, passed: Any) -> Any:
    """What has passed the model, but of named inputs those that were told of, and others that have a row per example.

    Options of the call that nobody told of are no inputs.
    """
    if not isinstance(told, Mapping) or not isinstance(passed, Mapping):
        return passed
    rows = row_count(told)
    others = {n: v for n, v in passed.items() if n not in told and isinstance(v, Tensor) and v.dim() and len(v) == rows}
    return {**{n: passed.get(n, v) for n, v in told.items()}, **others}


def _put_back(statistics: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in statistics:
        buffer.data.copy_(value)


def _plain(optimizer: Any) -> Optimizer:
    """Torch's own optimizer inside what Accelerate and Lightning, or methods of two steps such as SAM, wrap around it."""
    while not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith("accelerate"):
        inner = getattr(optimizer, "optimizer", getattr(optimizer, "_optimizer", None))
        if inner is None:
            raise TypeError(f"A method is attached to a torch optimizer, got a {type(optimizer).__name__}.")
        optimizer = inner
    base = getattr(optimizer, "base_optimizer", None)
    return base if isinstance(base, Optimizer) else optimizer


def _check(method: Method, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse the loops whose steps no hook can serve."""
    refuse_meta(model.parameters())
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS looks at the loss many times in a step: call the method's verbs in your own loop.")
    if any(type(thing).__module__.startswith("deepspeed") for thing in (optimizer, *model.modules())):
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
    if left := [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in moved]:
        raise ValueError(
            f"This optimizer does not move {', '.join(left[:3])}{', …' * (len(left) > 3)}: a method goes with one optimizer that has "
            "all that learns; freeze the others, p.requires_grad_(False)."
        )


@contextmanager
def _averaged(parameters: list[nn.Parameter]) -> Iterator[None]:
    """The gradients that come inside are averaged over processes, each alike, as those are that were there."""
    if distributed.world() == 1 or not parameters:
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
    """Add a gradient, in float16 by way of the scale that keeps it from vanishing."""
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
    """What to do where labels are missing."""
    try:
        yield
    except ValueError as error:
        if batch.y is not None or "no labels" not in str(error):
            raise
        raise ValueError(
            f"{error} Here: attachment.see(x, y) before the model is called. A trainer's callback does so if labels are in the batch, from which "
            "Hugging Face's Trainer takes them for compute_loss_func and label smoothing."
        ) from error


def _autocast(one: Seen, model: nn.Module) -> AbstractContextManager[Any]:
    device = next(model.parameters()).device.type
    return torch.autocast(device, one.precision, enabled=one.precision is not None)
