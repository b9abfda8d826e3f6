"""Base class of methods with a sub-network per task: bookkeeping of tasks, and the choice of a sub-network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from everlearn.core.check import list_names
from everlearn.core.data_source import row_count, unlisted
from everlearn.core.forward import forward
from everlearn.core.likelihood import Categorical
from everlearn.core.method import Method
from everlearn.core.parameters import Params, all_parameters, evaluating, unwrap
from everlearn.surgery.freezing import Checksum, FrozenEntries, compute_checksums, find_changed
from everlearn.surgery.functional import clone_tensors
from everlearn.surgery.heads import output_layer


@dataclass(eq=False)
class Isolation(Method):
    """Parameter isolation: a sub-network for each task, which later tasks do not change.

        f(x, k) stays the same after the end of task k, bit for bit

    The task of each example selects the sub-network.

    Args:
        unknown: how to predict if the task is unknown. "confident" uses, for each example, the sub-network with the
            largest probability over the outputs of its task, a heuristic that is often wrong; "raise" raises an error.
    """

    deployable: ClassVar[bool] = False  # the weights alone are the sub-network of the last task

    unknown: Literal["confident", "raise"] = field(default="confident", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tasks: list[int] = []  # ids in the order of training; a task without an id gets the next number
        self.allowed_outputs: list[Tensor | None] = []  # mask of each task's outputs
        self.task_params: list[Params] = []  # parameters and buffers that each ended task has for itself
        self.checksums: list[dict[str, Checksum]] = []  # of the protected entries, at the end of each task
        self.is_open: bool = False  # whether the last task is still being trained
        self.has_classes: bool = True  # whether the outputs are logits of classes, which express confidence
        self._locks = FrozenEntries(type(self).__name__)
        self._loaded = False
        self._active_task: int | None = None  # index of the task that hooks on the model compute

    def open_task(self, task: Any) -> bool:
        """Record that a task, or another part of the last one, begins.

        Returns:
            False if the task has begun already, as after loading a mid-task checkpoint.
        """
        task_id = getattr(task, "id", None)
        is_new = self.is_new(task)
        if self.is_open and not is_new:
            return False

        if is_new:
            if task_id in self.tasks:
                raise ValueError(f"Task {task_id} was learned before, and its sub-network is closed: give it a new id.")
            if task_id is None:
                self.tasks.append(max(self.tasks, default=-1) + 1)
            else:
                self.tasks.append(task_id)
            self.allowed_outputs.append(None)

        # A further part of a task may have more outputs.
        allowed = getattr(task, "allowed", None)
        if allowed is None or task_id is None:
            self.allowed_outputs[-1] = None
        else:
            self.allowed_outputs[-1] = allowed[task_id].clone()
        self.is_open = True
        self.has_classes = isinstance(getattr(task, "likelihood", Categorical()), Categorical)
        return True

    def is_new(self, task: Any) -> bool:
        """Whether the task differs from the last one begun; a further part of that one does not."""
        task_id = getattr(task, "id", None)
        if task_id is not None:
            is_new = not self.tasks or self.tasks[-1] != task_id
        else:
            # Without an id, an open task continues only after loading a checkpoint.
            is_new = not (self.is_open and self._loaded)
        if is_new and self.is_open:
            raise ValueError(f"Task {self.tasks[-1]} has not ended: call end_task(model, task) before the next begins.")
        return is_new

    def close_task(self, model: nn.Module, task_params: Params) -> None:
        """Record that the task has ended.

        Args:
            model: the trained model, of which the entries in ``protected_entries`` get checksums.
            task_params: parameters and buffers that the task has for itself, as ``copy_task_params`` returns them.
        """
        if not self.tasks:
            raise ValueError(f"{type(self).__name__}.end_task before any begin_task(model, task).")
        count = len(self.tasks)
        checksums = compute_checksums(model, self.protected_entries(model, count))

        # The end of a further part of a task replaces the record of the part before.
        self.task_params = [*self.task_params[: count - 1], task_params]
        self.checksums = [*self.checksums[: count - 1], checksums]
        self.is_open = False
        self._loaded = False

    def describe_units(self, topic: str, linked: list[str], unlinked: list[tuple[str, str]]) -> dict[str, str]:
        """Describe, for ``check``, which layers' units the method can use, and why not the others'."""
        if not linked:
            return {}
        facts = {topic: f"units of {list_names(linked)}"}
        if unlinked:
            reasons = [f"{name} ({reason})" for name, reason in unlinked]
            facts[f"no {topic}"] = list_names(reasons)
        return facts

    def extra_parameters(self, model: nn.Module) -> int:
        """Count the method's parameters and those that each earlier task has for itself."""
        return super().extra_parameters(model) + self.count_task_params(model)

    def count_task_params(self, model: nn.Module) -> int:
        """Count the parameters that earlier tasks have for themselves; the model holds those of the last task."""
        names = {name for name, _ in unwrap(model).named_parameters()}
        count = 0
        for task_params in self.task_params[: max(0, len(self.tasks) - 1)]:
            count += sum(v.numel() for name, v in task_params.items() if name in names)
        return count

    def restore_locked(self, model: nn.Module) -> None:
        """Restore the locked entries. Call it after copying averaged weights into the model, before ``end_task``."""
        self._locks.restore(model, everything=True)

    def protected_entries(self, model: nn.Module, count: int) -> Params:
        """Return masks, by parameter name, of the shared entries that the first ``count`` tasks use."""
        return {}

    def check_between_tasks(self, model: nn.Module, task: Any) -> None:
        """Raise if a protected entry has changed since the last task ended."""
        num_ended = self._count_ended(task)
        if not 0 < num_ended <= len(self.checksums):
            return
        changed = find_changed(model, self.protected_entries(model, num_ended), self.checksums[num_ended - 1])
        if changed:
            raise ValueError(
                f"{shorten_names(changed)} moved since task {self.tasks[num_ended - 1]} ended, so that the outputs of "
                f"{type(self).__name__} for earlier tasks would change. Was there a late optimizer step, or were "
                "averaged or saved weights copied in? Restore the weights. To keep averages, copy them in before "
                "end_task(model, task), and then call restore_locked(model)."
            )

    def _count_ended(self, task: Any) -> int:
        """Count the tasks before ``task``, which is new or a further part of the last one."""
        if self.is_new(task):
            return len(self.tasks)
        return len(self.tasks) - 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a method of the same class; the next ``begin_task`` applies it to the model."""
        super().load_state_dict(state)
        self._loaded = True

    @contextmanager
    def using_task(self, k: int) -> Iterator[None]:
        """Let hooks on the model compute the sub-network of task k, counted from 0, inside the context."""
        previous_task = self._active_task
        self._active_task = k
        try:
            yield
        finally:
            self._active_task = previous_task

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """Compute the outputs of the sub-network of task k, counted from 0."""
        raise NotImplementedError

    def predict_current(self, model: nn.Module, x: Any) -> Tensor:
        """Compute the outputs of the model as it is, for a task that has not ended or not begun."""
        return forward(model, x)

    def find_task_index(self, task_id: int) -> int:
        """Return the position of an ended task in the order of training, counted from 0."""
        ended = self.tasks[: len(self.task_params)]
        if task_id not in ended:
            raise ValueError(f"Task {task_id} has not been learned; there are: {', '.join(map(str, ended)) or 'none'}.")
        return ended.index(task_id)

    def predict(self, model: nn.Module, x: Any, task: Any = None) -> Tensor:
        """Compute outputs in evaluation mode, each example with the sub-network of its task.

        Args:
            model: the trained model.
            x: inputs.
            task: the task id of each example, or one id for all. An id that was not learned uses the model as it is.
                None: see ``unknown``.
        """
        x = unlisted(x)
        if task is None:
            if not self.tasks:
                return super().predict(model, x)
            with evaluating(model):
                return self._predict_unknown(model, x)

        example_ids = torch.as_tensor(task)
        num_examples = row_count(x)
        if example_ids.dim() and len(example_ids) != num_examples:
            raise ValueError(
                f"Got the tasks of {len(example_ids)} examples for {num_examples} examples: give one number for each."
            )

        task_ids = [int(task_id) for task_id in example_ids.unique().tolist()]
        with evaluating(model):
            if not task_ids:
                return super().predict(model, x)
            if len(task_ids) == 1:
                return self._predict_task(model, x, task_ids[0])

            # Examples are grouped by task, and the outputs put back into the order of the examples.
            groups = [(example_ids == task_id).nonzero().flatten() for task_id in task_ids]
            outputs = []
            for task_id, rows in zip(task_ids, groups, strict=True):
                outputs.append(self._predict_task(model, _select_rows(x, rows), task_id))
        return torch.cat(_pad_to_equal_width(outputs))[torch.cat(groups).argsort()]

    def _predict_task(self, model: nn.Module, x: Any, task_id: int) -> Tensor:
        if task_id not in self.tasks:
            return self.predict_current(model, x)
        return self._predict_index(model, x, self.tasks.index(task_id))

    def _predict_index(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """Compute the outputs of task k with its sub-network if it has ended, else with the model as it is."""
        if self.is_open and k == len(self.tasks) - 1:
            return self.predict_current(model, x)
        return self.predict_as(model, x, k)

    def _predict_unknown(self, model: nn.Module, x: Any) -> Tensor:
        """Select for each example the outputs of the sub-network with the largest probability."""
        outputs = [self._mask_outputs(self._predict_index(model, x, k), k) for k in range(len(self.tasks))]
        if len(outputs) == 1:
            return outputs[0]

        if self.unknown == "raise" or not self.has_classes or outputs[0].shape[-1] < 2:
            advice = ""
            if self.has_classes:
                advice = ', or unknown="confident" to use the most confident sub-network'
            raise ValueError(
                f"{type(self).__name__} must know the task of each example: predict(model, x, task), or a "
                f"task-incremental stream{advice}."
            )

        # With outputs at several positions of an example, as in a sequence, the mean over positions decides.
        confidence = torch.stack([logits.softmax(-1).amax(-1) for logits in outputs])
        if confidence.dim() > 2:
            confidence = confidence.flatten(2).mean(-1)
        choice = confidence.argmax(0)
        return torch.stack(_pad_to_equal_width(outputs))[choice, torch.arange(len(choice), device=choice.device)]

    def _mask_outputs(self, logits: Tensor, k: int) -> Tensor:
        """Set the outputs that task k did not have to -∞."""
        allowed = self.allowed_outputs[k]
        if allowed is None:
            return logits
        width = logits.shape[-1]
        allowed = F.pad(allowed, (0, max(0, width - len(allowed))))[:width]
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)


def select_task_params(model: nn.Module, output: str | None, rest: bool) -> Params:
    """Select the parameters and buffers that each task has for itself.

    Args:
        model: the model.
        output: name of the output layer, which is selected; by default the last ``nn.Linear``.
        rest: also select biases, norms, embeddings and buffers.
    """
    inner = unwrap(model)
    selected = {id(p) for p in output_layer(model, output)[1].parameters()}
    if rest:
        # Tied parameters are registered in several modules; one of them suffices.
        for module in inner.modules():
            selected |= {id(p) for leaf, p in module._parameters.items() if not _is_weight(module, leaf, p)}

    parameters = {n: p for n, p in all_parameters(model).items() if id(p) in selected}
    if rest:
        parameters |= dict(inner.named_buffers())
    return parameters


def copy_task_params(model: nn.Module, task_params: Params) -> Params:
    """Copy a task's parameters, and all buffers, which a forward pass alone can change."""
    return clone_tensors({**task_params, **dict(unwrap(model).named_buffers())})


