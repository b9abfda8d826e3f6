"""Expandable representation: one more feature extractor for every task, and one classifier over all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import NonNegative, Range
from everlearn.core.likelihood import Categorical
from everlearn.core.parameters import accumulate_dtype, check_finite, refuse_sharded, unwrap
from everlearn.core.traits import Traits
from everlearn.methods.expansion.balanced_finetuning import fit_classifier, scale_outputs_
from everlearn.methods.expansion.feature_bank import FeatureBank, check_separate, new_classifier
from everlearn.methods.expansion.feature_replay import FeatureReplay
from everlearn.methods.replay.base import Rows, forward_both, memory_share
from everlearn.runtime import distributed
from everlearn.runtime.randomness import derive, seeded
from everlearn.surgery.functional import filled_copy
from everlearn.surgery.heads import output_layer
from everlearn.surgery.hooks import without_hooks


@dataclass(eq=False)
class ExpandableRepresentation(FeatureReplay):
    """Dynamically expandable representation (Yan et al., CVPR 2021): add a feature extractor per task.

        representation: Φ(x) = [φ₁(x) … φ_T(x)], φ_T starts as φ_{T-1}; φ₁ … φ_{T-1} are frozen, in evaluation mode
        classifier:     out = W Φ(x) + b, one for all classes; only W's columns for φ_T are initialized anew
        loss:           L = CE(W Φ + b, y) + auxiliary · CE(A φ_T + a, y′), new and remembered examples as one batch
                        y′ = 0 for classes and examples of earlier tasks, 1 … n for n new classes; no A in task 1
        after the task: W, b are fine-tuned with fixed Φ and softmax(out / temperature), on equally many examples
                        of every class

    The authors' acronym is DER, which here means dark experience replay. Your model is always the newest extractor:
    φ_T is the input of its output layer, and ``model(x)`` returns ``out`` in any loop. The other columns of W and the
    auxiliary head are ``method.parameters()``. The memory is filled at the end of a task.

    Args:
        capacity: number of examples in the memory.
        size: number of examples replayed at a step; by default as many as the current batch has.
        policy: choice of examples: "herding" (equal shares for all classes, chosen so that their mean feature follows
            that of the class), "balanced" (equal shares, at random), "reservoir" or "ring" as in other replay.
        auxiliary: weight of the auxiliary loss.
        tune_epochs: epochs of fine-tuning at the end of a task; 0 for none.
        tune_from: start of the fine-tuning: the classifier as "learned", or initialized "anew" as in the paper, which
            needs a larger memory.
        tune_lr: learning rate of the fine-tuning.
        temperature: of its softmax; the tuned weights are divided by it.
        output: name of the output layer; by default the last ``nn.Linear``.
        joint: whether new and remembered examples pass through the model as one batch.
    """

    traits = Traits(
        family="expansion",
        pro="old features never change; forgets far less than replay",
        con="a feature extractor per task, and examples",
        step=3.8,
        step_growth=0.8,
        copies=(-1.0, 1.0),
        keeps_examples=True,
        grows=True,
    )

    deployable: ClassVar[bool] = False  # the model is only the newest of several extractors
    reinitializes: ClassVar[bool] = True

    policy: Literal["herding", "balanced", "reservoir", "ring"] = field(  # type: ignore[assignment]
        default="herding", kw_only=True
    )
    auxiliary: NonNegative = field(default=1.0, kw_only=True)
    tune_epochs: Annotated[int, Range(0)] = field(default=50, kw_only=True)
    tune_from: Literal["learned", "anew"] = field(default="learned", kw_only=True)
    tune_lr: NonNegative = field(default=0.05, kw_only=True)
    temperature: Annotated[float, Range(1e-3)] = field(default=5.0, kw_only=True)
    output: str | None = field(default=None, kw_only=True)
    joint: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.new_classes: list[int] = []  # of the current task
        self.known_classes: list[int] = []  # of all tasks so far
        self.seed = 0

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Freeze a copy of the extractor; the model continues as the newest one."""
        refuse_sharded(model, type(self).__name__)
        source = getattr(task, "train", None)
        if distributed.world_size() > 1 and getattr(source, "is_distributed", False):
            raise ValueError(
                "ExpandableRepresentation fills its memory from all examples of a task, and this loader gives each "
                "process a share: give it the data set as the task, such as Continual(method, task=dataset)."
            )
        inner = unwrap(model)
        name, layer = output_layer(model, self.output)
        check_separate(inner, name, layer)

        task_id = getattr(task, "id", None)
        if self._is_new_task(task_id):
            if self.tasks_begun:
                self._expand(inner, layer)
            else:
                self.seed = distributed.initial_seed()
            self._init_auxiliary_head(task, layer)
            self.tasks_begun += 1
            self.current_task = task_id

        self.is_task_open = True
        self._record_transforms(task, task_id)
        bank = self._attach(model)
        self._initial_parameters = [p.detach().clone() for p in bank.trained_parameters()]

    def _expand(self, inner: nn.Module, layer: nn.Linear) -> None:
        """Freeze a copy of φ_T with its columns of W; initialize the model's columns of W anew."""
        bank = self._feature_bank(inner)
        layer_ids = {id(p) for p in layer.parameters()}
        tensors = [*inner.named_parameters(), *inner.named_buffers()]
        self.extractors.append({n: v.detach().clone() for n, v in tensors if id(v) not in layer_ids})
        with without_hooks(inner):
            bank.add(filled_copy(inner, self.extractors[-1]), layer.weight)

        with seeded(derive(self.seed, "classifier", self.tasks_begun), layer.weight.device), torch.no_grad():
            bank.grow_outputs(layer.out_features)
            layer.weight.copy_(new_classifier(layer, layer.in_features).weight)

    def _init_auxiliary_head(self, task: Any, layer: nn.Linear) -> None:
        """Find the new classes of the task, and create A and a with an output for each and one for the rest."""
        allowed = getattr(task, "allowed", None)
        if allowed is None:
            classes = list(range(layer.out_features))
        else:
            classes = allowed[getattr(task, "id", None)].nonzero().flatten().tolist()

        # A task without new classes, as in domain-incremental learning, has to tell its classes from remembered ones.
        self.new_classes = [c for c in classes if c not in self.known_classes] or classes
        self.known_classes = sorted({*self.known_classes, *classes})

        if self._bank is None:
            return
        self._bank.auxiliary = None
        if self.tasks_begun and self.auxiliary:
            weight = layer.weight
            outputs = len(self.new_classes) + 1
            with seeded(derive(self.seed, "auxiliary", self.tasks_begun), weight.device):
                self._bank.auxiliary = nn.Linear(layer.in_features, outputs, True, weight.device, weight.dtype)

    def task_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute CE(W Φ + b, y) + auxiliary · CE(A φ_T + a, y′) over new and remembered examples."""
        if not self.tasks_begun or self._bank is None:
            raise ValueError(
                "ExpandableRepresentation has no task: call begin_task(model, task) before the first step."
            )
        if not isinstance(batch.likelihood, Categorical) or batch.labels().dim() != 1:
            raise TypeError(
                f"ExpandableRepresentation needs one class per example, not {batch.likelihood} with labels of shape "
                f"{tuple(batch.labels().shape)}: use ER."
            )
        bank = self._bank
        is_old = torch.zeros(len(batch), dtype=torch.bool, device=batch.labels().device)
        drawn = self.draw(batch)
        if drawn is None:
            loss, outputs = super().task_loss(model, batch)
            y = batch.labels()
        else:
            replayed, rows = drawn
            outputs, memory_outputs = forward_both(model, batch, replayed.x, self.joint)
            y = torch.cat([batch.labels(), replayed.labels()])
            current_tasks = self._task_indices(batch).to(rows["t"].device)
            is_old = torch.cat([is_old, ~torch.isin(rows["t"], current_tasks)])

            # One mean over all examples.
            share = memory_share(batch, replayed)
            loss = (1 - share) * batch.loss(outputs) + share * replayed.loss(memory_outputs)

        phi = bank.pop_newest_features(len(y))
        if bank.auxiliary is None or phi is None:
            return loss, outputs
        auxiliary_loss = F.cross_entropy(bank.auxiliary(phi), self.auxiliary_targets(y, is_old))
        return loss + self.auxiliary * auxiliary_loss, outputs

    def auxiliary_targets(self, y: Tensor, is_old: Tensor) -> Tensor:
        """Compute y′: 0 for examples of earlier tasks and known classes, else 1 + the index among the new classes.

        Ignored labels (-100) stay ignored.
        """
        new_classes = torch.tensor(self.new_classes, device=y.device)
        numbers = torch.arange(1, len(new_classes) + 1, device=y.device)
        class_number = ((y[:, None] == new_classes) * numbers).sum(1)
        targets = torch.where(is_old, 0, class_number)
        return torch.where(y == -100, y, targets)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Fine-tune the classifier on balanced data, then add examples of the task to the memory."""
        if not self.tasks_begun:
            raise ValueError("ExpandableRepresentation.end_task before any begin_task(model, task).")
        if not self.is_task_open:
            return
        inner = unwrap(model)
        bank = self._attach(model)
        self._check_training(inner, bank)

        phi, rows = self._task_features(inner, bank, task)
        if len(bank) and self.tune_epochs and len(self.memory):
            self._tune_classifier(inner, bank, task, phi, rows)

        if self.policy == "herding":
            self.memory.add(**rows, features=F.normalize(phi, dim=-1))
        else:
            self.memory.add(**rows)
        super().end_task(model, task)

    def _tune_classifier(self, inner: nn.Module, bank: FeatureBank, task: Any, phi: Tensor, rows: Rows) -> None:
        """Fine-tune W and b with fixed Φ, on equally many examples from every class of every task."""
        memory_rows = self.memory.rows()
        is_old = ~torch.isin(memory_rows["t"], rows["t"].cpu().unique())
        if not is_old.any():
            return
        memory_phi = self._memory_features(inner, bank, task, phi.device)

        # A group is a class of a task. The largest remembered group of earlier tasks sets the size of all.
        y = torch.cat([memory_rows["y"], rows["y"].cpu()])
        t = torch.cat([memory_rows["t"], rows["t"].cpu()])
        groups = torch.stack([t, y]).unique(dim=1, return_inverse=True)[1]
        group_size = int(groups[: len(is_old)][is_old].bincount().max())

        _, layer = output_layer(inner, self.output)
        features = torch.cat([memory_phi, phi]).to(accumulate_dtype(layer.weight))
        pool = Batch(features, y, t, getattr(task, "allowed", None)).to(phi.device)
        classifier = bank.merge_classifier(layer).to(features.dtype)
        seed = derive(self.seed, "balance", self.tasks)
        if self.tune_from == "learned":
            # With softmax(out / temperature), fine-tuning starts from the current outputs.
            scale_outputs_(classifier, self.temperature)
        else:
            with seeded(seed, phi.device):
                classifier.reset_parameters()

        tuned = fit_classifier(
            classifier,
            pool,
            groups,
            group_size,
            self.tune_epochs,
            seed,
            lr=self.tune_lr,
            temperature=self.temperature,
        )
        scale_outputs_(tuned, 1 / self.temperature)
        check_finite(dict(tuned.named_parameters()))
        bank.write_classifier(layer, tuned)
