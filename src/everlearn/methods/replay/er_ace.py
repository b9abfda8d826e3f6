"""ER-ACE: experience replay in which new classes do not lower the logits of old ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.likelihood import Categorical
from everlearn.core.traits import Traits
from everlearn.methods.replay.base import Replay, replay_loss
from everlearn.runtime import distributed


@dataclass(eq=False)
class ERACE(Replay):
    """ER with asymmetric cross-entropy (Caccia et al., ICLR 2022): new classes compete only with each other.

        L = CE(current batch, over its own classes) + CE(memory, over all allowed classes)

    The loss of new classes replaces that of a loop that the method is attached to. It does not lower the logits of
    old ones; the balance between them is learned from the memory alone. A simple and strong baseline for
    class-incremental online streams.

    Args:
        capacity: number of stored examples.
        size: number of replayed examples per step; by default as many as the current batch has.
    """

    traits = Traits(
        family="replay",
        pro="as ER, and new classes do not lower the logits of old ones",
        con="overfits the few stored examples",
        step=2.1,
        copies=(0.0,),
        keeps_examples=True,
        without_boundaries={},
    )

    def task_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the cross-entropy over the classes of the current batch."""
        if not isinstance(batch.likelihood, Categorical):
            raise TypeError(f"ER-ACE needs classes; {batch.likelihood} has none: use ER.")
        self._check_later_statistics(model)
        outputs = batch.forward(model)
        y = batch.likelihood.labels(batch.labels()).flatten()

        # Ignored labels set an entry after the last class, which is cut off.
        num_outputs = outputs.shape[-1]
        is_present = torch.zeros(1, num_outputs + 1, dtype=torch.bool, device=outputs.device)
        is_present.scatter_(1, torch.where(y == -100, num_outputs, y)[None], True)
        is_present = is_present[:, :num_outputs]

        # The current batch is divided among processes: a class counts if any of them has it.
        if distributed.world_size() > 1:
            num_processes = is_present.float()
            distributed.all_reduce_([num_processes])
            is_present = num_processes > 0

        # All examples share the one row of this mask.
        mask_rows = torch.zeros(len(batch), dtype=torch.long, device=outputs.device)
        masked_batch = replace(batch, allowed=is_present, t=mask_rows, loop_loss=None)
        return masked_batch.loss(outputs), outputs

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Compute the cross-entropy of replayed examples over all allowed classes."""
        if batch is None:
            return 0.0
        drawn = self.draw(batch)
        if drawn is None:
            return 0.0
        replayed, _ = drawn
        return replay_loss(model, replayed)
