"""ER-ACE: experience replay that does not push old classes down while new ones come in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.likelihood import Categorical
from everlearn.core.traits import Traits
from everlearn.methods.replay.base import Replay, loss_on
from everlearn.runtime import distributed


@dataclass(eq=False)
class ERACE(Replay):
    """Experience replay with asymmetric cross-entropy (Caccia et al., ICLR 2022).

        L = CE over the classes of the current batch alone + CE over all allowed classes on the memory

    New classes arrive without a sudden push on the old ones; the balance between them is learned from the memory only. A
    strong, simple baseline for class-incremental online streams.

    Args:
        capacity: how many examples are kept.
        size: how many are replayed at a step; by default as many as the current batch has.
    """

    traits = Traits(
        family="replay",
        pro="as ER, and new classes do not push old ones down",
        con="learns the few examples it keeps by heart",
        step=2.1,
        keeps_examples=True,
        without_boundaries={},
    )

    def task_loss(self, batch: Batch, out: Tensor) -> Tensor:
        """Cross-entropy over the classes that are in the batch."""
        if not isinstance(batch.likelihood, Categorical):
            raise TypeError(f"ER-ACE is about classes; {batch.likelihood} has none: use ER.")
        present = torch.zeros(1, out.shape[-1], dtype=torch.bool, device=out.device)
        y = batch.likelihood.labels(batch.labels()).flatten()
        present[0, y[y != -100]] = True
        if distributed.world_size() > 1:  # the batch is that of all processes
            distributed.all_reduce_([together := present.float()])
            present = together > 0
        one_task = torch.zeros(len(batch), dtype=torch.long, device=out.device)
        return replace(batch, allowed=present, t=one_task).loss(out)

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """Cross-entropy over all allowed classes on remembered examples."""
        if batch is None or (drawn := self.draw(batch)) is None:
            return 0.0
        return loss_on(model, drawn[0])
