"""A strength without a search: the scale of the penalty, measured from the first gradient of a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from everlearn.core.parameters import Params, inner, leading_block, squared_size
from everlearn.curvature.diagonal import to_device_of
from everlearn.curvature.quadratic import Form
from everlearn.runtime import distributed

# Between ½ and 1, three streams of digits lost least against a search, with all methods and optimizers.
RELATIVE_STRENGTH = 0.5


def relative_strength(gradient: Mapping[str, Tensor], form: Form, theta: Mapping[str, Tensor]) -> float | None:
    """Compute the strength at which a penalty weighs as much as the loss of a new task.

        λ = ½ rms(g) / (mean(diag F) · rms(θ)),   over the entries with F > 0

    The gradient of the penalty ½ λ δᵀFδ is then half as large as g at a distance of rms(θ) from the anchor. λ cancels
    the scale of F, and follows the scales of the loss and of the parameters. It is rounded to a power of two: F can be
    multiplied by it, and divided again, without a rounding error.

    Args:
        gradient: g of the new task's loss, by parameter name; missing ones count as zero.
        form: F.
        theta: θ, the old entries alone where layers have grown.

    Returns:
        λ; None where it is not defined, because g, F or θ is zero or g is not finite.

    >>> from everlearn.curvature.diagonal import Diagonal
    >>> form = Diagonal({"w": torch.tensor([0.1, 0.3])})
    >>> relative_strength({"w": torch.tensor([3.0, 4.0])}, form, {"w": torch.ones(2)})
    8.0
    """
    num_entries = 0.0
    gradient_sum = 0.0
    importance_sum = 0.0
    theta_sum = 0.0
    for name, importance in form.diagonal().items():
        if name not in theta:
            continue
        # Entries without importance are not penalized: how many there are, such as of dark pixels, does not matter.
        counted = (importance > 0).float()
        num_entries += _sum(counted)
        importance_sum += _sum(importance)
        theta_sum += _sum(counted * to_device_of(squared_size(theta[name].detach()), counted))
        if name in gradient:
            g = gradient[name].to_dense() if gradient[name].is_sparse else gradient[name]
            g_squared = squared_size(leading_block(g, theta[name].shape))
            gradient_sum += _sum(counted * to_device_of(g_squared, counted))

    # Each process has the gradient of its own share of the batch.
    gradient_sum = distributed.sum_across(gradient_sum) / distributed.world_size()
    if not all(0 < total < math.inf for total in (gradient_sum, importance_sum, theta_sum)):
        return None
    mean_importance = importance_sum / num_entries
    strength = math.sqrt(gradient_sum / num_entries) / (mean_importance * math.sqrt(theta_sum / num_entries))
    return float(2.0 ** round(math.log2(RELATIVE_STRENGTH * strength)))


def _sum(tensor: Tensor) -> float:
    """Sum all entries, across processes if sharded."""
    values = tensor.float()
    return float(inner(values, torch.ones_like(values)))


class GradientProbe:
    """The gradient of the loss in the first step of a task, from hooks on the parameters.

    The loop adds ``zero`` to its loss, in place of the penalty. The gradient of this zero is the factor of the loss: of
    a gradient scaler, or of micro-batches that are accumulated. The hooks see gradients before they are clipped. Losses
    without this zero are not recorded.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Params) -> None:
        device = next(iter(parameters.values())).device
        self.zero = torch.zeros((), device=device, requires_grad=True)
        self.zero.register_hook(self._begin_loss)
        self.num_penalties = 0
        self._num_losses = 0
        self._sums: Params = {}
        self._num_gradients: dict[str, int] = {}
        self._parameters = parameters
        self._handles = [p.register_hook(self._record(name)) for name, p in parameters.items()]

    def is_of(self, parameters: Params) -> bool:
        """Whether the hooks are on these parameters, and not on those of a copy of the model."""
        return all(self._parameters.get(name) is p for name, p in parameters.items())

    def gradient(self) -> Params:
        """Return the gradient of the loss without its factor; empty before the first backward pass."""
        if self.zero.grad is None:
            return {}
        factor = self.zero.grad
        return {name: g / to_device_of(factor, g) for name, g in self._sums.items()}

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> Any:
        return type(None), ()  # hooks are not copied

    def _begin_loss(self, factor: Tensor) -> None:
        """Expect the gradients of a loss; autograd computes that of the zero first, since it is a leaf of the sum."""
        self._num_losses += 1

    def _record(self, name: str) -> Callable[[Tensor], None]:
        def add_gradient(gradient: Tensor) -> None:
            if self._num_gradients.get(name, 0) == self._num_losses:
                return
            self._num_gradients[name] = self._num_losses
            old_sum = self._sums.get(name)
            self._sums[name] = gradient.detach().clone() if old_sum is None else old_sum + gradient.detach()

        return add_gradient
