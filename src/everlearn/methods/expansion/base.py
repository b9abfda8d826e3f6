"""Base class of methods that add units to a network, with a record of the task that each block of units belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.parameters import Params, accumulate_dtype, check_finite, grown, unwrap
from everlearn.core.task import Task
from everlearn.methods.expansion.added_units import AddedUnits, Block, View, as_parameters
from everlearn.methods.expansion.loop_guard import LoopGuard, has_validation_data, validation_loss
from everlearn.methods.expansion.merge_units import merge_units
from everlearn.methods.isolation.base import Isolation, copy_task_params, select_task_params
from everlearn.runtime import distributed
from everlearn.surgery.functional import call_with, filled_copy
from everlearn.surgery.heads import output_layer
from everlearn.surgery.hooks import recompile, remove_hooks, temporarily_unhooked, without_hooks
from everlearn.surgery.proximal import group_norms, group_soft_threshold_
from everlearn.surgery.tracing import Link, Structure, find_structure, links, read_example

INITIAL_NORM = 3**-0.5  # root mean square of ‖v‖₂ for n weights drawn from U(-1/√n, 1/√n)


@dataclass(eq=False)
class Expansion(Isolation):
    """Network expansion: tasks add units, and each task keeps the units that existed when it ended.

    The model's tensors keep their shapes, so that its checkpoints fit. Added units are state of the method.

    Args:
        groups: which layer's units lead into which layer, instead of those found; see ``surgery.tracing.links``.
        output: name of the output layer, of which each task has its own; by default the last ``nn.Linear``.
    """

    groups: dict[str, Any] | None = field(default=None, kw_only=True)
    output: str | None = field(default=None, kw_only=True)
    old_units_read_added: ClassVar[bool] = False  # whether old units may receive from added ones

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks: list[Block] = []  # units of ended tasks
        self.block_task: list[int] = []  # index of the task that added each block
        self.head_weights: list[Params] = []  # weights of each task's output layer for added units
        self.current_block: Block = {}  # units of the current task; inactive ones are zero
        self.active_units: dict[str, int] = {}  # how many units of the current block take part, by layer
        self.current_head: Params = {}  # weight of the current output layer for added units
        self.link_fields: list[dict[str, Any]] = []  # links of the first task, which later tasks use, too
        self.unlinked: list[tuple[str, str]] = []  # layers that get no units, each with the reason
        self.seed = 0
        self.steps = 0  # of the current task
        self.loss_sum: Tensor | float = 0.0  # of training losses since the last comparison with the threshold
        self.loss_count = 0
        self._task: Task | None = None
        self._planned_steps: int | None = None
        self._loop_guard = LoopGuard(type(self).__name__, None, False, False)
        self._added_units: AddedUnits | None = None

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters of the current task's units, also inactive ones, and the head's weights for them."""
        tensors: list[Tensor] = []
        for layer_tensors in [*self.current_block.values(), self.current_head]:
            tensors += layer_tensors.values()
        return [v for v in tensors if isinstance(v, nn.Parameter) and v.numel()]

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """Compute the outputs of task k, counted from 0, with its units and its output layer."""
        with self._temporarily_attached(model) as added_units, added_units.using_view(self._task_view(k)):
            return call_with(model, self.task_params[k], x)

    def predict_current(self, model: nn.Module, x: Any) -> Tensor:
        """Compute outputs with all units; of the current task's units with the active ones."""
        if not self.tasks:
            return super().predict_current(model, x)
        with self._temporarily_attached(model):
            return super().predict_current(model, x)

    def growth(self) -> dict[int, dict[str, int]]:
        """Return how many units each task added to each layer."""
        units_by_task: dict[int, dict[str, int]] = {task_id: {} for task_id in self.tasks[: len(self.task_params)]}
        for k, block in zip(self.block_task, self.blocks, strict=True):
            # A task in several parts has several blocks.
            layer_units = units_by_task[self.tasks[k]]
            for name, tensors in block.items():
                layer_units[name] = layer_units.get(name, 0) + len(tensors["weight"])
        return units_by_task

    def describe(self, model: nn.Module, batch: Batch | None = None) -> dict[str, str]:
        """Return which layers can get units, and why others cannot."""
        producers = [fields["producer"] for fields in self.link_fields]
        return self.describe_units("added units", producers, self.unlinked)

    def diagnostics(self) -> dict[str, float]:
        """Return the number of units added so far."""
        if not self.task_params:
            return {}
        return {"units added so far": sum(sum(layer_units.values()) for layer_units in self.growth().values())}

    def extra_parameters(self, model: nn.Module) -> int:
        """Count the parameters of added units, of their consumers, and of each earlier task's output layer."""
        tensors: list[Tensor] = list(self.parameters())
        for head_weight in self.head_weights:
            tensors += head_weight.values()
        for block in self.blocks:
            for layer_tensors in block.values():
                tensors += [v for leaf, v in layer_tensors.items() if "running" not in leaf]

        # Trainable blocks of earlier tasks are among ``parameters()`` too.
        distinct_tensors = {id(v): v for v in tensors}
        return self.count_task_params(model) + sum(v.numel() for v in distinct_tensors.values())

    def export(self, model: nn.Module, task: int) -> nn.Module:
        """Return a plain module that computes the outputs of one task: a copy of the model as wide as it was then.

        The module has all outputs of the output layer. Those of classes that the task did not have were never trained:
        compare only the outputs of the task's classes.

        Args:
            model: the trained model.
            task: id of the task.
        """
        k = self.find_task_index(task)
        with self._temporarily_attached(model) as added_units:
            with without_hooks(unwrap(model)):
                plain_model = filled_copy(model, self.task_params[k])
            merge_units(added_units, plain_model, self._task_view(k))
        return plain_model

    def detach(self, model: nn.Module) -> None:
        """Remove the added units and unlock all entries: the model of the first task, with the last output layer."""
        self._locks.detach(model)
        remove_hooks(unwrap(model), type(self).__name__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; the next ``begin_task`` or ``predict`` attaches its units to the model."""
        super().load_state_dict(state)
        self._added_units = None

    def before_step(self, model: nn.Module) -> None:
        """Raise if no task has begun."""
        if not self.tasks:
            raise ValueError(f"{type(self).__name__} has no task: call begin_task(model, task) before the first step.")
        self._loop_guard.before_step(self.parameters())

    def after_step(self, model: nn.Module) -> None:
        """Count the step."""
        self._loop_guard.after_step()
        self.steps += 1

    # Attaching the units to a model.

    def _find_links(self, model: nn.Module, task: Any) -> None:
        """Find the layers that can be widened, by running the model on examples of the first task."""
        if self.link_fields:
            return
        inner = unwrap(model)
        structure = self._find_structure(inner, task)

        head = output_layer(inner, self.output)[0]
        widened_links = [link for link in structure.links if link.producer != head and not link.rigid]
        self.unlinked = [(name, reason) for name, reason in structure.unlinked if name != head]
        for link in structure.links:
            if link.rigid:
                self.unlinked.append((link.producer, "the model's code fixes the number of its units"))

        if not widened_links:
            reasons = "".join(f" {name!r}: {reason}." for name, reason in self.unlinked[:3])
            raise ValueError(
                f"There is no layer to widen in {type(inner).__name__}: growing needs two linear or convolution "
                "layers with nothing between them that mixes units or fixes their number (for x.view(-1, 64) write "
                'x.flatten(1)). Name them, groups={"conv1": "conv2"}, and with BatchNorms between them '
                f'{{"conv1": ["norm1", "conv2"]}}.{reasons}'
            )
        self.link_fields = [asdict(link) for link in widened_links]

    def _find_structure(self, inner: nn.Module, task: Any) -> Structure:
        """Find the structure by running the model on examples, unless the user named the links."""
        if self.groups is not None:
            return Structure(links(inner, groups=self.groups), [])
        x = read_example(inner, task)
        if x is None:
            raise ValueError(
                f"{type(self).__name__} finds the layers to widen by running the model on examples, and this task has "
                "none: give it training or validation data (an iterator only inside a Task), or name the layers, "
                'groups={"conv1": "conv2"}.'
            )
        return find_structure(inner, x)

    def _attach_units(self, model: nn.Module) -> AddedUnits:
        """Register the hooks on a model in place of other methods' hooks, and compute all current units."""
        if self._added_units is None or not self._added_units.is_attached_to(unwrap(model)):
            widened_links = [Link(**fields) for fields in self.link_fields]
            name = type(self).__name__
            self._added_units = AddedUnits(model, name, widened_links, self.output, self.old_units_read_added)
            recompile(model)
        self._added_units.view = self._added_units.move_view(self._task_view())
        return self._added_units

    @contextmanager
    def _temporarily_attached(self, model: nn.Module) -> Iterator[AddedUnits]:
        """Attach the units for prediction; another method that trains the model gets its hooks back afterward."""
        previous_units = self._added_units
        if previous_units is not None and previous_units.is_attached_to(unwrap(model)):
            yield self._attach_units(model)
            return

        with temporarily_unhooked(unwrap(model), type(self).__name__) as had_hooks:
            yield self._attach_units(model)
        if had_hooks:
            self._added_units = previous_units

    @torch.no_grad()
    def _move_to_model(self, added_units: AddedUnits) -> None:
        """Move all units to the model's device and dtype, which may have changed, or differ from a checkpoint's."""
        self.blocks = added_units.move_view(View(self.blocks)).blocks
        current_view = added_units.move_view(View([self.current_block], self.current_head.get("weight")))
        self.current_block = as_parameters(current_view.blocks[0])
        if current_view.head is not None:
            self.current_head = as_parameters({"": {"weight": current_view.head}})[""]

    def _task_view(self, k: int | None = None) -> View:
        """Return the units of task k, counted from 0; by default all, with the active ones of the current task."""
        if k is None and self.is_open:
            if not self.current_block:
                return View()
            return View([*self.blocks, self.current_block], self.current_head.get("weight"), self.active_units)

        if k is None:
            k = len(self.task_params) - 1
        if k < 0:
            return View()
        blocks = [block for block_k, block in zip(self.block_task, self.blocks, strict=True) if block_k <= k]
        return View(blocks, self.head_weights[k].get("weight"))

    # Beginning, training and ending a task.

    def _reset_task(self) -> None:
        """Clear the state of the previous task."""
        self.steps = 0
        self.loss_sum = 0.0
        self.loss_count = 0
        self.current_block = {}
        self.active_units = {}
        self.current_head = {}

    def _create_units(self, added_units: AddedUnits, new_units: dict[str, int]) -> None:
        """Create inactive units for a task. They are zero, and no optimizer moves them while they have no gradient."""
        earlier_units = self._count_earlier_units(added_units)
        self.current_block = as_parameters(added_units.create_block(earlier_units, new_units))
        self.active_units = dict.fromkeys(added_units.links_by_producer, 0)

        # The new output layer starts with the previous task's weights for earlier units.
        link = added_units.links_by_consumer.get(added_units.head)
        if link is not None:
            output_weight = added_units.layer_weight(added_units.head)
            num_outputs = len(output_weight)
            old_weight = self.head_weights[-1].get("weight", output_weight.new_zeros(num_outputs, 0))
            width = (earlier_units[link.producer] + new_units[link.producer]) * link.repeat
            wide_weight = grown(old_weight.to(output_weight), (num_outputs, width))
            self.current_head = {"weight": nn.Parameter(wide_weight.clone())}

    def _count_earlier_units(self, added_units: AddedUnits) -> dict[str, int]:
        """Count the units that earlier tasks added to each layer."""
        view = View(self.blocks)
        return {name: view.count(name) for name in added_units.links_by_producer}

    def _lock_protected(self, model: nn.Module) -> None:
        """Lock the protected entries and all buffers, from the second task on."""
        self._locks.release(model)
        if len(self.tasks) < 2:
            return

        # Entries are locked, not frozen: without gradients, torch's transformers use kernels that round differently.
        self._locks.lock(model, self.protected_entries(model, len(self.tasks)))
        self._locks.lock_buffers(model)

    def _start_guard(self, task: Task, planned_steps: int | None) -> None:
        """Start checking the training loop of a task."""
        self._task = task
        self._planned_steps = planned_steps
        is_first_step = not self.steps
        may_grow = bool(self.current_block)
        self._loop_guard = LoopGuard(type(self).__name__, planned_steps, is_first_step, may_grow)

    def _record_loss(self, batch: Batch, outputs: Tensor) -> None:
        """Add the training loss to its running sum, unless validation data will be used."""
        if not has_validation_data(self._task):
            # Not read here: that would wait for an accelerator.
            loss = batch.loss(outputs)
            self.loss_sum = self.loss_sum + loss.to(accumulate_dtype(loss))
            self.loss_count += 1

    def _compute_loss(self, model: nn.Module) -> float:
        """Compute the loss to compare with the threshold: on the validation data, or the mean of recorded ones."""
        self._loop_guard.has_compared_loss = True
        if self._task is not None and has_validation_data(self._task):
            return validation_loss(model, self._task)
        if not self.loss_count:
            raise ValueError(
                f"{type(self).__name__} has no training loss to compare with its threshold: compute the loss of your "
                "loop with method.loss(model, batch), or give the task validation data."
            )

        # All processes must take the same decision.
        mean_loss = distributed.sum_across(float(self.loss_sum)) / distributed.sum_across(self.loss_count)
        self.loss_sum = 0.0
        self.loss_count = 0
        return mean_loss

    def _check_model(self, model: nn.Module) -> None:
        """Raise if a locked entry has moved, or if a parameter is not finite."""
        self._locks.check(model)
        parameters = [*unwrap(model).parameters(), *self.parameters()]
        check_finite({str(i): p for i, p in enumerate(parameters)})

    def _add_block(self, added_units: AddedUnits, selected: dict[str, Tensor]) -> None:
        """Add the selected units of the current task to the network's blocks, and discard the others."""
        k = len(self.tasks) - 1
        earlier_units = self._count_earlier_units(added_units)
        block, head_weight = added_units.select_units(
            self.current_block, self.current_head.get("weight"), earlier_units, selected
        )
        self.head_weights = self.head_weights[:k]
        self.head_weights.append({} if head_weight is None else {"weight": head_weight})
        if any(len(rows) for rows in selected.values()):
            self.blocks.append(block)
            self.block_task.append(k)

        # Without a gradient, an optimizer that is still in use does not move the parameters.
        for p in self.parameters():
            p.grad = None
        self.current_block = {}
        self.active_units = {}
        self.current_head = {}

    def _store_task(self, model: nn.Module) -> None:
        """Store the task's output layer and close the task."""
        if len(self.head_weights) < len(self.tasks):
            self.head_weights.append({})
        task_params = select_task_params(model, self.output, rest=False)
        self.close_task(model, copy_task_params(model, task_params))
        self._task = None  # releases the task's data
        self._attach_units(model)

    # Removing units of the current task.

    def _unit_groups(self, added_units: AddedUnits, name: str) -> tuple[list[Tensor], float]:
        """Return the tensors of the group lasso, a row per unit of a layer, and the initial norm of a unit's group.

        The group is the unit's scale and shift in the last BatchNorm, which undoes any scale before it, or else its
        incoming weights and bias.
        """
        tensors = self.current_block[name]
        last_norm = f"norm{len(added_units.links_by_producer[name].norms) - 1}"
        if f"{last_norm}.weight" in tensors:
            return [tensors[f"{last_norm}.weight"], tensors[f"{last_norm}.bias"]], 1.0
        return [tensors[leaf] for leaf in ("weight", "inner", "bias") if leaf in tensors], INITIAL_NORM

    @torch.no_grad()
    def _shrink_units(self, added_units: AddedUnits, share: float) -> None:
        """Apply the proximal step of the group lasso to the active units, by a share of their initial norm."""
        for name, count in self.active_units.items():
            if not count:
                continue
            groups, initial_norm = self._unit_groups(added_units, name)
            is_nonzero = group_soft_threshold_([g[:count] for g in groups], share * initial_norm)
            self._zero_outgoing(added_units, name, ~is_nonzero)

    def _zero_outgoing(self, added_units: AddedUnits, name: str, is_removed: Tensor) -> None:
        """Zero the outgoing weights of units, which can then be removed exactly, even where f(0) is not 0.

        Args:
            added_units: the units of the model.
            name: the layer of the units.
            is_removed: a mask of its first new units. Indices would have to be read from an accelerator.
        """
        link = added_units.links_by_producer[name]
        is_removed_column = is_removed.repeat_interleave(link.repeat)
        first_column = View(self.blocks).count(name) * link.repeat
        if "out" in self.current_block[name]:
            zero_columns_(self.current_block[name]["out"], 0, is_removed_column)
        if link.consumer in self.current_block:
            zero_columns_(self.current_block[link.consumer]["inner"], first_column, is_removed_column)
        if link.consumer == added_units.head:
            zero_columns_(self.current_head["weight"], first_column, is_removed_column)

    def _connected_units(self, added_units: AddedUnits) -> dict[str, Tensor]:
        """Find the active units with nonzero incoming and outgoing weights, by layer."""
        is_connected: dict[str, Tensor] = {}
        for name, count in self.active_units.items():
            groups, _ = self._unit_groups(added_units, name)
            is_connected[name] = group_norms([g[:count] for g in groups]).ne(0)

        # A unit that leads into disconnected units alone is disconnected; a pass per layer reaches the first layer.
        for _ in is_connected:
            for name, link in added_units.links_by_producer.items():
                is_connected[name] &= self._has_consumer(name, link, is_connected)
        return {name: mask.nonzero().flatten() for name, mask in is_connected.items()}

    def _has_consumer(self, name: str, link: Link, is_connected: dict[str, Tensor]) -> Tensor:
        """Return which active units of a layer lead into a connected unit or an output."""
        first_column = View(self.blocks).count(name) * link.repeat
        width = self.active_units[name] * link.repeat
        columns = slice(first_column, first_column + width)

        outgoing_weights = []
        if "out" in self.current_block[name]:
            outgoing_weights.append(self.current_block[name]["out"][:, :width])
        if link.consumer in is_connected:
            rows = is_connected[link.consumer].nonzero().flatten()
            outgoing_weights.append(self.current_block[link.consumer]["inner"][rows, columns])
        elif not outgoing_weights:
            outgoing_weights.append(self.current_head["weight"][:, columns])

        has_weight = torch.stack([w.ne(0).transpose(0, 1).flatten(1).any(1) for w in outgoing_weights]).any(0)
        return has_weight.view(-1, link.repeat).any(1)


def zero_columns_(weight: Tensor, first: int, is_zeroed: Tensor) -> None:
    """Zero columns of a weight in place; the mask begins at column ``first``.

    >>> weight = torch.ones(2, 4)
    >>> zero_columns_(weight, 1, torch.tensor([True, False])); weight[0]
    tensor([1., 0., 1., 1.])
    """
    columns = weight[:, first : first + len(is_zeroed)]
    columns.masked_fill_(is_zeroed.view(1, -1, *(1,) * (weight.dim() - 2)), 0)
