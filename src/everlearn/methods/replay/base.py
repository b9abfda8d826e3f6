"""What methods that replay share: a memory that fills while training goes on, and batches drawn from it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from everlearn.core.batch import Batch, Transform
from everlearn.core.forward import forward
from everlearn.core.hyperparameters import Range
from everlearn.core.method import Method
from everlearn.core.parameters import accumulate_dtype, refuse_sharded
from everlearn.memory import Memory
from everlearn.runtime import distributed
from everlearn.runtime.randomness import derive, seeded

Rows = dict[str, Any]


@dataclass(eq=False)
class Replay(Method):
    """A bounded memory of examples; the base of methods that see some of them again.

    Every presentation of an example is offered to the memory, in every epoch, as in the authors' code: what is kept of it, such
    as the outputs of DER, is as recent as training, and one example may be kept twice. It is kept as it is before augmentation,
    after the replay of its own step has been drawn. Drawn ones are augmented anew, as their own task augments. Examples none of
    whose labels counts are left out. Where a batch is cut into micro-batches, each replays for itself.

    Args:
        capacity: how many examples are kept.
        size: how many are replayed at a step; by default as many as the current batch has.
        policy: which are kept: "reservoir" (all presentations with equal probability), "balanced" (equal shares for all classes)
            or "ring" (equal shares for all tasks, of each the last).
    """

    capacity: Annotated[int, Range(1)] = 500
    size: Annotated[int, Range(1)] | None = None
    policy: Literal["reservoir", "balanced", "ring"] = field(default="reservoir", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memory = self.make_memory()
        self.drawn = 0
        self.tasks = 0
        self.offered = 0  # presentations, when the last task ended
        self._transforms: dict[int, Transform | None] = {}
        self._now: Batch | None = None  # the current batch, for methods that replay after the backward pass
        self._edited = False  # whether before_step was called, where it does something

    def make_memory(self) -> Memory:
        """An empty memory: of several processes each keeps, and draws from, its share of what all see."""
        return Memory(-(-self.capacity // distributed.world_size()), self.policy, seed=distributed.rank())

    def observe(self, batch: Batch, out: Tensor) -> None:
        """Offer the examples to the memory."""
        self._now = batch
        if batch.t is not None and (batch.transform is not None or self._transforms):
            self._transforms |= dict.fromkeys(batch.t.unique().tolist(), batch.transform)
        if distributed.world_size() > 1 and not self.memory.seen:
            self.memory = self.make_memory()  # it may have been made before there were several
        rows = batch.labeled_rows()
        if rows is None:
            self.memory.add(**self.row_fields(batch, out))
        elif rows.any():
            self.memory.add(**self.row_fields(batch[rows], out[rows]))

    def after_step(self, model: nn.Module) -> None:
        """Look at running statistics, in a loop that does not take the method's loss."""
        self._after_forward(model)

    def _after_forward(self, model: nn.Module) -> None:
        """Check once whether the layers' running statistics follow a later task."""
        if self.tasks:
            self._check_statistics(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Tasks without a number are counted."""
        if not self.memory.seen:
            raise ValueError(
                f"{type(self).__name__} has seen no example, so it remembers nothing: take the loss of your loop from "
                "method.loss(model, Batch(x, y))."
            )
        forgotten = type(self).before_step is not Method.before_step and not self._edited
        if forgotten and self._now is not None and (old := self.earlier(self._now)) is not None and old.any():
            raise ValueError(
                f"{type(self).__name__}.before_step was not called: it edits gradients, between backward() and step()."
            )
        if self.memory.seen == self.offered:
            warnings.warn(
                f"{type(self).__name__} has seen no example since the last task ended: it neither replayed nor remembered in this one. "
                "Take the loss of your loop from method.loss(model, Batch(x, y)).",
                UserWarning,
                stacklevel=2,
            )
        self.tasks, self._now, self._edited = self.tasks + 1, None, False
        self.offered = self.memory.seen

    def load_state_dict(self, state: Rows) -> None:
        """Take over a memory, of several processes each its share."""
        if distributed.world_size() > 1 and not self.memory.seen:
            self.memory = self.make_memory()
        super().load_state_dict(state)

    def row_fields(self, batch: Batch, out: Tensor) -> Rows:
        """What is kept of a batch."""
        t = torch.full((len(batch),), -1 - self.tasks) if batch.t is None else batch.t  # as no stream numbers its tasks
        x = batch.original
        if not isinstance(x, Tensor):  # options among named inputs are the call's, not an example's
            x = tree_map(lambda v: v if isinstance(v, Tensor) else None, x)
        return {"x": x, "y": batch.labels(), "t": t}

    def draw(self, batch: Batch, where: Tensor | None = None) -> tuple[Batch, Rows] | None:
        """Some of the memory as a batch seen at this moment of the stream, and its other columns; None while it is empty."""
        rows = self.memory.sample(self.size or len(batch), where)
        return self.as_batch(batch, rows) if rows else None

    def earlier(self, batch: Batch) -> Tensor | None:
        """Which rows of the memory are of other tasks than this batch."""
        if not len(self.memory):
            return None
        t: Tensor = self.memory["t"]
        current = torch.tensor([-1 - self.tasks]) if batch.t is None else batch.t.unique()
        return ~torch.isin(t, current.to(t.device))

    def as_batch(self, batch: Batch, rows: Rows) -> tuple[Batch, Rows]:
        """Rows of the memory as a batch like this one."""
        device, self.drawn, x = batch.labels().device, self.drawn + 1, rows["x"]
        if not isinstance(x, Tensor) and any(v is None for v in tree_leaves(x)):
            x = rows["x"] = tree_map(lambda kept, now: now if kept is None else kept, x, batch.original)
        if batch.transform is not None or self._transforms:
            with seeded(derive(self.memory.seed, "replay", self.drawn)):  # must not shift the model's random numbers
                x = self._augmented(batch, rows)
        if device != rows["y"].device:
            x, rows = tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, (x, rows))
        return batch.like(x, rows["y"], None if batch.t is None else rows["t"]), rows

    def _augmented(self, batch: Batch, rows: Rows) -> Any:
        """Each row as its own task augments; tasks not met in this process as the current one."""
        own = {k: self._transforms.get(k, batch.transform) for k in rows["t"].unique().tolist()}
        if len(set(own.values())) == 1:
            transform = next(iter(own.values()))
            return rows["x"] if transform is None else transform(rows["x"])
        x = []
        for i, k in enumerate(rows["t"].tolist()):
            one, transform = tree_map(lambda v, i=i: v[i : i + 1] if isinstance(v, Tensor) else v, rows["x"]), own[k]
            x.append(one if transform is None else transform(one))
        return tree_map(lambda *v: torch.cat(v) if isinstance(v[0], Tensor) else v[0], *x)


def loss_on(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of a replayed batch."""
    return batch.loss(forward(model, batch.x))


def gradient_on(model: nn.Module, parameters: list[nn.Parameter], batch: Batch | None) -> list[Tensor] | None:
    """The gradient of a replayed batch's loss, at least in float32, zero for parameters it does not depend on.

    Of several processes each has a batch, or none: it is that of all their labels, and None where nobody has any. Running
    statistics are put back: they belong to the current task's batches.
    """
    refuse_sharded(parameters, "The gradient of remembered examples")
    if (
        distributed.world_size() == 1
    ):  # each kept example has a label that counts, so nothing need be counted on the device
        return None if batch is None else _gradient(model, parameters, batch)
    count = 0.0 if batch is None else batch.weight
    whole = distributed.sum_across(count)
    if not whole:
        return None
    if batch is None or not count:
        found = [torch.zeros_like(p, dtype=accumulate_dtype(p)) for p in parameters]
    else:
        found = [g * (count / whole) for g in _gradient(model, parameters, batch)]
    distributed.all_reduce_(found)
    return found


def with_gradient(model: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradient an old example may turn: those that learn and have one."""
    return [p for p in model.parameters() if p.requires_grad and p.grad is not None]


def dense_gradient(p: nn.Parameter) -> Tensor:
    """A parameter's gradient, at least in float32, also where it is sparse, as that of an embedding may be."""
    if p.grad is None:
        raise ValueError("This parameter has no gradient.")
    return _dense(p.grad).to(accumulate_dtype(p))


def write_gradient(parameters: list[nn.Parameter], gradient: list[Tensor]) -> None:
    """Make this the parameters' gradient, sparse where it was, since optimizers for sparse gradients take no other."""
    for p, g in zip(parameters, gradient, strict=True):
        before = p.grad
        g = g.to(p.dtype)
        p.grad = g.to_sparse(before.sparse_dim()) if before is not None and before.is_sparse else g


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _gradient(model: nn.Module, parameters: list[nn.Parameter], batch: Batch) -> list[Tensor]:
    statistics = [(b, b.clone()) for b in model.buffers()]
    with torch.enable_grad():
        found = torch.autograd.grad(loss_on(model, batch), parameters, allow_unused=True)
    for buffer, value in statistics:
        buffer.copy_(value)
    return [
        (torch.zeros_like(p) if g is None else _dense(g)).to(accumulate_dtype(p))
        for p, g in zip(parameters, found, strict=True)
    ]
