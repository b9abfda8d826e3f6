"""Quadratic penalty around an anchor point."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.parameters import (
    Params,
    accumulate_dtype,
    all_parameters,
    grown,
    inner,
    is_sharded,
    leading_block,
    remembered_parameters,
    squared_size,
    trainable_parameters,
)
from everlearn.curvature.diagonal import Diagonal, to_device_of
from everlearn.curvature.full import Full
from everlearn.curvature.kronecker import Kronecker

Form = Diagonal | Kronecker | Full
FORMS: dict[str, type[Form]] = {"diagonal": Diagonal, "kronecker": Kronecker, "full": Full}


@dataclass(eq=False)
class Quadratic:
    """Quadratic function q(θ) = ½ δᵀ F δ - sᵀ δ + c with δ = θ - m.

    A sum of quadratics is a quadratic. Two diagonal ones have their common minimum at the mean of their anchors,
    weighted by their precisions, so that s = 0 and nothing cancels in float32:

        F₁ (θ - θ₁)² + F₂ (θ - θ₂)²  =  (F₁ + F₂) (θ - m)² + F₁F₂ / (F₁ + F₂) · (θ₁ - θ₂)²
        m = θ₁ + F₂ / (F₁ + F₂) · (θ₂ - θ₁)

    Other forms are expanded around the latest anchor, which is exact for a quadratic: s is minus the gradient there
    and c the value.

    Args:
        form: F.
        anchor: m.
        slope: s; empty for zero.
        constant: c.
        widened: parameters whose layer has gained inputs since.
    """

    form: Form = field(default_factory=Diagonal)
    anchor: Params = field(default_factory=dict)
    slope: Params = field(default_factory=dict)
    constant: float = 0.0
    widened: set[str] = field(default_factory=set)

    # Parameters whose gradient has been nonzero at least once.
    _moved: set[str] = field(default_factory=set, init=False, repr=False)
    # Parameters whose gradient was zero in the last test, and of those the versions of the ones not updated since.
    _tested_zero: set[str] = field(default_factory=set, init=False, repr=False)
    _unmoved_versions: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, model: nn.Module) -> Tensor:
        """Compute q(θ) at the model's parameters.

        The gradient is in closed form: it costs one product with F and builds no graph.
        """
        theta = remembered_parameters(model, self.anchor, None, self.widened)
        if not theta:  # all are frozen
            return torch.zeros(())
        theta = self._add_frozen(model, theta)
        if not torch.is_grad_enabled():
            return self._value_and_gradient(theta)[0]
        value: Tensor = _QuadraticValue.apply(self, list(theta), *theta.values())  # type: ignore[no-untyped-call]
        return value

    def note_step(self, model: nn.Module) -> None:
        """Record which parameters the optimizer has updated: they are not tested again, which would wait for a device.

        Args:
            model: after the step, with the gradients of the step.
        """
        if not self._tested_zero:
            return
        for name, p in trainable_parameters(model).items():
            if name not in self._tested_zero:
                continue
            if p.grad is not None:
                self._moved.add(name)
            elif isinstance(self.form, Diagonal):
                # The optimizer has skipped it, and its gradient depends on no other parameter.
                self._unmoved_versions[name] = p._version
        self._tested_zero = set()

    def _update_moved(self, gradient: Params, theta: Params) -> set[str]:
        """Return the parameters whose gradient is, or once was, nonzero, and those that a step has updated.

        A zero gradient is not the same as None: with zeros, weight decay would change a parameter that the loss does
        not use, such as the output layer of another task. A parameter that has moved is not tested again, so there is
        no device synchronization after the first step.
        """
        untested = {}
        for name, g in gradient.items():
            if name not in self._moved and self._unmoved_versions.get(name) != theta[name]._version:
                untested[name] = g
        if untested:
            nonzero_names = nonzero(untested)
            self._moved |= nonzero_names
            self._tested_zero = untested.keys() - nonzero_names
        return self._moved

    def _value_and_gradient(self, theta: Params) -> tuple[Tensor, Params]:
        """Compute q(θ) = ½ δᵀ F δ - sᵀ δ + c and its gradient F δ - s."""
        # The value of a large importance needs full precision.
        device_type = next(iter(theta.values())).device.type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return self._value_and_gradient(theta)

        delta = self._delta(theta)
        gradient = self.form.times(delta)
        value = _dot(delta, gradient) / 2
        if self.constant:
            value = value + self.constant
        if self.slope:
            slope = {name: to_device_of(s, gradient[name]) for name, s in self.slope.items() if name in gradient}
            value = value - _dot(delta, slope)
            gradient = {**gradient, **{name: gradient[name] - s for name, s in slope.items()}}
        return value, gradient

    def _add_frozen(self, model: nn.Module, theta: Params) -> Params:
        """Add frozen parameters if F has products of two: one off its anchor changes the gradient of the others."""
        if isinstance(self.form, Diagonal):
            return theta
        missing = self.form.names - theta.keys()
        frozen = {name: p.detach() for name, p in all_parameters(model).items() if name in missing}
        if not frozen:
            return theta
        return theta | remembered_parameters(model, self.anchor, frozen)

    def _delta(self, theta: Params) -> Params:
        """Compute δ = θ - m for the parameters with an anchor."""
        names = [name for name in theta if name in self.anchor]
        if not names:
            return {}
        anchors = [to_device_of(self.anchor[name], theta[name]) for name in names]
        differences = torch._foreach_sub([theta[name] for name in names], anchors)
        return dict(zip(names, differences, strict=True))

    def add(self, form: Form, anchor: Params) -> None:
        """Add the quadratic ½ (θ - anchor)ᵀ form (θ - anchor).

        Args:
            form: its F.
            anchor: its minimum, by parameter name.
        """
        self._moved = set()
        self._tested_zero = set()
        self._unmoved_versions = {}
        self.widened -= anchor.keys()
        if not self.anchor:
            self.form = form
            self.anchor = dict(anchor)
        elif isinstance(self.form, Diagonal) and isinstance(form, Diagonal):
            self._add_diagonal(form, anchor)
        else:
            # Expand around the new anchor; parameters that are frozen now stay at theirs.
            form_sum = total(self.form, form)
            new_anchor = {**self.anchor, **anchor}
            theta = {name: leading_block(new_anchor[name], old.shape) for name, old in self.anchor.items()}
            value, gradient = self._value_and_gradient(theta)

            self.form = form_sum
            self.anchor = new_anchor
            self.constant = float(value)
            self.slope = {name: -grown(g, new_anchor[name].shape) for name, g in gradient.items()}

    def _add_diagonal(self, form: Diagonal, anchor: Params) -> None:
        """Add a diagonal quadratic, moving the anchor to the common minimum m."""
        form_sum = Diagonal(self.form.diagonal()) + form
        for name, theta in anchor.items():
            if name not in form.values:
                continue

            # The mean of two close anchors needs more digits than either of them.
            dtype = accumulate_dtype(theta)
            theta = theta.to(dtype)
            f_new = form.values[name].to(theta.device, dtype.to_real())
            f_sum = form_sum.values[name].to(theta.device, dtype.to_real())

            # Where neither form has importance, the new anchor is taken.
            fraction = torch.where(f_sum > 0, f_new / f_sum, torch.ones_like(f_new))

            # Entries that the old anchor lacks, because the layer was widened, start at the new one.
            old_theta = theta.clone()
            old_anchor = self.anchor.get(name)
            if old_anchor is not None:
                leading_block(old_theta, old_anchor.shape).copy_(old_anchor)

            difference = theta - old_theta
            self.constant += float(((f_sum - f_new) * fraction * squared_size(difference)).sum()) / 2
            m = torch.addcmul(old_theta, fraction.to(old_theta.dtype), difference)

            # Exactly θ where the new form alone has importance: old + (θ - old) has a rounding error, which would give
            # a gradient at θ.
            self.anchor[name] = torch.where(fraction == 1, theta, m)
        self.form = form_sum

    def move(self, form: Form, anchor: Params) -> None:
        """Replace the form and move the anchor; slope and constant become zero."""
        self.form = form
        self.anchor = {**self.anchor, **anchor}
        self.slope = {}
        self.constant = 0.0
        self._moved = set()
        self.widened -= anchor.keys()

    def rescale(self, factor: float) -> None:
        """Multiply q by a factor; its minimum stays."""
        self.form = self.form * factor
        self.slope = {name: s * factor for name, s in self.slope.items()}
        self.constant *= factor

    def state_dict(self) -> dict[str, Any]:
        """Return the state for saving."""
        return {
            "kind": next(name for name, form_class in FORMS.items() if isinstance(self.form, form_class)),
            "form": self.form.state_dict(),
            "anchor": dict(self.anchor),
            "slope": dict(self.slope),
            "constant": self.constant,
            "widened": sorted(self.widened),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state."""
        self._moved = set()
        self.widened = set(state["widened"])
        self.form = FORMS[state["kind"]]()
        self.form.load_state_dict(state["form"])
        self.anchor = dict(state["anchor"])
        self.slope = dict(state["slope"])
        self.constant = float(state["constant"])


