"""What two examples, together and each alone, tell about where examples are and whether they mix."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from everlearn.curvature.persample.operations import Broadcast, Embedding, Expansion, Layout, Operation


def kronecker_pairs(operations: list[Operation], uses: Counter[str], general: set[str]) -> dict[str, str | None]:
    """The weights that have factors; a bias goes with its weight if it is used with it and with nothing else."""
    by_weight: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if "weight" in operation.names:
            by_weight[operation.names["weight"]].append(operation)
    pairs: dict[str, str | None] = {}
    for weight, used in by_weight.items():
        if weight not in general and len(used) == uses[weight] and all(o.factorable for o in used):
            biases = {o.names.get("bias") for o in used}
            bias = biases.pop() if len(biases) == 1 else None
            pairs[weight] = None if bias in general or bias is None or uses[bias] != len(used) else bias
    return pairs


def unlike_the_first(x: Any) -> int:
    """An example that differs from the first, if there is one: two that are alike would hide a mixing of examples."""
    differs = torch.stack([(v != v[:1]).reshape(len(v), -1).any(1).cpu() for v in tree_leaves(x)]).any(0)
    return int(differs.nonzero()[0]) if differs.any() else len(tree_leaves(x)[0]) // 2


def find_layout(joint: Operation, alone: list[Operation]) -> Layout | None:
    """Where two examples that are known apart are found again in their common tensor; None if that is not clear."""
    x, parts = joint.x, [operation.x for operation in alone]
    if isinstance(joint, Embedding) and joint.constant and x.shape == parts[0].shape == parts[1].shape:
        return Layout(0, shared=True)
    if parts[0].shape != parts[1].shape or x.dim() != parts[0].dim():
        return None
    axes = [axis for axis in range(x.dim()) if x.shape[axis] != parts[0].shape[axis]]
    if len(axes) != 1 or x.shape[axes[0]] != 2 * parts[0].shape[axes[0]]:
        return None
    rows = parts[0].shape[axes[0]]
    found = []
    for layout in (Layout(axes[0], True), Layout(axes[0], False))[: 1 if rows == 1 else 2]:
        apart = torch.stack([layout.first(part, 1)[0] for part in parts])
        if close(layout.first(x, 2), apart):
            found.append(layout)
    good = len(found) == 1 and joint.fits(found[0]) and (rows == 1 or not isinstance(joint, (Broadcast, Expansion)))
    return found[0] if good else None


def refuse_mixing(together: Tensor, first: Tensor, second: Tensor) -> None:
    """Raise if an example's output is another when it is alone."""
    if not together.isfinite().all():
        raise FloatingPointError("The model's outputs are not finite: look for NaN in the inputs and in the weights.")
    if not (close(together[:1], first) and close(together[1:], second)):
        raise ValueError(
            "The output for an example depends on the other examples in its batch, so no example has a gradient of its "
            "own: take out what mixes them (a norm over the batch, for example) or fix it in evaluation mode."
        )


def close(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Equal but for the rounding of a dtype (by default their own)."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    rounding = max(1e-3, 20 * torch.finfo(dtype or a.dtype).eps)
    return bool((a - b).abs().max() <= rounding * b.abs().max() + 1e-30) if a.numel() else True
