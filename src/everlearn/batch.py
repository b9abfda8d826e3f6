"""A batch: some examples, and what may be said of them at this moment of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from everlearn.data import Inputs, row_count, unlisted
from everlearn.likelihood import Categorical, Likelihood

Transform = Callable[[Inputs], Inputs]
NARROW = (torch.int32, torch.int16, torch.int8)  # which torch's losses do not take as classes


@dataclass(slots=True)
class Batch:
    """Some examples, and what may be said of them at this moment of the stream.

    Args:
        x: inputs.
        y: labels, None where there are none.
        t: the task of each example.
        allowed: which class (column) an example of which task (row) may be given; None for all.
        likelihood: what the model's outputs mean.
        epoch: the pass over the task's data that this batch belongs to, for progress bars and messages.
        raw: the inputs before augmentation, where there is any.
        transform: the augmentation, for examples that are seen again.
    """

    x: Inputs
    y: Tensor | None = None
    t: Tensor | None = None
    allowed: Tensor | None = None
    likelihood: Likelihood = field(default_factory=Categorical)
    epoch: int = 0
    raw: Inputs | None = None
    transform: Transform | None = None
    _labeled: tuple[Tensor, Tensor | None] | None = field(default=None, repr=False, compare=False)  # labels, their mask

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tensor):
            self.x = unlisted(self.x)
        if self.y is not None and (not isinstance(self.y, Tensor) or self.y.dtype in NARROW):
            self.y = self.likelihood.labels(unlisted(self.y))

    def __len__(self) -> int:
        return len(self.x) if isinstance(self.x, Tensor) else row_count(self.x)

    @property
    def original(self) -> Inputs:
        """The inputs before augmentation."""
        return self.x if self.raw is None else self.raw

    @property
    def allowed_rows(self) -> Tensor | None:
        """The allowed outputs, a row per example."""
        return None if self.allowed is None or self.t is None else self.allowed[self.t]

    def loss(self, out: Tensor) -> Tensor:
        """Mean loss of the model's outputs for this batch."""
        return self.likelihood.loss(out, self.labels(), self.allowed_rows)

    def score(self, out: Tensor) -> Tensor:
        """How good each example's output is (1 or 0 for right or wrong classes)."""
        return self.likelihood.score(out, self.labels(), self.allowed_rows)

    def like(self, x: Inputs, y: Tensor | None, t: Tensor | None) -> Batch:
        """Other examples, seen at this same moment of the stream."""
        return replace(self, x=x, y=y, t=t, raw=None)

    def __add__(self, other: Batch) -> Batch:
        """Both as one, this one's rows first; what may be said of them is said as of this one."""
        if (self.y is None, self.t is None) != (other.y is None, other.t is None):
            raise ValueError("Batches add up if both have labels or neither has, and both have tasks or neither has.")
        try:
            x = tree_map(lambda *v: torch.cat(v) if isinstance(v[0], Tensor) else v[0], self.x, other.x)
        except RuntimeError as error:
            raise ValueError(
                f"These examples do not go into one batch: {error}. Give all inputs one shape; sentences: pad all to one length."
            ) from None
        y = None if self.y is None or other.y is None else torch.cat([self.y, other.y])
        t = None if self.t is None or other.t is None else torch.cat([self.t, other.t])
        return self.like(x, y, t)

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""

        def move(v: Any) -> Any:
            return v.to(device, non_blocking=True) if isinstance(v, Tensor) else v

        x, raw = tree_map(move, self.x), tree_map(move, self.raw)
        moved = replace(self, x=x, y=move(self.y), t=move(self.t), allowed=move(self.allowed), raw=raw)
        if self.y is not None and moved.y is not None and self.y.device.type == "cpu" != moved.y.device.type:
            moved._labeled = moved.y, move(self.labeled_rows())  # here the mask costs no wait for the device
        return moved

    def chunk(self, parts: int) -> list[Batch]:
        """The batch cut into micro-batches, as even as can be."""
        cuts = [i for i in torch.arange(len(self)).tensor_split(parts) if len(i)]
        return [self[int(i[0]) : int(i[-1]) + 1] for i in cuts]

    def __getitem__(self, rows: slice | Tensor) -> Batch:
        def cut(v: Any) -> Any:
            return v[rows] if isinstance(v, Tensor) else v

        return replace(self, x=tree_map(cut, self.x), y=cut(self.y), t=cut(self.t), raw=tree_map(cut, self.raw))

    @property
    def weight(self) -> float:
        """How many labels the loss is a mean over."""
        return float(len(self) if self.y is None else self.likelihood.weight(self.y))

    def labeled_rows(self) -> Tensor | None:
        """A mask of the examples that have a label which counts; None where all have."""
        if self._labeled is not None and self._labeled[0] is self.y:
            return self._labeled[1]
        counted = self.likelihood.counted(self.y)
        if counted is None or counted.all():  # nearly always
            return None
        rows = counted.flatten(1).any(1)
        return None if rows.all() else rows

    def labels(self) -> Tensor:
        """The labels, which a loss needs."""
        if self.y is None:
            raise ValueError("This batch has no labels: a loss needs them; give pairs (x, y).")
        return self.y
