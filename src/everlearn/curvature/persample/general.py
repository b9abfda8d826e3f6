"""Per-example gradients the general way: ``vmap(grad)``, or an example at a time where that is refused."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from everlearn.curvature.persample.statistics import Statistic
from everlearn.forward import ask
from everlearn.params import Params

log = logging.getLogger("everlearn")


def add_in_general(model: nn.Module, parameters: Params, x: Any, column: Tensor, statistic: Statistic) -> None:
    """``vmap(grad)`` over a bounded number of examples at a time, for these parameters only."""
    some = {name: p.detach() for name, p in parameters.items()}

    def one(parameters: Params, xi: Any, s: Tensor) -> Tensor:
        out = ask(model, tree_map(lambda v: v[None], xi), parameters)
        return (out[0] * s).sum()

    size = max(1, 2**24 // max(1, sum(p.numel() for p in some.values())))
    for i in range(0, len(column), size):
        part, s = rows(x, slice(i, i + size)), column[i : i + size]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # it is still faster than a loop
                gradients = vmap(grad(one), (None, 0, 0))(some, part, s)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as refusal:
            log.info("vmap refuses %s (%s): an example at a time for it", ", ".join(some), str(refusal)[:100])
            for k in range(len(s)):
                add_one(model, some, rows(part, [k]), s[k : k + 1], statistic)
        else:
            for name, g in gradients.items():
                statistic.add(name, g.clone(memory_format=torch.contiguous_format))  # may be shared or expanded


def add_one(model: nn.Module, parameters: Params, x: Any, s: Tensor, statistic: Statistic) -> set[str]:
    """The ordinary gradient of a single example; returns the parameters it depends on."""
    some = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad():
        out = ask(model, x, some)
    found = torch.autograd.grad(out, list(some.values()), s, allow_unused=True)
    for (name, p), g in zip(some.items(), found, strict=True):
        dense = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g.clone()  # an LSTM shares
        statistic.add(name, dense[None])
    return {name for name, g in zip(some, found, strict=True) if g is not None}


def length(x: Any) -> int:
    """How many examples there are."""
    return len(tree_leaves(x)[0])


def rows(x: Any, index: Any) -> Any:
    """Some of the examples."""
    return tree_map(lambda v: v[index], x)
