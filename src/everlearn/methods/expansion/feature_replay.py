"""FeatureReplay, the base of ExpandableRepresentation: its feature bank on a model, its checkpoints, its old tasks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from everlearn.core.batch import Batch, Transform
from everlearn.core.parameters import Params, check_finite, unwrap
from everlearn.core.task import as_task
from everlearn.memory import Memory
from everlearn.methods.expansion.balanced_finetuning import transform_by_task
from everlearn.methods.expansion.feature_bank import OWNER, FeatureBank
from everlearn.methods.replay.base import Replay, Rows
from everlearn.runtime.randomness import seeded
from everlearn.surgery.functional import filled_copy
from everlearn.surgery.heads import output_layer
from everlearn.surgery.hooks import is_compiled, move_like, remove_hooks, without_hooks

CHUNK_SIZE = 256  # examples per forward pass at the end of a task


class FeatureReplay(Replay):
    """Replay with a feature bank: connecting it to a model, saving it, and reading features and transforms of tasks."""

    output: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        # What a checkpoint holds of the feature bank; ``state_dict`` updates the trained parts.
        self.extractors: list[Params] = []
        self.classifier_blocks: list[Tensor] = []
        self.auxiliary_head: Params = {}

        self.current_task: int | None = None
        self.tasks_begun = 0
        self.is_task_open: bool = False
        # A checkpoint holds no functions, only the indices of tasks that had a transform.
        self.transformed_tasks: list[int] = []
        self._eval_transforms: dict[int, Transform | None] = {}
        self.sizes: dict[str, float] = {}

        self._bank: FeatureBank | None = None
        self._initial_parameters: list[Tensor] = []  # at the beginning of the task

    def make_memory(self) -> Memory:
        """Create an empty memory, the same in all processes: each of them reads all examples of a task."""
        return Memory(self.capacity, self.policy)

    def parameters(self) -> list[nn.Parameter]:
        """Return the classifier's weights for the frozen extractors, and the auxiliary head."""
        if self._bank is None:
            return []
        return self._bank.trained_parameters()

    def observe(self, batch: Batch, outputs: Tensor) -> None:
        """Do nothing: the memory is filled at the end of a task, chosen by trained features."""

    def after_step(self, model: nn.Module) -> None:
        """Check nothing: every extractor keeps the running statistics of its task."""

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Close the task."""
        bank = self._attach(model)
        for p in bank.trained_parameters():
            p.grad = None  # an optimizer that is still in use would move them

        extractors = len(bank) + 1
        _, layer = output_layer(model, self.output)
        self.sizes = {"extractors": extractors, "feature width": extractors * layer.in_features}
        self.is_task_open = False
        super().end_task(model, task)

    def predict(self, model: nn.Module, x: Any, task: Tensor | None = None) -> Tensor:
        """Compute outputs with all extractors; the task of an example is not needed."""
        if self.tasks_begun:
            self._attach(model)
        return super().predict(model, x, task)

    def extra_parameters(self, model: nn.Module) -> int:
        """Count the frozen extractors and the classifier's weights for them, without the auxiliary head."""
        names = {name for name, _ in unwrap(model).named_parameters()}
        frozen_count = 0
        for extractor in self.extractors:
            frozen_count += sum(v.numel() for name, v in extractor.items() if name in names)

        blocks = self.classifier_blocks
        if self._bank is not None:
            blocks = list(self._bank.blocks)
        return frozen_count + sum(block.numel() for block in blocks)

    def diagnostics(self) -> dict[str, float]:
        """Return the number of extractors and the width of their concatenated features."""
        return dict(self.sizes)

    def export(self, model: nn.Module) -> nn.Module:
        """Return a separate plain module with all extractors, in evaluation mode."""
        bank = self._attach(model)
        _, layer = output_layer(model, self.output)
        return bank.merge(unwrap(model), layer)

    def detach(self, model: nn.Module) -> None:
        """Remove the hooks; the model stays the newest extractor, with the classifier's weights for it alone."""
        remove_hooks(unwrap(model), OWNER)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the current classifier and auxiliary head."""
        if self._bank is not None:
            self.classifier_blocks = [b.detach().clone() for b in self._bank.blocks]
            self.auxiliary_head = {}
            if self._bank.auxiliary is not None:
                self.auxiliary_head = {n: v.detach().clone() for n, v in self._bank.auxiliary.named_parameters()}
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; the next ``begin_task`` or ``predict`` connects its extractors to the model."""
        self._bank = None
        super().load_state_dict(state)

    def _is_new_task(self, task_id: int | None) -> bool:
        """Whether this is a new task, and not another part of the last one."""
        if not self.tasks_begun:
            is_new = True
        elif task_id is None:
            is_new = not self.is_task_open
        else:
            is_new = self.current_task != task_id

        if is_new and self.is_task_open:
            raise ValueError(
                f"Task {self.current_task} has not ended: call end_task(model, task) before the next begins."
            )
        return is_new

    def _record_transforms(self, task: Any, task_id: int | None) -> None:
        """Store the transforms of a task, and warn if those of remembered tasks are lost."""
        transform = getattr(task, "transform", None)
        eval_transform = getattr(task, "eval_transform", None)
        if task_id is not None:
            self._eval_transforms[task_id] = eval_transform
            if self._transforms or transform is not None:
                self._transforms[task_id] = transform
            if eval_transform or transform:
                self.transformed_tasks = sorted({*self.transformed_tasks, task_id})
        if not len(self.memory):
            return

        # After loading a checkpoint, the transforms of its tasks are unknown, unless they had none.
        remembered_tasks = self.memory["t"].unique().tolist()
        unknown_tasks = [k for k in remembered_tasks if k not in self._eval_transforms]
        lost_tasks = [str(k) for k in unknown_tasks if k in self.transformed_tasks]
        for k in unknown_tasks:
            if k >= 0 and k not in self.transformed_tasks:
                self._eval_transforms[k] = None
        if lost_tasks:
            warnings.warn(
                f"ExpandableRepresentation remembers examples of task {', '.join(lost_tasks)}, whose transforms it "
                "does not know: a checkpoint holds no functions. Those examples now get the transforms of "
                f"{as_task(task)}. If theirs were different, give tasks whose inputs are transformed already.",
                stacklevel=3,
            )

    def _feature_bank(self, inner: nn.Module) -> FeatureBank:
        """Return the feature bank on the model's device, rebuilt from the state after loading."""
        if self._bank is None:
            name, _ = output_layer(inner, self.output)
            bank = FeatureBank(name)
            for tensors, weight in zip(self.extractors, self.classifier_blocks, strict=True):
                with without_hooks(inner):
                    bank.add(filled_copy(inner, tensors), weight)

            if self.auxiliary_head:
                weight = self.auxiliary_head["weight"]
                outputs, inputs = weight.shape
                with seeded(0):
                    bank.auxiliary = nn.Linear(inputs, outputs, True, weight.device, weight.dtype)
                bank.auxiliary.load_state_dict(self.auxiliary_head)
            self._bank = bank
        move_like(self._bank, inner)
        return self._bank

    def _attach(self, model: nn.Module) -> FeatureBank:
        """Connect the feature bank to the user's model, unless it is connected already."""
        inner = unwrap(model)
        bank = self._feature_bank(inner)
        if not bank.is_connected(inner):
            bank.connect(inner, is_compiled(model))
        return bank

    def _check_training(self, inner: nn.Module, bank: FeatureBank) -> None:
        """Raise if the optimizer did not move the method's parameters, or if weights are not finite."""
        parameters = bank.trained_parameters()
        have_moved = []
        for p, initial in zip(parameters, self._initial_parameters, strict=False):
            if p.grad is not None and p.grad.any():
                have_moved.append(not torch.equal(p, initial))
        if have_moved and not any(have_moved):
            raise ValueError(
                "The optimizer does not train the parameters of ExpandableRepresentation: create it after "
                "begin_task(model, task), with [*model.parameters(), *method.parameters()]."
            )
        check_finite({**dict(inner.named_parameters()), **{str(i): p for i, p in enumerate(parameters)}})

    def _task_indices(self, batch: Batch) -> Tensor:
        """Return the tasks of a batch; tasks without an index are counted as the memory counts them."""
        task_indices = batch.host.t
        if task_indices is None:
            return torch.tensor([self._unnumbered_task_id])
        task_ids: Tensor = task_indices.unique()
        return task_ids

    def _task_features(self, inner: nn.Module, bank: FeatureBank, task: Any) -> tuple[Tensor, Rows]:
        """Compute Φ of all examples of the task, and the rows that the memory may keep."""
        device = next(inner.parameters()).device
        phi = []
        rows = []
        for batch in as_task(task).examples(CHUNK_SIZE):
            labeled_rows = batch.labeled_rows()
            if labeled_rows is not None:
                batch = batch[labeled_rows]
            phi.append(bank.all_features(inner, batch.to(device).x))
            rows.append(self.row_fields(batch, batch.labels()))

        if not rows:
            raise ValueError(
                f"There are no examples of {as_task(task)} to remember; a generator can be read only once: give a list "
                "or a DataLoader."
            )
        joint_rows = {}
        for name in ("x", "y", "t"):
            joint_rows[name] = tree_map(lambda *v: torch.cat(v), *(chunk[name] for chunk in rows))
        return torch.cat(phi), joint_rows

    def _memory_features(self, inner: nn.Module, bank: FeatureBank, task: Any, device: torch.device) -> Tensor:
        """Compute Φ of all remembered examples, each under the evaluation transform of its task."""
        rows = self.memory.rows()
        default_transform = getattr(task, "eval_transform", None)
        phi = []
        for chunk in torch.arange(len(rows["t"])).split(CHUNK_SIZE):
            x = tree_map(lambda v, chunk=chunk: v[chunk], rows["x"])
            x = transform_by_task(x, rows["t"][chunk], self._eval_transforms, default_transform)
            phi.append(bank.all_features(inner, tree_map(lambda v: v.to(device), x)))
        return torch.cat(phi)
