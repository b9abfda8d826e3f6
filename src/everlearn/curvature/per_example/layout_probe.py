"""Probe of the batch layout: run two examples together and separately to locate them in every operation."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from everlearn.curvature.per_example.fallback import count_examples
from everlearn.curvature.per_example.indexing import IndexedAxis, count_reorderings
from everlearn.curvature.per_example.operations import Broadcast, Embedding, Expansion, Layout, Operation
from everlearn.curvature.per_example.recorded_pass import Plan, PlannedOperation


class Record(NamedTuple):
    """What a forward pass did with the parameters.

    Args:
        operations: that use parameters, in order.
        outputs: of the model.
        unknown: parameters in calls that are not recognized as an operation.
        idle: parameters in operations on no rows at all.
        indexed_axes: axes that were indexed.
        num_bytes: of the inputs and outputs of all operations.
    """

    operations: list[Operation]
    outputs: Tensor
    unknown: set[str]
    idle: set[str]
    indexed_axes: list[IndexedAxis]
    num_bytes: int

    @property
    def signatures(self) -> list[Any]:
        """Signatures of the linear and convolutional layers, for one example."""
        return [operation.signature(len(self.outputs)) for operation in self.operations if operation.has_factors]


def make_plan(x: Any, records: list[Record]) -> Plan:
    """Make a plan, not yet verified, from two examples together and separately, or from a single example.

    Args:
        x: the inputs.
        records: of the joint pass and of the separate passes, or of one pass alone.
    """
    joint_record = records[0]
    num_examples = len(joint_record.outputs)
    fallback = set[str]().union(*(record.unknown for record in records))
    operations = []
    for joint, *separate in zip(*(record.operations for record in records), strict=True):
        layout: Layout | None = Layout(0)
        if separate:
            layout = find_layout(joint, separate)
        if layout is None:
            layout = Layout(0)
            fallback |= set(joint.names.values())
            rows_per_example = 1
        elif joint.x.dim():
            rows_per_example = joint.x.shape[layout.axis] // num_examples
        else:
            rows_per_example = 1
        operations.append(PlannedOperation(type(joint), joint.names, layout, rows_per_example))

    use_counts = Counter(name for operation in joint_record.operations for name in operation.names.values())
    use_counts.update(dict.fromkeys(joint_record.idle, 0))
    return Plan(
        operations,
        use_counts,
        fallback,
        kronecker_layers={},
        shapes=[leaf.shape[1:] for leaf in tree_leaves(x)],
        bytes_per_example=joint_record.num_bytes // num_examples,
        num_reorderings=count_reorderings(joint_record.indexed_axes),
    )


def find_kronecker_layers(
    operations: list[Operation], use_counts: Counter[str], fallback: set[str]
) -> dict[str, str | None]:
    """Find the weights that have factors; a bias belongs to a weight if it is used with it and nowhere else."""
    operations_by_weight: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if "weight" in operation.names:
            operations_by_weight[operation.names["weight"]].append(operation)

    layers: dict[str, str | None] = {}
    for weight, uses in operations_by_weight.items():
        if weight in fallback or len(uses) != use_counts[weight] or not all(use.has_factors for use in uses):
            continue
        layers[weight] = None
        biases = {use.names.get("bias") for use in uses}
        if len(biases) == 1:
            bias = biases.pop()
            if bias is not None and bias not in fallback and use_counts[bias] == len(uses):
                layers[weight] = bias
    return layers


def find_different_example(x: Any) -> int:
    """Return the index of an example that differs from the first, if any: two equal ones would hide mixing."""
    flags = [(leaf != leaf[:1]).reshape(len(leaf), -1).any(1).cpu() for leaf in tree_leaves(x)]
    differs = torch.stack(flags).any(0)
    if differs.any():
        return int(differs.nonzero()[0])
    return count_examples(x) // 2


def choose_verification_examples(
    num_examples: int, different: int, forbidden_counts: set[int] | frozenset[int] = frozenset()
) -> list[int]:
    """Choose examples to verify a plan with, including the first and the different one; empty if there are too few.

    Three if possible, because an order that leaves two in place may move the third. Their number must differ from every
    size of what the examples share: a model that inspects such a size could not tell it from the number of examples.

    Args:
        num_examples: available.
        different: index of an example that differs from the first.
        forbidden_counts: sizes that the number of examples must differ from.
    """
    candidates = [0, different, *(i for i in range(1, num_examples) if i != different)]
    for count in (3, 4, 5, 2, 1):
        if min(num_examples, 2) <= count <= num_examples and count not in forbidden_counts:
            return candidates[:count]
    return []


def find_layout(joint: Operation, separate: list[Operation]) -> Layout | None:
    """Find the layout of two examples in their joint tensor, given each alone; None if it is ambiguous."""
    x = joint.x
    parts = [operation.x for operation in separate]
    if isinstance(joint, Embedding) and joint.is_constant and all(torch.equal(x, part) for part in parts):
        return Layout(0, is_shared=True)

    # The axis of the examples is the only one that is longer with two of them, and twice as long.
    if parts[0].shape != parts[1].shape or x.dim() != parts[0].dim():
        return None
    axes = [axis for axis in range(x.dim()) if x.shape[axis] != parts[0].shape[axis]]
    if len(axes) != 1 or x.shape[axes[0]] != 2 * parts[0].shape[axes[0]]:
        return None

    # With one row per example both orders are the same.
    num_rows = parts[0].shape[axes[0]]
    candidates = [Layout(axes[0], True)]
    if num_rows > 1:
        candidates.append(Layout(axes[0], False))

    matches = []
    for layout in candidates:
        stacked_parts = torch.stack([layout.move_first(part, 1)[0] for part in parts])
        if is_close(layout.move_first(x, 2), stacked_parts):
            matches.append(layout)
    if len(matches) != 1 or not joint.supports_layout(matches[0]):
        return None
    if num_rows > 1 and isinstance(joint, (Broadcast, Expansion)):
        return None
    return matches[0]


def check_outputs(outputs: Any, x: Any) -> Tensor:
    """Return the outputs; raise unless they are a tensor with a row per example."""
    if isinstance(outputs, Tensor) and outputs.dim() and len(outputs) == count_examples(x):
        return outputs
    description: Any = type(outputs).__name__
    if isinstance(outputs, Tensor):
        description = tuple(outputs.shape)
    raise TypeError(
        f"The model must return a tensor with a row per example, it returned {description}: wrap it to return the "
        "outputs alone."
    )


def refuse_mixing(joint: Tensor, first: Tensor, second: Tensor) -> None:
    """Raise if the output of an example is different when it is alone."""
    if not joint.isfinite().all():
        raise FloatingPointError("The model's outputs are not finite: look for NaN in the inputs and in the weights.")
    if not (is_close(joint[:1], first) and is_close(joint[1:], second)):
        raise ValueError(
            "The output for an example depends on the other examples in its batch, so there are no per-example "
            "gradients: remove the layer that mixes them (a norm over the batch, for example) or fix its statistics in "
            "evaluation mode."
        )


def is_close(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether two tensors are equal up to the rounding of a dtype, by default their own, at least 1e-3."""
    return _is_within(a, b, max(1e-3, _rounding(dtype or a.dtype, 20)))


def is_nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to the order of additions, as for the same calls on the same data."""
    return _is_within(a, b, rounding_tolerance(a.dtype))


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that another order of additions may make."""
    return min(1e-2, _rounding(dtype, 100))


def _rounding(dtype: torch.dtype, factor: float) -> float:
    """Return a multiple of the relative rounding error of a dtype; 0 for integers."""
    if dtype.is_floating_point or dtype.is_complex:
        return factor * torch.finfo(dtype).eps
    return 0.0


def _is_within(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether the largest difference is within a tolerance relative to the largest value."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if not a.numel():
        return True
    return bool((a - b).abs().max() <= tolerance * b.abs().max() + 1e-30)