def shorten_names(names: Sequence[str], limit: int = 3) -> str:
    """List the first names for a message.

    >>> shorten_names(["a", "b", "c", "d"])
    'a, b, c, …'
    """
    shown = list(names[:limit])
    if len(names) > limit:
        shown.append("…")
    return ", ".join(shown)


def _is_weight(module: nn.Module, leaf: str, p: Tensor | None) -> bool:
    """Whether a parameter connects units: not a bias, norm, embedding, position, token or scale."""
    if p is None or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return False
    # A bias, a norm or a token has one dimension, apart from dimensions of length 1.
    if sum(length > 1 for length in p.shape) < 2:
        return False
    return leaf.endswith("weight") or type(module).__module__.startswith("torch.nn")


def _select_rows(x: Any, rows: Tensor) -> Any:
    """Select examples from a tensor or a structure of tensors."""
    return tree_map(lambda v: v[rows] if isinstance(v, Tensor) else v, x)


def _pad_to_equal_width(outputs: list[Tensor]) -> list[Tensor]:
    """Pad the outputs of narrower heads with -∞, where the head has grown between tasks."""
    width = max(logits.shape[-1] for logits in outputs)
    return [F.pad(logits, (0, width - logits.shape[-1]), value=-torch.inf) for logits in outputs]
