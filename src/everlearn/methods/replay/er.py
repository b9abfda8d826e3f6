"""Experience replay: train on stored examples together with new ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.traits import Traits
from everlearn.methods.replay.base import Replay, forward_both, memory_share


@dataclass(eq=False)
class ER(Replay):
    """Experience replay (Chaudhry et al., 2019; Riemer et al., ICLR 2019): train on stored examples too.

        L = (B · L_task + B′ · L_memory) / (B + B′)   balance="examples"
        L = (1/t) L_task + (1 - 1/t) L_memory          balance="tasks", t the number of tasks including this one

    B examples are new and B′ come from the memory. Both losses are means, over tokens that count if labels are tokens.
    New and replayed examples pass through the model as one batch, the new ones first, as in the papers' code: BatchNorm
    normalizes them together. With ``joint=False`` they pass separately, for loops that compute the outputs of the new
    ones themselves.

    Args:
        capacity: number of stored examples.
        size: B′; by default B.
        balance: whether every example has the same weight, or every task. With "tasks" only examples of earlier tasks
            are replayed (van de Ven et al., 2022).
        joint: whether new and replayed examples pass through the model as one batch.
    """

    traits = Traits(
        family="replay",
        pro="simple, works in all three scenarios, with or without task boundaries",
        con="overfits the few stored examples",
        step=2.0,
        copies=(0.0,),
        keeps_examples=True,
        without_boundaries={},
    )

    balance: Literal["examples", "tasks"] = field(default="examples", kw_only=True)
    joint: bool = field(default=True, kw_only=True)

    def task_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the weighted mean of L_task and L_memory."""
        self._check_later_statistics(model)
        earlier_rows = None
        if self.balance == "tasks":
            earlier_rows = self.earlier_task_rows(batch)
        drawn = self.draw(batch, earlier_rows)
        if drawn is None:
            return super().task_loss(model, batch)

        replayed, _ = drawn
        outputs, memory_outputs = forward_both(model, batch, replayed.x, self.joint)
        if earlier_rows is None:
            share = memory_share(batch, replayed)
        else:
            num_earlier = len(self.memory["t"][earlier_rows].unique())
            share = num_earlier / (num_earlier + 1)

        task_loss = batch.loss(outputs)
        memory_loss = replayed.loss(memory_outputs)
        return (1 - share) * task_loss + share * memory_loss, outputs
