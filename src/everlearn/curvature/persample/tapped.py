"""A forward pass whose operations were tapped, and its backward passes, which hand every parameter's uses to a statistic."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everlearn.curvature.persample.operations import Layout, Operation
from everlearn.curvature.persample.statistics import Statistic, Use


class Plan(NamedTuple):
    """What the probe found.

    Args:
        operations: every operation's kind, names, layout and rows per example, in order.
        uses: how often each parameter is used.
        general: the parameters that must go the general way.
        pairs: the weights with Kronecker factors, and the bias (or None) that goes with each.
        shapes: of one example's inputs.
        held: bytes of the inputs and outputs of all operations, for one example.
        picks: how often something was picked from an axis, other than by slices.
        steady: whether two examples meet the layers together as each does alone.
    """

    operations: list[tuple[type[Operation], dict[str, str], Layout, int]]
    uses: Counter[str]
    general: set[str]
    pairs: dict[str, str | None]
    shapes: list[torch.Size]
    held: int = 0
    picks: int = 0
    steady: bool = True

    @property
    def shared(self) -> set[str]:
        """The parameters that are looked up once for all examples, and go the fast way."""
        found = {name for _, names, layout, _ in self.operations if layout.shared for name in names.values()}
        return found - self.general

    def without_shared(self) -> Plan:
        """The same with these going the general way; no Kronecker factors are theirs."""
        return self._replace(general=self.general | self.shared)


class Tapped(NamedTuple):
    """A forward pass with its taps.

    Args:
        root: what backward passes run towards.
        outputs: of the model, after what layers hand to others where that is asked for.
        statistic: what receives the uses.
        plan: that it followed.
        waiting: uses of parameters of which more are to come.
        layers: what an example met of linear and convolutional layers.
        reads: calls that made numbers of Python of the data.
    """

    root: Tensor
    outputs: list[Tensor]
    statistic: Statistic
    plan: Plan
    waiting: defaultdict[str, list[Use]]
    layers: list[Any]
    reads: list[str]

    def listen(self, y: Tensor, operation: Operation, examples: int) -> Tensor:
        """Have the gradient of y handed to the statistic in every backward pass."""
        y = y if y.requires_grad else _Enter.apply(y, self.root)  # type: ignore[no-untyped-call]
        y.register_hook(lambda d: self._arrive(operation, d, examples))
        return y

    def _arrive(self, operation: Operation, d: Tensor, examples: int) -> None:
        pieces = operation.pieces(d.detach(), examples)
        for role, name in operation.names.items():
            if name not in self.plan.general:
                self.waiting[name].append(Use(operation, role, pieces))
                if len(self.waiting[name]) == self.plan.uses[name]:
                    self.statistic.arrive(name, self.waiting.pop(name))

    def backward(self, columns: list[Tensor], last: bool) -> None:
        """One backward pass from the outputs."""
        torch.autograd.grad(self.outputs, self.root, columns, retain_graph=not last, allow_unused=True)
        while self.waiting:  # parameters one of whose uses the outputs do not depend on
            self.statistic.arrive(*self.waiting.popitem())
        if last:  # the graph holds the hooks, the hooks hold this: without cutting the circle all would stay in memory
            self.outputs.clear()


class _Enter(torch.autograd.Function):
    """Let a graph begin at y although nothing before it is differentiated."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, root: Tensor) -> Tensor:
        ctx.mark_dirty(y)  # the same tensor, which a following in-place operation may change as before
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[None, None]:
        return None, None
