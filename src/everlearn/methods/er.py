"""Experience replay: learn from some old examples beside the new ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from everlearn.replay import Replay, loss_on
from everlearn.stream import Batch


@dataclass(eq=False)
class ER(Replay):
    """Experience replay (Chaudhry et al., 2019; Riemer et al., ICLR 2019): one loss over current and remembered examples.

        L = (B · L_task + B′ · L_memory) / (B + B′)

    B examples are new and B′ come from the memory; both losses are means (over tokens that count, where there are tokens). The remembered ones go through the model in a pass
    of their own, so that BatchNorm sees pure batches, first the new and then the old; in the papers' code both are one batch.
    Without BatchNorm it is the same.

    Args:
        capacity: how many examples are kept.
        size: B′; by default B.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._drawn: Batch | None = None

    def task_loss(self, batch: Batch, out: Tensor) -> Tensor:
        """The new examples' share."""
        drawn = self.draw(batch)
        self._drawn = None if drawn is None else drawn[0]
        loss = batch.loss(out)
        return loss if self._drawn is None else loss * (batch.weight / (batch.weight + self._drawn.weight))

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """The remembered examples' share, of those drawn for ``task_loss``."""
        replayed, self._drawn = self._drawn, None
        if batch is None or replayed is None or not replayed.weight:
            return 0.0
        return loss_on(model, replayed) * (replayed.weight / (batch.weight + replayed.weight))
