"""What two examples, together and each alone, tell about where examples are and whether they mix."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from everlearn.curvature.persample.general import length
from everlearn.curvature.persample.operations import Broadcast, Embedding, Expansion, Layout, Operation
from everlearn.curvature.persample.picks import Pick, count
from everlearn.curvature.persample.tapped import Plan


class Record(NamedTuple):
    """What was met in a forward pass.

    Args:
        operations: that use parameters, in order.
        out: the outputs.
        unknown: parameters in calls that are no operation.
        idle: parameters in operations on no rows at all.
        picks: the axes that something was picked from.
        held: bytes of the inputs and outputs of all operations.
    """

    operations: list[Operation]
    out: Tensor
    unknown: set[str]
    idle: set[str]
    picks: list[Pick]
    held: int

    @property
    def layers(self) -> list[Any]:
        """What an example met of linear and convolutional layers."""
        return [operation.met(len(self.out)) for operation in self.operations if operation.factorable]


def first_plan(x: Any, records: list[Record]) -> Plan:
    """What two examples together and each alone, or a single one, tell; not yet confirmed."""
    first, operations = records[0], []
    general = set[str]().union(*(record.unknown for record in records))
    for joint, *alone in zip(*(record.operations for record in records), strict=True):
        layout = find_layout(joint, alone) if alone else Layout(0)
        if layout is None:
            general |= set(joint.names.values())
        several = joint.x.shape[layout.axis] // len(first.out) if layout and joint.x.dim() else 1
        operations.append((type(joint), joint.names, layout or Layout(0), several))
    uses = Counter(name for operation in first.operations for name in operation.names.values())
    uses.update(dict.fromkeys(first.idle, 0))
    shapes = [v.shape[1:] for v in tree_leaves(x)]
    return Plan(operations, uses, general, {}, shapes, first.held // len(first.out), count(first.picks))


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


def witnesses(examples: int, other: int, sizes: set[int] | frozenset[int] = frozenset()) -> list[int]:
    """Examples to confirm a plan with, the first and the other among them; none where there are not enough.

    Three if there are as many, since an order that leaves two in place may move the third. And not as many as any size of what
    all examples share: a model that looks at this size could not tell the two numbers apart.
    """
    count = next((n for n in (3, 4, 5, 2, 1) if min(examples, 2) <= n <= examples and n not in sizes), 0)
    return [0, other, *(i for i in range(1, examples) if i != other)][:count]


def find_layout(joint: Operation, alone: list[Operation]) -> Layout | None:
    """Where two examples that are known apart are found again in their common tensor; None if that is not clear."""
    x, parts = joint.x, [operation.x for operation in alone]
    if isinstance(joint, Embedding) and joint.constant and all(torch.equal(x, part) for part in parts):
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


def checked(out: Any, x: Any) -> Tensor:
    """The outputs, if they are a row per example."""
    if not isinstance(out, Tensor) or not out.dim() or len(out) != length(x):
        kind = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise TypeError(
            f"The model must give a tensor with a row per example, it gave {kind}: wrap it to return the outputs alone."
        )
    return out


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
    return _within(a, b, _rounding(dtype or a.dtype, 20, at_least=1e-3))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order of additions, as the results of the same calls on the same data are."""
    return _within(a, b, min(1e-2, _rounding(a.dtype, 100)))


def _rounding(dtype: torch.dtype, times: float, at_least: float = 0.0) -> float:
    """So many times what a number of this dtype is rounded by; 0 for whole numbers."""
    return max(at_least, times * torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def _within(a: Tensor, b: Tensor, rounding: float) -> bool:
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= rounding * b.abs().max() + 1e-30) if a.numel() else True
