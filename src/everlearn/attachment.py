"""A method in a loop that knows nothing of it, carried by the hooks of the optimizer's step."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everlearn import distributed
from everlearn.batch import Batch, ask
from everlearn.likelihood import Categorical, Likelihood
from everlearn.params import refuse_sharded

if TYPE_CHECKING:
    from everlearn.method import Method


@dataclass(eq=False)
class Seen:
    """A micro-batch of the step under way, and what the model has said to it."""

    batch: Batch
    passed: bool = False
    out: Tensor | None = None
    pull: Tensor | None = None  # the gradient of the loop's loss in these outputs
    precision: torch.dtype | None = None  # of autocast


class Attachment:
    """What ties a method to a model and an optimizer; made by ``method.attach``.

    Whoever owns the loop leaves the gradient of their loss in ``p.grad``. Before the optimizer moves, once per step, of however
    many micro-batches b it is made, the method adds its part:

        g ← g + Σ_b (n_b / n) ∇[ L_method(b) - L_task(b) ],    then before_step(model)

    and after the move it has ``after_step(model)``. At that place gradients are summed, unscaled and averaged over processes, so
    that accumulation and mixed precision need not be known, and the loop's own loss stays what it is. A method whose task loss is
    another than the likelihood's, as that of replay is, subtracts the latter: at the first step it is checked that the loop's is
    that. Methods that look at examples see those that pass the model in training mode; labels are told by ``see``. What
    has passed without a step, because a gradient scaler skipped it or the loop did, is forgotten when gradients begin anew.

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
        self._replaces = method.changes("join") or method.changes("task_loss")
        self._known = not self._replaces  # whether the loop's loss is the likelihood's
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            model.register_forward_hook(self._passed, with_kwargs=True),
        ]

    def see(self, x: Any, y: Tensor | None = None, *, epoch: int = 0, out: Tensor | None = None) -> None:
        """Tell of the micro-batch that goes through the model next.

        Args:
            x: its inputs, or a ``Batch``.
            y: its labels.
            epoch: the pass over the data; memories take examples in the first.
            out: what the model has said to it, where that is known.
        """
        if self.method.of_parameters:
            return
        batch = x if isinstance(x, Batch) else Batch(x, y, likelihood=self.likelihood, epoch=epoch)
        self._seen.append(Seen(batch))
        if out is not None:
            self._note(self._seen[-1], out)

    def remove(self) -> None:
        """Leave the loop as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """A copy of the model is a model without a method."""
        other = copy.copy(self)
        other.busy, other._seen, other._handles = True, [], []
        return other

    def _passed(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note what goes through the model while it learns."""
        if self.busy or self.method.of_parameters or not model.training or not torch.is_grad_enabled():
            return
        passed = self._batch(args, kwargs)
        if not self._seen or self._seen[-1].passed:
            self._seen.append(Seen(passed))
        one = self._seen[-1]
        if len(passed) == len(one.batch) and one.batch.raw is None:
            one.batch = replace(one.batch, x=passed.x)  # as the loop has normalised it
        self._note(one, out)

    def _note(self, one: Seen, out: Any) -> None:
        """What the model has said, where it is needed, and what becomes of it."""
        one.passed = True
        device = next(self.model.parameters()).device.type
        one.precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if not isinstance(out, Tensor):
            return
        if not self._known or self.method.changes("observe"):
            one.out = out.detach()
        if out.requires_grad:
            out.register_hook(partial(self._pulled, one))

    def _pulled(self, one: Seen, gradient: Tensor) -> None:
        """The loop goes backward: where it does so with no gradients yet, what passed before has made no step."""
        if not self._known:
            one.pull = gradient.detach()
        if one in self._seen and all(p.grad is None for p in self.model.parameters()):
            self._seen = self._seen[self._seen.index(one) :]

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
        seen, self._seen = [one for one in self._seen if one.batch.weight], []
        if all(p.grad is None for p in self.model.parameters()):
            return
        whole = sum(one.batch.weight for one in seen)
        with self._unnoticed(bool(seen)):
            if not self._known and seen:
                self._compare(seen)
            learning = [] if self.method.of_parameters else [*self.model.parameters(), *self.method.parameters()]
            with _averaged(learning, whole):
                for one in seen:
                    with _autocast(one, self.model), _hint(one.batch):
                        extra = self._extra(one)
                    _backward(extra, one.batch.weight / whole)
            if not seen:
                _backward(self.method.unpulled(self.model, None, None))
            self.method.pull(self.model)
            self.method.before_step(self.model)
        self._edited = True

    def _compare(self, seen: list[Seen]) -> None:
        """Refuse a loop whose loss is not what is subtracted; a power of two may be a scaler's."""
        pairs = [
            (one.out.float().requires_grad_(), one) for one in seen if one.out is not None and one.pull is not None
        ]
        if len(pairs) < len(seen) or any(one.batch.y is None for one in seen):
            return
        ours = [torch.autograd.grad(one.batch.loss(out), out)[0].flatten().double() for out, one in pairs]
        theirs = [one.pull.flatten().double() for _, one in pairs if one.pull is not None]
        scales = [float(a @ b / a.square().sum().clamp(min=1e-300)) for a, b in zip(ours, theirs, strict=True)]
        apart = max(
            float((b - s * a).norm() / b.norm().clamp(min=1e-300)) for a, b, s in zip(ours, theirs, scales, strict=True)
        )
        times = sum(scales)
        if apart > 0.05 or not (
            abs(times - 1) < 0.05 or (times > 1.5 and abs(math.log2(times) - round(math.log2(times))) < 0.05)
        ):
            what = "another one" if apart > 0.05 else f"{times:.3g} of that"
            raise ValueError(
                f"{type(self.method).__name__} weighs the loss of new examples against that of old ones by {self.likelihood}, and the "
                f"loop's loss is {what}: give attach(…, likelihood=…) what the loop's loss is the mean of, or take the loss from "
                "method.loss(model, batch)."
            )
        self._known = True

    def _extra(self, one: Seen) -> Tensor | float:
        """What the method's loss has beyond the loop's."""
        method, batch, out = self.method, one.batch, None
        extra: Tensor | float = 0.0
        if self._replaces:
            whole = method.join(batch)
            said = ask(self.model, whole.x)
            out = said if whole is batch else said[: len(batch)]
            extra = method.task_loss(whole, said) - batch.loss(out)
        extra = extra + method.unpulled(self.model, batch, out)
        if method.changes("observe"):
            if one.out is None:
                with torch.no_grad():
                    one.out = ask(self.model, batch.x) if out is None else out.detach()
            method.observe(batch, one.out)
        return extra

    @contextmanager
    def _unnoticed(self, passes: bool) -> Iterator[None]:
        """The loop finds its random numbers and running statistics as if the model had not been asked again."""
        self.busy = True
        statistics = [(b, b.clone()) for b in self.model.buffers()] if passes else []
        cuda = [device] if (device := next(self.model.parameters()).device).type == "cuda" else []
        try:
            with torch.random.fork_rng(cuda, enabled=passes), torch.enable_grad():
                yield
        finally:
            self.busy = False
            for buffer, value in statistics:
                buffer.copy_(value)


