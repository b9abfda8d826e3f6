"""A method in a loop that knows nothing of it, carried by the hooks of the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everlearn.batch import Batch
from everlearn.likelihood import Categorical, Likelihood

if TYPE_CHECKING:
    from everlearn.method import Method


@dataclass
class Seen:
    """A micro-batch of the step under way, and what the model has said to it."""

    batch: Batch
    out: Tensor | None = None
    precision: torch.dtype | None = None  # of autocast


class Attachment:
    """What ties a method to a model and an optimizer; made by ``method.attach``.

    Whoever owns the loop leaves the gradient of their loss in ``p.grad``. Before the optimizer moves, once per step, of however
    many micro-batches b it is made, the method adds its part:

        g ← g + Σ_b (n_b / n) ∇[ L_method(b) - L_task(b) ],    then before_step(model)

    and after the move it has ``after_step(model)``. At that place gradients are summed, unscaled and averaged over processes, so
    that accumulation and mixed precision need not be known, and the loop's own loss stays what it is. Methods that look at
    examples see those that pass the model in training mode; labels are told by ``see``. A step skipped by a gradient
    scaler is not seen: its examples count for the next one.

    Args:
        method: the method.
        model: such that ``model(x)`` gives the outputs.
        optimizer: whose steps count.
        likelihood: what the outputs mean.
    """

    def __init__(
        self, method: Method, model: nn.Module, optimizer: Optimizer, likelihood: Likelihood | None = None
    ) -> None:
        optimizer = _plain(optimizer)
        _check(model, optimizer)
        self.method, self.model, self.likelihood = method, model, likelihood or Categorical()
        self._seen: list[Seen] = []
        self.busy = self._edited = False  # asking the model itself; owing an after_step
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
        batch = x if isinstance(x, Batch) else Batch(x, y, likelihood=self.likelihood, epoch=epoch)
        self._seen.append(Seen(batch, out))

    def remove(self) -> None:
        """Leave the loop as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _passed(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note what goes through the model while it learns."""
        if self.busy or not model.training or not torch.is_grad_enabled():
            return
        if not self._seen or self._seen[-1].out is not None:
            self._seen.append(Seen(self._batch(args, kwargs)))
        one = self._seen[-1]
        one.out = out.detach() if isinstance(out, Tensor) else None
        device = next(model.parameters()).device.type
        one.precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

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
        seen, self._seen = self._seen, []
        if all(p.grad is None for p in self.model.parameters()):
            return
        whole = sum(one.batch.weight for one in seen)
        with self._unnoticed(bool(seen) and not self.method.of_parameters):
            for one in seen:
                with _autocast(one, self.model), _hint(one.batch):
                    extra = self._extra(one)
                if isinstance(extra, Tensor) and extra.requires_grad:
                    (extra * (one.batch.weight / whole)).backward()
            if not seen:
                self.method.unpulled(self.model, None, None)
            self.method.pull(self.model)
            self.method.before_step(self.model)
        self._edited = True

    def _extra(self, one: Seen) -> Tensor | float:
        """What the method's loss has beyond the loop's."""
        method, batch, out = self.method, one.batch, None
        extra: Tensor | float = 0.0
        if method.changes("join") or method.changes("task_loss"):
            whole = method.join(batch)
            said = self.model(whole.x)
            out = said if whole is batch else said[: len(batch)]
            extra = method.task_loss(whole, said) - batch.loss(out)
        extra = extra + method.unpulled(self.model, batch, out)
        if method.changes("observe"):
            if one.out is None:
                with torch.no_grad():
                    one.out = self.model(batch.x) if out is None else out.detach()
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


def _check(model: nn.Module, optimizer: Optimizer) -> None:
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


@contextmanager
def _hint(batch: Batch) -> Iterator[None]:
    """What to do where labels are missing."""
    try:
        yield
    except ValueError as error:
        if batch.y is not None:
            raise
        raise ValueError(f"{error} Here: attachment.see(x, y) before the model is called.") from error


def _autocast(one: Seen, model: nn.Module) -> AbstractContextManager[Any]:
    device = next(model.parameters()).device.type
    return torch.autocast(device, one.precision, enabled=one.precision is not None)
