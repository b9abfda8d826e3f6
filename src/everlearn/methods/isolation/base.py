"""What PackNet, HAT and PNN share: a sub-network for every task, and the choice among them when the model is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from everlearn.core.data_source import row_count, unlisted
from everlearn.core.forward import forward
from everlearn.core.likelihood import Categorical
from everlearn.core.method import Method
from everlearn.core.parameters import Params, all_parameters, evaluating, unwrap
from everlearn.surgery.freezing import Checksum, FrozenEntries, compute_checksums, find_changed
from everlearn.surgery.heads import output_layer


@dataclass(eq=False)
class Isolation(Method):
    """A sub-network of its own for every task: what one task has learned, no later one touches.

        f(x, k) stays what it was when task k ended, bit for bit

    Which sub-network answers is decided by the task of each example.

    Args:
        unknown: where that is not known: "confident", the sub-network that is surest of its answer (its largest probability
            over the outputs its task had), example by example, a heuristic that is often wrong; or "raise".
    """

    deployable: ClassVar[bool] = False  # the weights alone are the last task's sub-network

    unknown: Literal["confident", "raise"] = field(default="confident", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tasks: list[int] = []  # their numbers, in the order learned; one without a number gets the next
        self.rows: list[Tensor | None] = []  # the outputs each may be answered with
        self.own: list[Params] = []  # parameters and statistics that each task has for itself
        self.checksums: list[dict[str, Checksum]] = []  # of what it shares with those before it, when it ended
        self.open: bool = False  # whether the last of them is still being learned
        self.classes: bool = True  # whether outputs are of classes, so that they tell how sure they are
        self._locks = FrozenEntries()
        self._loaded = False
        self._asked: int | None = None  # the task whose sub-network is to answer, counted from 0

    def open_task(self, task: Any) -> bool:
        """Note that a task, or another part of the last one, begins; False if it had begun, as after loading a checkpoint."""
        number, allowed = getattr(task, "id", None), getattr(task, "allowed", None)
        new = self.is_new(task)
        if self.open and not new:
            return False
        if new:
            if number in self.tasks:
                raise ValueError(f"Task {number} was learned before, and its sub-network is closed: give it a new id.")
            self.tasks.append(max(self.tasks, default=-1) + 1 if number is None else number)
            self.rows.append(None)
        self.rows[-1] = None if allowed is None or number is None else allowed[number].clone()
        self.open, self.classes = True, isinstance(getattr(task, "likelihood", Categorical()), Categorical)
        return True

    def is_new(self, task: Any) -> bool:
        """Whether this is another task than the last one begun, and not a part of it."""
        number = getattr(task, "id", None)
        goes_on = self.open and self._loaded  # after loading a checkpoint; else somebody has forgotten to end it
        new = not goes_on if number is None else not self.tasks or self.tasks[-1] != number
        if new and self.open:
            raise ValueError(f"Task {self.tasks[-1]} has not ended: call end_task(model, task) before the next begins.")
        return new

    def close_task(self, model: nn.Module, own: Params) -> None:
        """Note that the task has ended, what it keeps for itself, and what the rest of its sub-network was."""
        if not self.tasks:
            raise ValueError(f"{type(self).__name__}.end_task before any begin_task(model, task).")
        count = len(self.tasks)
        self.own = [*self.own[: count - 1], own]
        self.checksums = [*self.checksums[: count - 1], compute_checksums(model, self.protected(model, count))]
        self.open = self._loaded = False

    def extra_parameters(self, model: nn.Module) -> int:
        """Those of the method, and what each earlier task has for itself."""
        return super().extra_parameters(model) + self.count_own(model)

    def count_own(self, model: nn.Module) -> int:
        """Parameters that earlier tasks have for themselves; those of the last task are in the model."""
        names = {name for name, _ in unwrap(model).named_parameters()}
        earlier = self.own[: max(0, len(self.tasks) - 1)]
        return sum(v.numel() for own in earlier for name, v in own.items() if name in names)

    def restore_locked(self, model: nn.Module) -> None:
        """Put back what earlier tasks answer with, after averaged weights were copied into the model and before the task ends."""
        self._locks.restore(model, everything=True)

    def protected(self, model: nn.Module, count: int) -> Params:
        """Masks of the entries that the first so many tasks answer with and do not keep for themselves; none may move any more."""
        return {}

    def check_between_tasks(self, model: nn.Module, task: Any) -> None:
        """Refuse to go on where something has moved what earlier tasks answer with since the last of them ended."""
        ended = len(self.tasks) - (not self.is_new(task))
        if not 0 < ended <= len(self.checksums):
            return
        moved = find_changed(model, self.protected(model, ended), self.checksums[ended - 1])
        if moved:
            raise ValueError(
                f"{', '.join(moved[:3])}{', …' * (len(moved) > 3)} moved since task {self.tasks[ended - 1]} ended, so that "
                f"{type(self).__name__} would answer differently for the tasks learned so far. Was there a late optimizer step, or were "
                "averaged or saved weights copied in? Put the weights back. To keep averages, copy them in before end_task(model, task), "
                "and then call restore_locked(model)."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a method of the same kind had learned; the next ``begin_task`` puts it to work."""
        super().load_state_dict(state)
        self._loaded = True

    def resume(self, model: nn.Module, task: Any) -> None:
        """FrozenEntries, gates and columns as the loaded state has them; what has begun does not begin again."""
        self.begin_task(model, task)

    @contextmanager
    def as_task(self, k: int) -> Iterator[None]:
        """Inside, hooks on the model serve the k-th task."""
        self._asked, before = k, self._asked
        try:
            yield
        finally:
            self._asked = before

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """What the sub-network of the k-th task says, counted from 0."""
        raise NotImplementedError

    def current(self, model: nn.Module, x: Any) -> Tensor:
        """What the model says as it is, for the task that is being learned or one that is not learned yet."""
        return forward(model, x)

    def place(self, number: int) -> int:
        """Where the task with this number stands in the order learned, counted from 0."""
        done = self.tasks[: len(self.own)]
        if number not in done:
            raise ValueError(f"Task {number} has not been learned; there are: {', '.join(map(str, done)) or 'none'}.")
        return done.index(number)

    def predict(self, model: nn.Module, x: Any, task: Any = None) -> Tensor:
        """Each example by the sub-network of its task, in evaluation mode; a task not learned yet by the model as it is.

        ``task`` is the number of each example's task, or one number for all.
        """
        of = None if task is None else torch.as_tensor(task)
        x = unlisted(x)
        rows = row_count(x)
        if of is not None and of.dim() and len(of) != rows:
            raise ValueError(f"Got the tasks of {len(of)} examples for {rows} examples: give one number for each.")
        with evaluating(model):
            if of is None:
                return self._surest(model, x) if self.tasks else super().predict(model, x)
            numbers = [int(n) for n in of.unique().tolist()]
            if len(numbers) < 2:
                return self._by_number(model, x, numbers[0]) if numbers else super().predict(model, x)
            parts = [(of == n).nonzero().flatten() for n in numbers]
            said = [
                self._by_number(model, tree_map(lambda v, at=at: v[at] if isinstance(v, Tensor) else v, x), n)
                for n, at in zip(numbers, parts, strict=True)
            ]
        back = torch.cat(parts).argsort()
        return torch.cat(_equally_wide(said))[back]

    def _by_number(self, model: nn.Module, x: Any, number: int) -> Tensor:
        return self._by_place(model, x, self.tasks.index(number) if number in self.tasks else len(self.tasks))

    def _by_place(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """A task that has ended by its sub-network, any other by the model as it is."""
        ended = len(self.tasks) - self.open
        return self.predict_as(model, x, k) if k < ended else self.current(model, x)

    def _surest(self, model: nn.Module, x: Any) -> Tensor:
        """Of all sub-networks, example by example the one with the largest probability for some output."""
        said = []
        for k in range(len(self.tasks)):
            out, row = self._by_place(model, x, k), self.rows[k]
            if row is not None:  # an output that its task did not have is no answer
                row = torch.nn.functional.pad(row, (0, max(0, out.shape[-1] - len(row))))[: out.shape[-1]]
                out = out.masked_fill(~row.to(out.device), -torch.inf)
            said.append(out)
        if len(said) == 1:
            return said[0]
        if self.unknown == "raise" or not self.classes or said[0].shape[-1] < 2:
            how = "" if not self.classes else ', or unknown="confident" to let the surest sub-network answer'
            raise ValueError(
                f"{type(self).__name__} must know the task of each example: predict(model, x, task), or a task-incremental "
                f"stream{how}."
            )
        sure = torch.stack([out.softmax(-1).amax(-1) for out in said])
        choice = sure.flatten(2).mean(-1).argmax(0) if sure.dim() > 2 else sure.argmax(0)
        return torch.stack(_equally_wide(said))[choice, torch.arange(len(choice), device=choice.device)]


def kept(model: nn.Module, output: str | None, rest: bool) -> Params:
    """What a task has for itself: the output layer, and with ``rest`` also biases, norms, embeddings and statistics."""
    inner, own = unwrap(model), {id(p) for p in output_layer(model, output)[1].parameters()}
    if rest:
        own |= {
            id(p)
            for module in inner.modules()
            for leaf, p in module._parameters.items()
            if not _is_weight(module, leaf, p)
        }
    parameters = {n: p for n, p in all_parameters(model).items() if id(p) in own}
    return {**parameters, **dict(inner.named_buffers())} if rest else parameters


def _is_weight(module: nn.Module, leaf: str, p: Tensor | None) -> bool:
    """Whether a parameter connects units: not a bias, a norm, a table of embeddings or places, a token, a scale."""
    if p is None or isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or sum(length > 1 for length in p.shape) < 2:
        return False
    return leaf.endswith("weight") or type(module).__module__.startswith("torch.nn")


def remembered_state(model: nn.Module, own: Params) -> Params:
    """Copies for keeping, of what is a task's own and of all statistics, which a forward pass alone can move."""
    return {n: v.detach().clone() for n, v in {**own, **dict(unwrap(model).named_buffers())}.items()}


def _equally_wide(said: list[Tensor]) -> list[Tensor]:
    """Outputs of heads that have grown between tasks; what a narrower one does not have, it does not answer."""
    width = max(out.shape[-1] for out in said)
    return [torch.nn.functional.pad(out, (0, width - out.shape[-1]), value=-torch.inf) for out in said]