def total(first: Form, second: Form) -> Form:
    """Add two forms of the same structure."""
    if type(first) is not type(second):
        structures = f"{type(first).__name__} and {type(second).__name__}"
        raise TypeError(f"{structures} cannot be added: compute all importances with the same structure.")
    return first + second  # type: ignore[operator]


def nonzero(tensors: Params) -> set[str]:
    """Return the names of tensors with a nonzero entry, with a single device synchronization.

    >>> nonzero({"a": torch.zeros(2), "b": torch.tensor([0.0, 1.0])})
    {'b'}
    """
    if not tensors:
        return set()
    flags = []
    for tensor in tensors.values():
        flag = tensor.any()
        if is_sharded(flag):
            flag = flag.full_tensor()  # type: ignore[attr-defined]
        flags.append(flag)

    has_nonzero = torch.stack([to_device_of(flag, flags[0]) for flag in flags]).tolist()
    return {name for name, is_nonzero in zip(tensors, has_nonzero, strict=True) if is_nonzero}


class _QuadraticValue(torch.autograd.Function):
    """q(θ) with its closed-form gradient; a graph through the same formula takes twice the time."""

    @staticmethod
    def forward(ctx: Any, quadratic: Quadratic, names: list[str], *theta: Tensor) -> Tensor:
        theta_by_name = dict(zip(names, theta, strict=True))
        value, gradient = quadratic._value_and_gradient(theta_by_name)
        moved = quadratic._update_moved(gradient, theta_by_name)
        ctx.quadratic = quadratic
        ctx.names = names
        ctx.gradient = gradient
        ctx.moved = {name for name in names if name in moved}
        ctx.save_for_backward(*theta)
        return value

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        theta = ctx.saved_tensors
        gradient = ctx.gradient
        moved = ctx.moved

        # Where the gradient is zero, the second derivative need not be.
        if torch.is_grad_enabled():
            moved = set(ctx.names)

        # Recompute for a second derivative, or for a second backward pass through the same graph.
        if torch.is_grad_enabled() or gradient is None:
            _, gradient = ctx.quadratic._value_and_gradient(dict(zip(ctx.names, theta, strict=True)))

        # Without this reference autograd can accumulate into the gradient in place.
        ctx.gradient = None
        if d.requires_grad or not _is_one(d):
            gradient = dict(zip(gradient, torch._foreach_mul(list(gradient.values()), d), strict=True))

        theta_grads: list[Tensor | None] = []
        for name, parameter in zip(ctx.names, theta, strict=True):
            if name in gradient and name in moved:
                theta_grads.append(gradient[name].to(parameter.dtype))
            else:
                theta_grads.append(None)
        return None, None, *theta_grads


def _is_one(d: Tensor) -> bool:
    """Whether a scalar on the CPU is 1; False on other devices, where reading it would wait for them."""
    return d.device.type == "cpu" and bool(d == 1)


def _dot(a: Params, b: Params) -> Tensor:
    """Compute the inner product over the parameters of b."""
    terms = [inner(a[name].to(value.dtype), value) for name, value in b.items()]
    if not terms:
        return torch.zeros(())
    return torch.stack([to_device_of(term, terms[0]) for term in terms]).sum()
