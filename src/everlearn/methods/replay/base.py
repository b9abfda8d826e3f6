"""Replay, the base of methods that store examples in a memory and replay them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from everlearn.core.batch import Batch, Transform, concatenate_inputs
from everlearn.core.check import format_bytes
from everlearn.core.forward import forward
from everlearn.core.hyperparameters import Range
from everlearn.core.method import Method
from everlearn.core.parameters import evaluating
from everlearn.memory import Memory
from everlearn.runtime import distributed
from everlearn.runtime.randomness import derive, seeded

Rows = dict[str, Any]


@dataclass(eq=False)
class Replay(Method):
    """A bounded memory of examples: the base of methods that replay them.

    Every presentation of an example is offered to the memory, in every epoch, as in the authors' code. What is stored
    with an example, such as the outputs of DER, is therefore as recent as that presentation, and an example may be
    stored twice. Examples are stored without augmentation, after the replayed examples of their step have been drawn.
    Replayed examples are augmented again, by the transform of their own task. Examples whose labels are all ignored
    are not stored. If a batch is split into micro-batches, each draws its own examples.

    Args:
        capacity: number of stored examples.
        size: number of replayed examples per step; by default as many as the current batch has.
        policy: which examples are stored: "reservoir" (all presentations with equal probability), "balanced" (equal
            quotas for all classes) or "ring" (equal quotas for all tasks, the most recent examples of each).
    """

    capacity: Annotated[int, Range(1)] = 500
    size: Annotated[int, Range(1)] | None = None
    policy: Literal["reservoir", "balanced", "ring"] = field(default="reservoir", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = self.make_memory()
        self.num_draws = 0
        self.tasks = 0
        self.num_offered = 0  # presentations offered until the last task ended
        self._transforms: dict[int, Transform | None] = {}

        # For methods that edit gradients in before_step, which does not receive the batch.
        self._current_batch: Batch | None = None
        self._gradients_edited = False

    def make_memory(self) -> Memory:
        """Create an empty memory; with several processes each stores, and draws from, its share of the examples."""
        return Memory(divide_among_processes(self.capacity), self.policy, seed=distributed.rank())

    def observe(self, batch: Batch, outputs: Tensor) -> None:
        """Offer the examples to the memory."""
        self._current_batch = batch
        task_indices = batch.host.t
        if task_indices is not None and (batch.transform is not None or self._transforms):
            task_ids = task_indices.unique().tolist()
            self._transforms |= dict.fromkeys(task_ids, batch.transform)

        # The method may have been created before torch.distributed was initialized.
        if distributed.world_size() > 1 and not self.memory.num_seen:
            self.memory = self.make_memory()

        # Examples are stored as they were before they were moved to an accelerator, which need not be waited for.
        labeled_rows = batch.host.labeled_rows()
        if labeled_rows is None:
            self.memory.add(**self.row_fields(batch.host, outputs))
        elif labeled_rows.any():
            indices = labeled_rows.nonzero().flatten()
            device_indices = indices.to(outputs.device, non_blocking=True)
            self.memory.add(**self.row_fields(batch.host[indices], outputs[device_indices]))

    def after_step(self, model: nn.Module) -> None:
        """Check running statistics in a loop that does not use the method's loss."""
        self._check_later_statistics(model)

    def _check_later_statistics(self, model: nn.Module) -> None:
        """Check once whether running statistics follow a later task."""
        if self.tasks:
            self._check_statistics(model)

    def describe(self, model: nn.Module, batch: Batch | None = None) -> dict[str, str]:
        """Return the size of the memory."""
        facts = {"memory": f"{len(self.memory):,} of {self.capacity:,} examples, policy {self.policy}"}
        if batch is not None and len(batch):
            with torch.no_grad(), evaluating(model):
                outputs = batch.forward(model)
            tensors = [v for v in tree_leaves(self.row_fields(batch, outputs)) if isinstance(v, Tensor)]
            example_bytes = sum(v.numel() * v.element_size() for v in tensors) / len(batch)
            facts["memory"] += f", up to {format_bytes(example_bytes * self.capacity)}"
        return facts

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Count the task; raise or warn if the training loop did not call the hooks."""
        self._check_hooks_called()
        self.tasks += 1
        self.num_offered = self.memory.num_seen
        self._current_batch = None
        self._gradients_edited = False

    def _check_hooks_called(self) -> None:
        """Raise, or warn, if no example was observed or gradients were not edited in the task that ends."""
        name = type(self).__name__
        if not self.memory.num_seen:
            raise ValueError(
                f"{name} has seen no example, so its memory is empty: compute the loss in your training loop by "
                "method.loss(model, Batch(x, y))."
            )
        if self._requires_gradient_edit() and not self._gradients_edited:
            raise ValueError(f"{name}.before_step was not called: it edits gradients, between backward() and step().")
        if self.memory.num_seen == self.num_offered:
            warnings.warn(
                f"{name} has seen no example since the last task ended: in this task it neither replayed nor stored "
                "any. Compute the loss in your training loop by method.loss(model, Batch(x, y)).",
                UserWarning,
                stacklevel=3,
            )

    def _requires_gradient_edit(self) -> bool:
        """Whether the method edits gradients, and has stored examples of earlier tasks to do so."""
        if not self.changes("before_step") or self._current_batch is None:
            return False
        earlier_rows = self.earlier_task_rows(self._current_batch)
        return earlier_rows is not None and bool(earlier_rows.any())

    def load_state_dict(self, state: Rows) -> None:
        """Load the state of a method with the same settings; with several processes, each loads its share."""
        if distributed.world_size() > 1 and not self.memory.num_seen:
            self.memory = self.make_memory()
        super().load_state_dict(state)

    def row_fields(self, batch: Batch, outputs: Tensor) -> Rows:
        """Return the columns to store: inputs, labels and task ids; subclasses may add more."""
        t = batch.t
        if t is None:
            t = torch.full((len(batch),), self._unnumbered_task_id)
        x = batch.original
        if not isinstance(x, Tensor):
            # Named inputs may include options of the model, which belong to the call and not to an example.
            x = tree_map(_keep_tensor, x)
        return {"x": x, "y": batch.labels(), "t": t}

    @property
    def _unnumbered_task_id(self) -> int:
        """Id of the current task if it has no number: negative, unlike the ids of a stream's tasks."""
        return -1 - self.tasks

    def draw(self, batch: Batch, mask: Tensor | None = None) -> tuple[Batch, Rows] | None:
        """Draw examples from the memory.

        Args:
            batch: the current batch, whose scenario mask applies to the replayed examples too.
            mask: draw only among these rows of the memory.

        Returns:
            The replayed examples as a batch, and their rows in the memory; None if there are none.
        """
        rows = self.memory.sample(self.size or len(batch), mask)
        if not rows:
            return None
        return self.as_batch(batch, rows)

    def earlier_task_rows(self, batch: Batch) -> Tensor | None:
        """Mask of the memory's rows that belong to other tasks than the batch; None if the memory is empty."""
        if not len(self.memory):
            return None
        t: Tensor = self.memory["t"]
        current_ids = torch.tensor([self._unnumbered_task_id])
        task_indices = batch.host.t
        if task_indices is not None:
            current_ids = task_indices.unique()
        return ~torch.isin(t, current_ids.to(t.device))

    def as_batch(self, batch: Batch, rows: Rows) -> tuple[Batch, Rows]:
        """Convert rows of the memory to a batch like the current one; return it with the rows on its device."""
        device = batch.labels().device
        self.num_draws += 1

        x = rows["x"]
        if not isinstance(x, Tensor) and any(value is None for value in tree_leaves(x)):
            x = tree_map(_fill_missing, x, batch.original)
            rows["x"] = x
        if batch.transform is not None or self._transforms:
            # Augmentation has its own random numbers: it must not change those of the model.
            with seeded(derive(self.memory.seed, "replay", self.num_draws)):
                x = self._augment(batch, rows)

        if device != rows["y"].device:
            x, rows = tree_map(partial(_move_tensor, device), (x, rows))
        t = None if batch.t is None else rows["t"]
        return batch.like(x, rows["y"], t), rows

    def _augment(self, batch: Batch, rows: Rows) -> Any:
        """Augment each row by the transform of its task.

        The transform of a task that this process has not trained on is unknown: then the current one is used.
        """
        transforms = {k: self._transforms.get(k, batch.transform) for k in rows["t"].unique().tolist()}
        if len(set(transforms.values())) == 1:
            transform = next(iter(transforms.values()))
            return _apply_transform(transform, rows["x"])

        examples = []
        for i, k in enumerate(rows["t"].tolist()):
            example = tree_map(partial(_select_row, i), rows["x"])
            examples.append(_apply_transform(transforms[k], example))
        return tree_map(_concatenate, *examples)


