"""Per-example gradients of arbitrary code: ``vmap(grad)``, or one example at a time if vmap fails."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from everlearn.core.forward import forward
from everlearn.core.parameters import Params
from everlearn.curvature.per_example.statistics import Statistic

log = logging.getLogger("everlearn")

# Elements of the per-example gradients that are formed at a time.
MAX_GRADIENT_ELEMENTS = 2**24


def add_vmap_gradients(model: nn.Module, parameters: Params, x: Any, cotangents: Tensor, statistic: Statistic) -> None:
    """Add the gradients of some parameters by ``vmap(grad)``, for a bounded number of examples at a time.

    Args:
        model: the model.
        parameters: to differentiate with respect to, by name.
        x: the inputs of the examples.
        cotangents: the vectors s; the gradients are those of s·output, example by example.
        statistic: receives the gradients.
    """
    detached = {name: p.detach() for name, p in parameters.items()}

    def compute_objective(parameters: Params, x_i: Any, s: Tensor) -> Tensor:
        outputs = forward(model, tree_map(lambda v: v[None], x_i), parameters)
        return (outputs[0] * s).sum()

    num_elements = sum(p.numel() for p in detached.values())
    block_size = max(1, MAX_GRADIENT_ELEMENTS // max(1, num_elements))
    for start in range(0, len(cotangents), block_size):
        block = select_examples(x, slice(start, start + block_size))
        s = cotangents[start : start + block_size]
        try:
            # Despite the performance warning of vmap it is faster than a loop.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                gradients = vmap(grad(compute_objective), (None, 0, 0))(detached, block, s)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            log.info("vmap fails for %s (%s): using one example at a time", ", ".join(detached), str(error)[:100])
            for k in range(len(s)):
                add_single_gradient(model, detached, select_examples(block, [k]), s[k : k + 1], statistic)
        else:
            # Copied because vmap may return tensors that are shared or expanded.
            for name, g in gradients.items():
                statistic.add(name, g.clone(memory_format=torch.contiguous_format))


def add_single_gradient(model: nn.Module, parameters: Params, x: Any, s: Tensor, statistic: Statistic) -> set[str]:
    """Add the ordinary gradient of a single example.

    Returns:
        The names of the parameters that the outputs depend on.
    """
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad():
        outputs = forward(model, x, leaves)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), s, allow_unused=True)

    for (name, leaf), g in zip(leaves.items(), gradients, strict=True):
        if g is None:
            dense = torch.zeros_like(leaf)
        elif g.is_sparse:
            dense = g.to_dense()
        else:
            dense = g.clone()  # an LSTM returns gradients that share memory
        statistic.add(name, dense[None])
    return {name for name, g in zip(leaves, gradients, strict=True) if g is not None}


def count_examples(x: Any) -> int:
    """Number of examples in the inputs."""
    return len(tree_leaves(x)[0])


def select_examples(x: Any, index: Any) -> Any:
    """Select examples from the inputs."""
    return tree_map(lambda v: v[index], x)
