"""Experience replay: train on stored examples together with new ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from everlearn.core.batch import Batch
from everlearn.core.traits import Traits
from everlearn.methods.replay.base import Replay


@dataclass(eq=False)
class ER(Replay):
    """Experience replay (Chaudhry et al., 2019; Riemer et al., ICLR 2019): one loss of new and replayed examples.

        L = (B · L_task + B′ · L_memory) / (B + B′)   balance="examples"
        L = (1/t) L_task + (1 - 1/t) L_memory          balance="tasks", t the number of tasks including this one

    B examples are new and B′ come from the memory. Both losses are means, over tokens that count if labels are tokens.
    New and replayed examples pass through the model as one batch, the new ones first, as in the papers' code: BatchNorm
    normalizes them together.

    Args:
        capacity: number of stored examples.
        size: B′; by default B.
        balance: whether every example has the same weight, or every task. With "tasks" only examples of earlier tasks
            are replayed (van de Ven et al., 2022).
    """

    traits = Traits(
        family="replay",
        pro="simple, works in all three scenarios, with or without task boundaries",
        con="overfits the few stored examples",
        step=1.8,
        keeps_examples=True,
        without_boundaries={},
    )

    balance: Literal["examples", "tasks"] = field(default="examples", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._num_new = 0  # B
        self._num_tasks: int | None = None  # t, if the joint batch is balanced by tasks

    def join(self, batch: Batch) -> Batch:
        """Append replayed examples to the batch."""
        self._num_new = len(batch)
        self._num_tasks = None

        earlier_rows = None
        if self.balance == "tasks":
            earlier_rows = self.earlier_task_rows(batch)
        drawn = self.draw(batch, earlier_rows)
        if drawn is None:
            return batch

        if earlier_rows is not None:
            earlier_ids = self.memory["t"][earlier_rows].unique()
            self._num_tasks = len(earlier_ids) + 1
        replayed, _ = drawn
        return batch + replayed

    def task_loss(self, batch: Batch, out: Tensor) -> Tensor:
        """Compute the loss of the joint batch."""
        # A mean over all B + B′ examples weights every example equally.
        if self._num_tasks is None:
            return batch.loss(out)

        b = self._num_new
        t = self._num_tasks
        self._num_tasks = None
        memory_weight = (t - 1) / t
        task_loss = batch[:b].loss(out[:b])
        memory_loss = batch[b:].loss(out[b:])
        return (1 - memory_weight) * task_loss + memory_weight * memory_loss
