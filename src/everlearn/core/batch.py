"""A batch of examples with its scenario mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from everlearn.core.data_source import Inputs, row_count, unlisted
from everlearn.core.forward import forward
from everlearn.core.likelihood import Categorical, Likelihood
from everlearn.core.parameters import grown
from everlearn.runtime import distributed

Transform = Callable[[Inputs], Inputs]

# Integer types that torch's losses do not accept as class labels.
NARROW_INTEGERS = (torch.int32, torch.int16, torch.int8)


@dataclass(slots=True)
class Batch:
    """Examples of a task, with the classes that the scenario currently allows for them.

    Args:
        x: inputs.
        y: labels, or None if there are none.
        t: task index of each example.
        allowed: scenario mask (tasks × classes): whether an example of task t may be assigned class c. None allows all.
        likelihood: the distribution that the model's outputs parameterize.
        epoch: pass over the task's data that this batch belongs to, for progress bars and messages.
        raw: inputs before augmentation, if there is any.
        transform: the augmentation, for examples that are replayed.
        outputs: the model's outputs for x, if a training loop has computed them already.
        loop_loss: the training loop's own loss of these outputs, if it replaces that of the likelihood.
    """

    x: Inputs
    y: Tensor | None = None
    t: Tensor | None = None
    allowed: Tensor | None = None
    likelihood: Likelihood = field(default_factory=Categorical)
    epoch: int = 0
    raw: Inputs | None = None
    transform: Transform | None = None
    outputs: Tensor | None = field(default=None, repr=False)
    loop_loss: Tensor | None = field(default=None, repr=False)

    # The inputs and labels after a move to another device, and the batch before it.
    _moved: tuple[Inputs, Tensor | None, Batch] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tensor):
            self.x = unlisted(self.x)
        if self.y is not None and (not isinstance(self.y, Tensor) or self.y.dtype in NARROW_INTEGERS):
            self.y = self.likelihood.labels(unlisted(self.y))

    def __len__(self) -> int:
        if isinstance(self.x, Tensor):
            return len(self.x)
        return row_count(self.x)

    @property
    def original(self) -> Inputs:
        """Inputs before augmentation."""
        if self.raw is None:
            return self.x
        return self.raw

    @property
    def allowed_rows(self) -> Tensor | None:
        """Scenario mask with a row per example (examples × classes), or None if all classes are allowed."""
        if self.allowed is None or self.t is None:
            return None
        return self.allowed[self.t]

    def forward(self, model: nn.Module) -> Tensor:
        """Outputs of the model for this batch; those of the training loop if it has computed them."""
        if self.outputs is not None:
            return self.outputs
        return forward(model, self.x)

    def loss(self, outputs: Tensor) -> Tensor:
        """Mean loss of the model's outputs for this batch; that of the training loop if it has its own."""
        if self.loop_loss is not None and (self.outputs is None or outputs is self.outputs):
            return self.loop_loss
        return self.likelihood.loss(outputs, self.labels(), self.allowed_rows)

    def score(self, outputs: Tensor) -> Tensor:
        """Score of each example's output; for classes 1 if correct, else 0."""
        return self.likelihood.score(outputs, self.labels(), self.allowed_rows)

    def mark_classes(self, num_outputs: int) -> Tensor:
        """Return whether each output is a class of the batch, in any process; ignored labels are none."""
        labels = self.likelihood.labels(self.labels()).flatten()

        # Labels that are ignored, or out of range, mark an entry after the last class, which is cut off.
        is_class = (labels >= 0) & (labels < num_outputs)
        is_present = torch.zeros(num_outputs + 1, dtype=torch.bool, device=labels.device)
        is_present.scatter_(0, torch.where(is_class, labels, num_outputs), True)
        is_present = is_present[:num_outputs]
        if distributed.world_size() == 1:
            return is_present
        num_processes = is_present.float()
        distributed.all_reduce_([num_processes])
        return num_processes > 0

    def restrict(self, allowed: Tensor) -> Batch:
        """Return the batch with a mask that allows no other classes than these; a training loop's own loss is dropped.

        Args:
            allowed: whether each output is allowed.
        """
        if self.allowed is None or self.t is None:
            rows = torch.zeros(len(self), dtype=torch.long, device=allowed.device)
            return replace(self, allowed=allowed[None], t=rows, loop_loss=None)
        num_classes = self.allowed.shape[1]
        allowed = grown(allowed, [max(num_classes, len(allowed))])
        return replace(self, allowed=self.allowed & allowed[:num_classes], loop_loss=None)

    def like(self, x: Inputs, y: Tensor | None, t: Tensor | None) -> Batch:
        """Create a batch of other examples under the same scenario mask, likelihood and transform."""
        return replace(self, x=x, y=y, t=t, raw=None, outputs=None, loop_loss=None)

    def __add__(self, other: Batch) -> Batch:
        """Concatenate two batches; mask, likelihood and transform are those of the first."""
        if (self.y is None, self.t is None) != (other.y is None, other.t is None):
            raise ValueError(
                "Batches can be concatenated if both or neither have labels, and both or neither have task indices."
            )

        x = concatenate_inputs(self.x, other.x)
        y = None
        if self.y is not None and other.y is not None:
            y = torch.cat([self.y, other.y])
        t = None
        if self.t is not None and other.t is not None:
            t = torch.cat([self.t, other.t])
        return self.like(x, y, t)

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to another device."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            return value

        moved = replace(
            self,
            x=tree_map(move, self.x),
            y=move(self.y),
            t=move(self.t),
            allowed=move(self.allowed),
            raw=tree_map(move, self.raw),
        )

        if moved.x is not self.x and moved.y is not self.y:
            moved._moved = moved.x, moved.y, self
        return moved

    @property
    def host(self) -> Batch:
        """This batch before it was moved to another device, to read values of it without waiting for that device.

        A batch that was not moved is returned itself.
        """
        if self._moved is None:
            return self
        x, y, host = self._moved
        return host if x is self.x and y is self.y else self

    def chunk(self, parts: int) -> list[Batch]:
        """Split the batch into micro-batches of nearly equal size."""
        chunks = [rows for rows in torch.arange(len(self)).tensor_split(parts) if len(rows)]
        return [self[int(rows[0]) : int(rows[-1]) + 1] for rows in chunks]

    def __getitem__(self, rows: slice | Tensor) -> Batch:
        def select(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[rows]
            return value

        selected = replace(
            self,
            x=tree_map(select, self.x),
            y=select(self.y),
            t=select(self.t),
            raw=tree_map(select, self.raw),
            outputs=None,
            loop_loss=None,
            _moved=None,
        )
        if isinstance(rows, slice) and self.host is not self:
            selected._moved = selected.x, selected.y, self.host[rows]
        return selected

    @property
    def weight(self) -> float:
        """Number of labels that the loss averages over."""
        if self.y is None or self.host.y is None:
            return float(len(self))
        return float(self.likelihood.weight(self.host.y))

    def num_labels(self) -> Tensor | int:
        """Number of labels that the loss averages over, without a synchronization with the device."""
        counted = self.likelihood.counted(self.y)
        if counted is None:
            return len(self)
        return counted.sum()

    def labeled_rows(self) -> Tensor | None:
        """Mask of the examples with a label that is not ignored; None if all have one."""
        if self.host is not self:
            rows = self.host.labeled_rows()
            return None if rows is None or self.y is None else rows.to(self.y.device, non_blocking=True)

        # Nearly always no label is ignored.
        counted = self.likelihood.counted(self.y)
        if counted is None or counted.all():
            return None

        rows = counted.flatten(1).any(1)
        if rows.all():
            return None
        return rows

    def labels(self) -> Tensor:
        """Labels of the batch; raises ValueError if there are none."""
        if self.y is None:
            raise ValueError("This batch has no labels: a loss needs them; give pairs (x, y).")
        return self.y


def concatenate_inputs(first: Inputs, second: Inputs) -> Inputs:
    """Concatenate the inputs of two batches."""
    try:
        return tree_map(_concatenate, first, second)
    except RuntimeError as error:
        raise ValueError(
            f"These examples cannot be concatenated into one batch: {error}. Give all inputs the same shape; "
            "pad sentences to the same length."
        ) from None


def _concatenate(*values: Any) -> Any:
    """Concatenate tensors; of anything else, such as options among the inputs, keep the first."""
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return values[0]
