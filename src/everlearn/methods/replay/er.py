"""Experience replay: learn from some old examples beside the new ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from everlearn.core.batch import Batch
from everlearn.core.traits import Traits
from everlearn.methods.replay.base import Replay


@dataclass(eq=False)
class ER(Replay):
    """Experience replay (Chaudhry et al., 2019; Riemer et al., ICLR 2019): one loss over current and remembered examples.

        L = (B · L_task + B′ · L_memory) / (B + B′)   balance="examples"
        L = (1/t) L_task + (1 - 1/t) L_memory          balance="tasks", t the number of tasks, this one included

    B examples are new and B′ come from the memory; both losses are means (over tokens that count, where there are tokens).
    Both go through the model as one batch, the new ones first, as in the papers' code: BatchNorm sees them mixed.

    Args:
        capacity: how many examples are kept.
        size: B′; by default B.
        balance: whether every example counts alike, or every task does, and then only examples of earlier tasks are replayed
            (van de Ven et al., 2022).
    """

    traits = Traits(
        family="replay",
        pro="simple, and works in all three scenarios, with boundaries or without",
        con="learns the few examples it keeps by heart",
        step=1.8,
        keeps_examples=True,
        without_boundaries={},
    )

    balance: Literal["examples", "tasks"] = field(default="examples", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._share: tuple[int, float] | None = None  # B, and the memory's share of the loss

    def join(self, batch: Batch) -> Batch:
        """New and remembered examples."""
        earlier = self.earlier(batch) if self.balance == "tasks" else None
        drawn, self._share = self.draw(batch, earlier), None
        if drawn is None:
            return batch
        if earlier is not None:
            before = len(self.memory["t"][earlier].unique())
            self._share = len(batch), before / (1 + before)
        return batch + drawn[0]

    def task_loss(self, batch: Batch, out: Tensor) -> Tensor:
        """One loss over all."""
        if self._share is None:
            return batch.loss(out)
        (n, share), self._share = self._share, None
        return (1 - share) * batch[:n].loss(out[:n]) + share * batch[n:].loss(out[n:])
