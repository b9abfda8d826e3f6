"""PathIntegral, the base of SI: which gradients and updates of a step enter its path integral."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.parameters import (
    Params,
    accumulate_dtype,
    all_parameters,
    check_growth,
    grown,
    leading_block,
    select_by_pattern,
    trainable_parameters,
)
from everlearn.curvature.diagonal import Diagonal, to_device_of
from everlearn.curvature.quadratic import nonzero
from everlearn.methods.regularization.base import QuadraticPenalty


class PathIntegral(QuadraticPenalty):
    """Bookkeeping of a path integral over training steps: growing layers, skipped steps, and buffers for speed.

    ``_begin_step`` stores the gradient g of the task loss and a copy of θ before the optimizer's step, and
    ``_end_step`` returns g and -Δθ after it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path: Params = {}  # ω
        self.steps = 0
        # The shapes of all trainable parameters at the last call of ``_init_path``.
        self._trainable_shapes: dict[str, torch.Size] = {}
        # The parameters of the current step: looking up their names again would take time.
        self._theta: Params = {}
        self._task_gradient: Params = {}  # g
        self._start: Params = {}  # θ before the step; a buffer that every step writes again
        self._start_versions: list[int] = []
        self._is_step_begun = False

    @property
    def omega(self) -> Diagonal:
        """2 · strength · Ω: the quadratic ½ δᵀFδ has a ½, the penalty of SI has none."""
        if not isinstance(self.quadratic.form, Diagonal):
            raise TypeError("SI needs importances per parameter: use a Diagonal form.")
        return self.quadratic.form

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Start the path integral of parameters that have none yet."""
        super().begin_task(model, task)
        self._is_step_begun = False
        self._init_path(model)

    def _begin_step(self, model: nn.Module) -> list[str]:
        """Store g and θ before the optimizer's step; return the names of parameters with a penalty gradient."""
        parameters = trainable_parameters(model)
        if self.frozen:
            self._notice_thawed(parameters)
        if any(self._trainable_shapes.get(n) != p.shape for n, p in parameters.items()):
            self._init_path(model)
        if all(p.grad is None for p in parameters.values()):
            raise ValueError("SI.before_step found no gradients: call it after loss.backward() and before the step.")

        self._theta = {n: p for n, p in parameters.items() if n in self.path}
        for p in self._theta.values():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        self._copy_theta()

        # Clipping changes p.grad in place: copy g where the penalty does not give p.grad a new tensor.
        penalized_names = self._penalized_names()
        self._task_gradient = {n: p.grad for n, p in self._theta.items() if p.grad is not None}
        self._task_gradient |= {n: g.clone() for n, g in self._task_gradient.items() if n not in penalized_names}

        self._is_step_begun = True
        return penalized_names

    def _end_step(self) -> tuple[Params, list[Tensor]]:
        """Return g by name and the list of -Δθ after the optimizer's step; both are empty if it was skipped."""
        if not self._is_step_begun:
            raise ValueError("SI.after_step needs the before_step(model) of the same step, after backward().")
        g = self._task_gradient

        # A gradient scaler skips the step when a gradient overflows; an infinite g must not enter the path then.
        # In-place operations increase the version of a tensor; writes through ``p.data`` and fused optimizers do not.
        has_moved = [p._version for p in self._theta.values()] != self._start_versions
        if g and not has_moved and not _is_known_finite(g):
            g = zero_if_infinite(g)
        negative_update = [self._start[n] for n in g]
        if g:
            torch._foreach_sub_(negative_update, [self._theta[n] for n in g])

        self._theta = {}
        self._task_gradient = {}
        self._is_step_begun = False
        return g, negative_update

    def _copy_theta(self) -> None:
        """Copy θ into the buffers of the last step, and into new ones where parameters have changed."""
        for name, p in self._theta.items():
            start = self._start.get(name)
            if start is not None and (start.shape, start.dtype, start.device) == (p.shape, p.dtype, p.device):
                start.copy_(p)
            else:
                self._start[name] = p.detach().clone()
        self._start_versions = [p._version for p in self._theta.values()]

    def _displacement(self, names: list[str]) -> list[Tensor]:
        """Compute θ - θ*."""
        theta = [self._theta[n] for n in names]
        return list(torch._foreach_sub(theta, [to_device_of(self.quadratic.anchor[n], self._theta[n]) for n in names]))

    def _penalized_names(self) -> list[str]:
        """Return the parameters with importances, without those whose task and penalty gradients are both zero.

        Their ``p.grad`` stays None, so that weight decay does not move them.
        """
        names = [n for n in self._theta if n in self.omega.values]
        untouched = [n for n in names if self._theta[n].grad is None]
        if not untouched:
            return names
        displacement = dict(zip(untouched, self._displacement(untouched), strict=True))
        zero_names = set(untouched) - nonzero(
            {n: to_device_of(self.omega.values[n], d) * d for n, d in displacement.items()}
        )
        return [n for n in names if n not in zero_names]

    def _init_path(self, model: nn.Module) -> None:
        """Set ω = 0 and θ* = θ for parameters, and rows of parameters, that are new."""
        parameters = trainable_parameters(model)
        complex_names = [n for n, p in parameters.items() if p.is_complex()]
        if complex_names:
            raise TypeError(
                f"SI integrates over real parameters, and {complex_names[0]} is complex: use EWC or MAS, or freeze it."
            )
        weights = select_by_pattern(all_parameters(model), self.only)
        self._notice_thawed(parameters)
        self._trainable_shapes = {n: p.shape for n, p in parameters.items()}

        for name, parameter in parameters.items():
            if name not in weights:
                continue
            theta = parameter.detach()
            path = self.path.get(name)
            if path is not None and path.shape == theta.shape:
                continue

            # Rows that existed before keep their anchor and their importance.
            anchor = theta.clone()
            old_anchor = self.quadratic.anchor.get(name)
            if old_anchor is not None:
                check_growth(name, theta, old_anchor.shape)
                leading_block(anchor, old_anchor.shape).copy_(old_anchor)
            if self.offload:
                anchor = anchor.cpu()
            self.quadratic.anchor[name] = anchor
            if name in self.omega.values:
                self.omega.values[name] = grown(self.omega.values[name], theta.shape)
                self._active = None

            if path is None:
                self.path[name] = torch.zeros_like(theta, dtype=accumulate_dtype(theta))
            else:
                self.path[name] = grown(path, theta.shape).clone()


def _is_known_finite(gradient: Params) -> bool:
    """Whether a gradient on the CPU is finite; False on other devices, where reading it would wait for them."""
    return all(v.device.type == "cpu" and bool(v.sum().isfinite()) for v in gradient.values())


def zero_if_infinite(gradient: Params) -> Params:
    """Replace a gradient with zeros if an entry of it is not finite, without reading values of a device.

    >>> zero_if_infinite({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([torch.inf])})
    {'a': tensor([0., 0.]), 'b': tensor([0.])}
    """
    first_gradient = next(iter(gradient.values()))
    is_finite = torch.stack([to_device_of(v.sum().isfinite(), first_gradient) for v in gradient.values()]).all()
    return {name: torch.where(to_device_of(is_finite, v), v, 0) for name, v in gradient.items()}