def _plain(optimizer: Any) -> Optimizer:
    """Torch's own optimizer inside what Accelerate and Lightning wrap around it."""
    while not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith("accelerate"):
        inner = getattr(optimizer, "optimizer", getattr(optimizer, "_optimizer", None))
        if inner is None:
            raise TypeError(f"A method is attached to a torch optimizer, got a {type(optimizer).__name__}.")
        optimizer = inner
    return optimizer


def _check(method: Method, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse the loops whose steps no hook can serve."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS looks at the loss many times in a step: call the method's verbs in your own loop.")
    if type(model).__module__.startswith("deepspeed"):
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
def _averaged(parameters: list[nn.Parameter], weight: float) -> Iterator[None]:
    """The gradients that come inside are averaged over processes; those that were there are so already."""
    if distributed.world() == 1 or not parameters:
        yield
        return
    refuse_sharded(parameters, "What this method adds to a loop that it is attached to")
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    yield
    distributed.average_gradients(parameters, weight, 0.0)
    for p, g in zip(parameters, before, strict=True):
        p.grad = g if p.grad is None else p.grad if g is None else g + p.grad


def _backward(extra: Tensor | float, share: float = 1.0) -> None:
    if isinstance(extra, Tensor) and extra.requires_grad:
        (extra * share).backward()


@contextmanager
def _hint(batch: Batch) -> Iterator[None]:
    """What to do where labels are missing."""
    try:
        yield
    except ValueError as error:
        if batch.y is not None or "no labels" not in str(error):
            raise
        raise ValueError(
            f"{error} Here: attachment.see(x, y) before the model is called, which a trainer's callback does once per batch."
        ) from error


def _autocast(one: Seen, model: nn.Module) -> AbstractContextManager[Any]:
    device = next(model.parameters()).device.type
    return torch.autocast(device, one.precision, enabled=one.precision is not None)
