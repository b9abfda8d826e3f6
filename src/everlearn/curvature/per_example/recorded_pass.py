"""A recorded forward pass whose backward passes feed the uses of every parameter to a statistic."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everlearn.curvature.per_example.operations import Layout, Operation
from everlearn.curvature.per_example.statistics import Statistic, Use


class PlannedOperation(NamedTuple):
    """An operation that the probe met.

    Args:
        kind: its class.
        names: its parameter names by role.
        layout: of the examples in its input and output.
        rows_per_example: on the axis of the examples.
    """

    kind: type[Operation]
    names: dict[str, str]
    layout: Layout
    rows_per_example: int


class Plan(NamedTuple):
    """Result of the probe: how the gradients of each parameter are computed.

    Args:
        operations: that use parameters, in order.
        use_counts: number of uses of each parameter.
        fallback: parameters whose gradients are computed by ``vmap`` or one example at a time.
        kronecker_layers: the weights with Kronecker factors, and the bias (or None) of each.
        shapes: of one example's inputs.
        bytes_per_example: of the inputs and outputs of all operations.
        num_reorderings: number of indexed axes, without slices.
        is_batch_invariant: whether two examples use the layers together as each does alone.
    """

    operations: list[PlannedOperation]
    use_counts: Counter[str]
    fallback: set[str]
    kronecker_layers: dict[str, str | None]
    shapes: list[torch.Size]
    bytes_per_example: int = 0
    num_reorderings: int = 0
    is_batch_invariant: bool = True

    @property
    def shared(self) -> set[str]:
        """Parameters on the fast path that are looked up once for all examples."""
        names = {name for op in self.operations if op.layout.is_shared for name in op.names.values()}
        return names - self.fallback

    def without_shared(self) -> Plan:
        """Return the plan with the shared parameters, which have no Kronecker factors, in the fallback."""
        return self._replace(fallback=self.fallback | self.shared)


class RecordedPass(NamedTuple):
    """A forward pass with gradient hooks on the operations that use parameters.

    Args:
        root: the tensor that backward passes differentiate with respect to.
        outputs: of the model, after the inputs of inner layers if these are differentiated too.
        statistic: receives the uses.
        plan: that the pass follows.
        pending_uses: of parameters with further uses to come.
        signatures: of the linear and convolutional layers, for one example.
        data_reads: calls that converted data to Python numbers.
    """

    root: Tensor
    outputs: list[Tensor]
    statistic: Statistic
    plan: Plan
    pending_uses: defaultdict[str, list[Use]]
    signatures: list[Any]
    data_reads: list[str]

    def capture_grad(self, y: Tensor, operation: Operation, num_examples: int) -> Tensor:
        """Register a hook that passes the gradient of y to the statistic in every backward pass."""
        if not y.requires_grad:
            y = _RequireGrad.apply(y, self.root)  # type: ignore[no-untyped-call]
        y.register_hook(lambda d: self._add_grad(operation, d, num_examples))
        return y

    def _add_grad(self, operation: Operation, d: Tensor, num_examples: int) -> None:
        """Store a use; pass on all uses of a parameter when the last one has arrived."""
        tensors = operation.split_examples(d.detach(), num_examples)
        for role, name in operation.names.items():
            if name in self.plan.fallback:
                continue
            self.pending_uses[name].append(Use(operation, role, tensors))
            if len(self.pending_uses[name]) == self.plan.use_counts[name]:
                self.statistic.add_uses(name, self.pending_uses.pop(name))

    def backward(self, cotangents: list[Tensor], is_last: bool) -> None:
        """Run one backward pass from the outputs."""
        torch.autograd.grad(self.outputs, self.root, cotangents, retain_graph=not is_last, allow_unused=True)

        # Parameters with a use that the outputs do not depend on.
        while self.pending_uses:
            self.statistic.add_uses(*self.pending_uses.popitem())

        # The graph references the hooks and the hooks this object; break the cycle to free the memory.
        if is_last:
            self.outputs.clear()


class _RequireGrad(torch.autograd.Function):
    """Make y require a gradient although nothing before it does."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, root: Tensor) -> Tensor:
        ctx.mark_dirty(y)  # returns the same tensor, which a later in-place operation may change
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[None, None]:
        return None, None
