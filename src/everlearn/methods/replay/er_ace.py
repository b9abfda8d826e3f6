"""ER-ACE: experience replay in which new classes do not lower the logits of old ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.likelihood import Categorical
from everlearn.core.traits import Traits
from everlearn.methods.replay.base import Replay, replay_loss


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

    replaces_loss = True

    def task_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the cross-entropy over the classes of the current batch."""
        if not isinstance(batch.likelihood, Categorical):
            raise TypeError(f"ER-ACE needs classes; {batch.likelihood} has none: use ER.")
        self._check_later_statistics(model)
        outputs = batch.forward(model)
        masked_batch = batch.restrict(batch.mark_classes(outputs.shape[-1]))
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
