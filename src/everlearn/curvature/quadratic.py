"""A bowl: the quadratic form of what was learned, around where it was learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.curvature.diagonal import Diagonal, on
from everlearn.curvature.full import Full
from everlearn.curvature.kronecker import Kronecker
from everlearn.params import Params, corner, grown, inner, is_sharded, named_with_frozen, remembered, squared_size, wide

BLOCK = 2**22  # numbers that are worked on at a time
Form = Diagonal | Kronecker | Full
FORMS: dict[str, type[Form]] = {"diagonal": Diagonal, "kronecker": Kronecker, "full": Full}


@dataclass(eq=False)
class Quadratic:
    """q(θ) = ½ δᵀ F δ - sᵀ δ + c,   δ = θ - m.

    A sum of bowls is a bowl, whatever their number. Diagonal ones have their common minimum at the mean of their anchors,
    weighted by their precisions, so that s = 0 and nothing cancels in float32:

        F₁ (θ - θ₁)² + F₂ (θ - θ₂)²  =  (F₁ + F₂) (θ - m)² + F₁F₂ / (F₁ + F₂) · (θ₁ - θ₂)²,   m = θ₁ + F₂ / (F₁ + F₂) · (θ₂ - θ₁)

    Others are expanded anew around the last anchor, which for a quadratic is exact: s is minus the slope there and c the
    height.

    Args:
        form: F.
        anchor: m.
        slope: s; empty for zero.
        constant: c.
        widened: parameters that were seen to have grown since.
    """

    form: Form = field(default_factory=Diagonal)
    anchor: Params = field(default_factory=dict)
    slope: Params = field(default_factory=dict)
    constant: float = 0.0
    widened: set[str] = field(default_factory=set)
    _moved: set[str] = field(
        default_factory=set, init=False, repr=False
    )  # parameters that were seen to have a gradient

    def __call__(self, model: nn.Module) -> Tensor:
        """The height of the model's place in the bowl; its gradient costs one product with F, not a graph."""
        theta = remembered(model, self.anchor, None, self.widened)
        if not theta:  # all of them are frozen
            return torch.zeros(())
        theta = self._with_frozen(model, theta)
        height: Tensor = _Height.apply(self, list(theta), *theta.values())  # type: ignore[no-untyped-call]
        return height

    @torch.no_grad()
    def pull(self, model: nn.Module, parameters: Params) -> None:
        """Add the gradient at the model's place to ``p.grad``, in place: half the cost of a height and its graph.

        A parameter whose gradient is exactly zero keeps the ``p.grad`` it has, None where the loss does not touch it.
        """
        names = self.form.names
        theta = {n: t for n, t in remembered(model, self.anchor, parameters, self.widened).items() if n in names}
        if not theta:  # all of them are frozen
            return
        if isinstance(self.form, Diagonal) and not self.slope:
            for some in _blocks(theta):
                delta = list(self._delta(some).values())
                values = [on(self.form.values[n], d).to(d.dtype) for n, d in zip(some, delta, strict=True)]
                torch._foreach_mul_(delta, values)  # not addcmul: autograd, too, rounds the product before it adds it
                self._add_gradient(parameters, dict(zip(some, delta, strict=True)))
        else:
            pull = self._at(self._with_frozen(model, theta))[1]
            self._add_gradient(parameters, {n: pull[n] for n in theta})

    def _add_gradient(self, parameters: Params, gradient: Params) -> None:
        moved = self._nonzero(gradient)
        names = [n for n in gradient if n in moved]
        if names:
            grads = [_grad(parameters[n], gradient[n].shape) for n in names]
            torch._foreach_add_(grads, [gradient[n] for n in names])

    def _nonzero(self, gradient: Params) -> set[str]:
        """The parameters whose gradient is not, or has not always been, exactly zero.

        With zeros for a gradient, weight decay would move a parameter that the loss does not touch, such as another task's
        output layer, which it leaves alone where ``p.grad`` is None. What has moved once is not asked again, so that in most
        models nobody waits for the device after the first step.
        """
        unseen = {n: g for n, g in gradient.items() if n not in self._moved}
        if unseen:
            self._moved |= nonzero(unseen)
        return self._moved

    def _at(self, theta: Params) -> tuple[Tensor, Params]:
        """q(θ) and its gradient F δ - s."""
        kind = next(iter(theta.values())).device.type
        if torch.is_autocast_enabled(kind):  # the height of a large importance needs all digits
            with torch.autocast(kind, enabled=False):
                return self._at(theta)
        delta = self._delta(theta)
        pull = self.form.times(delta)
        height = _dot(delta, pull) / 2
        if self.constant:
            height = height + self.constant
        if self.slope:
            slope = {n: on(s, pull[n]) for n, s in self.slope.items() if n in pull}
            height = height - _dot(delta, slope)
            pull = {n: p - slope[n] if n in slope else p for n, p in pull.items()}
        return height, pull

    def _with_frozen(self, model: nn.Module, theta: Params) -> Params:
        """With the frozen parameters too where products of two count: one that stands off its anchor pulls at the others."""
        if isinstance(self.form, Diagonal):
            return theta
        names = self.form.names - theta.keys()
        frozen = {n: p.detach() for n, p in named_with_frozen(model).items() if n in names}
        return theta | remembered(model, self.anchor, frozen) if frozen else theta

    def _delta(self, theta: Params) -> Params:
        """θ - m, where there is an m."""
        names = [n for n in theta if n in self.anchor]
        anchors = [on(self.anchor[n], theta[n]) for n in names]
        return dict(zip(names, torch._foreach_sub([theta[n] for n in names], anchors) if names else [], strict=True))

    def add(self, form: Form, at: Params) -> None:
        """Another bowl, with its own minimum."""
        self._moved = set()
        self.widened -= at.keys()
        if not self.anchor:
            self.form, self.anchor = form, dict(at)
        elif isinstance(self.form, Diagonal) and isinstance(form, Diagonal):
            self._add_diagonal(form, at)
        else:
            both = total(self.form, form)
            here = {**self.anchor, **at}  # what is frozen just now has not moved
            height, pull = self._at({n: corner(here[n], a.shape) for n, a in self.anchor.items()})
            self.form, self.anchor, self.constant = both, here, float(height)
            self.slope = {n: -grown(p, here[n].shape) for n, p in pull.items()}

    def _add_diagonal(self, form: Diagonal, at: Params) -> None:
        both = Diagonal(self.form.diagonal()) + form
        for name, theta in at.items():
            if name not in form.values:
                continue
            digits = wide(theta)  # a mean of near places needs more digits than one of them
            theta = theta.to(digits)
            new, all_ = (v.to(theta.device, digits.to_real()) for v in (form.values[name], both.values[name]))
            share = torch.where(all_ > 0, new / all_, torch.ones_like(new))  # where nothing was held, hold it here
            old = theta.clone()
            if (before := self.anchor.get(name)) is not None:
                corner(old, before.shape).copy_(before)
            apart = theta - old
            self.constant += float(((all_ - new) * share * squared_size(apart)).sum()) / 2
            # Exactly θ where the new task alone holds it: old + (θ - old) is off by a rounding, which would pull at θ.
            anchor = torch.addcmul(old, share.to(old.dtype), apart)
            self.anchor[name] = torch.where(share == 1, theta, anchor)
        self.form = both

    def move(self, form: Form, to: Params) -> None:
        """This form and no other, around a new place."""
        self.form, self.anchor, self.slope, self.constant = form, {**self.anchor, **to}, {}, 0.0
        self._moved = set()
        self.widened -= to.keys()

    def state_dict(self) -> dict[str, Any]:
        """For saving."""
        kind = next(name for name, kind in FORMS.items() if isinstance(self.form, kind))
        facts = {"anchor": dict(self.anchor), "slope": dict(self.slope), "constant": self.constant}
        return {"kind": kind, "form": self.form.state_dict(), **facts, "widened": sorted(self.widened)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was saved."""
        self._moved, self.widened = set(), set(state["widened"])
        self.form = FORMS[state["kind"]]()
        self.form.load_state_dict(state["form"])
        self.anchor, self.slope, self.constant = dict(state["anchor"]), dict(state["slope"]), float(state["constant"])


def total(first: Form, second: Form) -> Form:
    """The sum of two forms of one kind."""
    if type(first) is not type(second):
        kinds = f"{type(first).__name__} and {type(second).__name__}"
        raise TypeError(f"{kinds} do not add: take all importances in one structure.")
    return first + second  # type: ignore[operator]


def nonzero(tensors: Params) -> set[str]:
    """The names of those that have an entry other than zero; a single wait for the device.

    >>> nonzero({"a": torch.zeros(2), "b": torch.tensor([0.0, 1.0])})
    {'b'}
    """
    flags = [tensor.any() for tensor in tensors.values()]
    flags = [flag.full_tensor() if is_sharded(flag) else flag for flag in flags]  # type: ignore[attr-defined]
    found = torch.stack([on(flag, flags[0]) for flag in flags]).tolist() if flags else []
    return {n for n, flag in zip(tensors, found, strict=True) if flag}


class _Height(torch.autograd.Function):
    """q(θ) with its gradient written down, because a graph through the same formula takes twice the time."""

    @staticmethod
    def forward(ctx: Any, bowl: Quadratic, names: list[str], *theta: Tensor) -> Tensor:
        height, ctx.pull = bowl._at(dict(zip(names, theta, strict=True)))
        ctx.bowl, ctx.names = bowl, names
        moved = bowl._nonzero(ctx.pull)
        ctx.moved = {n for n in names if n in moved}
        ctx.save_for_backward(*theta)
        return height

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        theta, pull, moved = ctx.saved_tensors, ctx.pull, ctx.moved
        if torch.is_grad_enabled():  # where the gradient is zero, the second derivative is not
            moved = set(ctx.names)
        if torch.is_grad_enabled() or pull is None:  # a second derivative, or a second pass
            pull = ctx.bowl._at(dict(zip(ctx.names, theta, strict=True)))[1]
        ctx.pull = None  # with nobody else holding it, autograd adds to it in place
        if d.requires_grad or d.device.type != "cpu" or d != 1:
            pull = dict(zip(pull, torch._foreach_mul(list(pull.values()), d), strict=True))
        gradients = (
            pull[n].to(t.dtype) if n in pull and n in moved else None for n, t in zip(ctx.names, theta, strict=True)
        )
        return None, None, *gradients


def _blocks(theta: Params) -> Iterator[Params]:
    """Some parameters at a time, so that what is made of them on the way never has the size of a large model."""
    block: Params = {}
    held = 0
    for name, t in theta.items():
        block[name], held = t, held + t.numel()
        if held >= BLOCK:
            yield block
            block, held = {}, 0
    if block:
        yield block


def _grad(parameter: Tensor, shape: torch.Size) -> Tensor:
    """Where a gradient is added up, as far as the parameter is held."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:  # the pull is not
        parameter.grad = parameter.grad.to_dense()
    return corner(parameter.grad, shape)


def _dot(a: Params, b: Params) -> Tensor:
    parts = [inner(a[n].to(p.dtype), p) for n, p in b.items()]
    return torch.stack([on(part, parts[0]) for part in parts]).sum() if parts else torch.zeros(())