def forward_both(model: nn.Module, batch: Batch, x: Any, joint: bool) -> tuple[Tensor, Tensor]:
    """Compute the outputs of the current batch and of replayed inputs.

    Args:
        model: in training mode.
        batch: the current batch, whose outputs a training loop may have computed already.
        x: replayed inputs.
        joint: in one forward pass, in which BatchNorm normalizes all examples together, or in two.
    """
    if joint and batch.outputs is None:
        outputs = forward(model, concatenate_inputs(batch.x, x))
        return outputs[: len(batch)], outputs[len(batch) :]

    batch_norms = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if joint and batch_norms:
        raise ValueError(
            f"New and replayed examples must pass BatchNorm ({batch_norms[0]}) together, but this loop has computed "
            "the outputs of the new ones already: give the method joint=False, which normalizes them separately, or "
            "take the loss from method.loss(model, Batch(x, y))."
        )
    return batch.forward(model), forward(model, x)


def memory_share(batch: Batch, replayed: Batch) -> Tensor | float:
    """Return B′ / (B + B′), the share of replayed labels: with it, two means make one mean over all labels."""
    return replayed.num_labels() / (batch.num_labels() + replayed.num_labels())


def replay_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean loss of replayed examples in a forward pass of their own."""
    return batch.loss(forward(model, batch.x))


def divide_among_processes(count: int) -> int:
    """Divide a number of examples by the number of processes, rounded up."""
    return -(-count // distributed.world_size())


def _keep_tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _fill_missing(stored: Any, current: Any) -> Any:
    return current if stored is None else stored


def _move_tensor(device: torch.device, value: Any) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def _select_row(i: int, value: Any) -> Any:
    return value[i : i + 1] if isinstance(value, Tensor) else value


def _concatenate(*values: Any) -> Any:
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return values[0]


def _apply_transform(transform: Transform | None, x: Any) -> Any:
    if transform is None:
        return x
    return transform(x)
