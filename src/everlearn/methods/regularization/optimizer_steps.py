"""What a penalty learns from the optimizer: when it steps, and with which learning rates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everlearn.core.parameters import trainable_parameters

Listener = Callable[[nn.Module, dict[str, float]], None]


class OptimizerSteps:
    """Calls a method before steps of the optimizer that trains a model, in any training loop.

    It is called with the model and the rates of ``step_rates`` by parameter name, before the first step and before
    each step for which the learning rates have changed.

    Args:
        listener: a bound method, held weakly: the hook goes with its object.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.WeakMethod(listener)
        self._model: weakref.ref[nn.Module] | None = None
        self._known_groups: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
        handle = register_optimizer_step_pre_hook(self._before)
        weakref.finalize(listener.__self__, handle.remove)  # type: ignore[attr-defined]

    def follow(self, model: nn.Module, restart: bool = False) -> None:
        """Listen to optimizers of this model; ``restart`` calls the listener before the next step in any case."""
        if restart or self._model is None or self._model() is not model:
            self._model = weakref.ref(model)
            self._known_groups.clear()

    def restart(self) -> None:
        """Call the listener before the next step in any case."""
        self._known_groups.clear()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listener = self._listener()
        model = None if self._model is None else self._model()
        if listener is None or model is None:
            return
        groups = [(float(g["lr"]), len(g["params"])) for g in optimizer.param_groups]
        if self._known_groups.get(optimizer) == groups:
            return
        self._known_groups[optimizer] = groups

        names_by_id = {id(p): name for name, p in trainable_parameters(model).items()}
        if any(id(p) in names_by_id for group in optimizer.param_groups for p in group["params"]):
            rates_by_id = step_rates(optimizer)
            rates = {names_by_id[i]: rate for i, rate in rates_by_id.items() if i in names_by_id}
            listener(model, rates)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied or saved method registers its own


def step_rates(optimizer: Optimizer) -> dict[int, float]:
    """Return the learning rates of parameters whose steps are proportional to their gradients, by their ids.

    These are the parameters of gradient descent, with or without momentum. Optimizers that divide a gradient by its
    size, such as Adam, move by about their learning rate whatever the gradient is, and no penalty makes them diverge:
    the result is empty.

    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> step_rates(torch.optim.SGD([p], lr=0.1))[id(p)]
    0.1
    >>> step_rates(torch.optim.Adam([p]))
    {}
    """
    if not isinstance(optimizer, (torch.optim.SGD, torch.optim.ASGD)):
        return {}
    return {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
