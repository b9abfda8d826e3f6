"""SLCA: a backbone that learns slowly, and an output layer aligned on Gaussians of the features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import Range, Search
from everlearn.core.method import Method
from everlearn.core.parameters import Params, grown, refuse_sharded, trainable_parameters
from everlearn.core.task import as_task
from everlearn.core.traits import Traits
from everlearn.methods.heads.alignment import Gaussian, align_output, restore_rows
from everlearn.methods.heads.statistics import Statistics, check_classes, collect_moments, mean_and_factor
from everlearn.methods.regularization.path_integral import PathIntegral
from everlearn.methods.replay.base import Replay
from everlearn.runtime.randomness import derive
from everlearn.surgery.heads import output_layer


@dataclass(eq=False)
class SLCA(Method):
    """Slow learner with classifier alignment (Zhang et al., ICCV 2023): slow features, a head fitted to Gaussians.

        each step:      θ ← θ + share · Δθ   below the output layer, Δθ: the optimizer's update
                        L = cross-entropy over the classes of the current task
        end of a task:  μ_c, Σ_c: mean and covariance of the features of its classes c
                        h ~ N(γ_c μ_c, Σ_c + variance · I),   γ_c = 1 - shrinkage · (1 - t_c / t)
                        fit W and b to CE(z / (τ n)),   z = W h + b,   n = mean over tasks k of ‖z_k‖

    t is the current task and t_c that of class c, counted from 1; z_k are the logits of the classes of task k. A scaled
    update is that of a learning rate ``share`` times as large, for SGD with momentum, Adam and AdamW, weight decay
    included. Each alignment begins with the rows of W and b that each class's own task has trained.

    Running statistics of BatchNorm follow each task at their own rate, so that old Gaussians no longer fit: SLCA warns,
    and ``SLCA() + Freeze("statistics")`` freezes them after the first task.

    Args:
        share: learning rate of the backbone, relative to the head's; 0 freezes it.
        epochs: epochs of an alignment; 0 for none.
        samples: samples of each class in each epoch, and batch size.
        lr: learning rate of the alignment: SGD with momentum 0.9, weight decay 5e-4 and a cosine schedule.
        temperature: τ.
        shrinkage: how much the means of old tasks are scaled down: 0.1 in the authors' code, 0 in the paper.
        variance: added to all variances, for classes with fewer examples than features.
        seed: of the samples.
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="heads",
        pro="features adapt slowly; old classes are kept as Gaussians",
        con="needs good features; keeps a matrix per class",
        step=1.2,
        copies=(0.0, 1.34),
        copies_scale=False,
        grows=True,
        needs_pretrained="learns features slowly, after the first task as well: pretrain the model",
    )

    replaces_loss = True

    share: Annotated[float, Range(0, 1), Search(1e-3, 1)] = 0.01
    epochs: Annotated[int, Range(0)] = 5
    samples: Annotated[int, Range(1)] = 256
    lr: Annotated[float, Range(0), Search(1e-3, 1, late=True)] = 0.01
    temperature: Annotated[float, Range(1e-6), Search(1e-2, 1, late=True)] = 0.1
    shrinkage: Annotated[float, Range(0, 1)] = 0.1
    variance: Annotated[float, Range(1e-12), Search(1e-6, 1e-2, late=True)] = 1e-4
    seed: int = 0
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.statistics: Statistics = {}
        self.task_id: int | None = None
        self.num_tasks = 0  # t
        self.class_tasks = torch.zeros(0, dtype=torch.long)  # t_c; 0 for classes without examples
        self.is_current = torch.zeros(0, dtype=torch.bool)  # whether the current task has had examples of a class
        self.trained_rows: Params = {}  # of the output layer, before alignment
        self._is_begun = False
        self._num_steps: int | None = None  # of this task; None before its first loss
        self._start: Params = {}  # the backbone before the step

    def conflict_with(self, other: Method) -> str:
        """Refuse methods that measure updates, or that train the output layer for old tasks."""
        if not isinstance(other, (Replay, PathIntegral)) and other.deployable:
            return ""
        return (
            f"SLCA scales the optimizer's updates and fits the output layer to Gaussians, which is at odds with "
            f"{type(other).__name__}. EWC, MAS, L2, LwF and Freeze can be combined with SLCA."
        )

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Check the model and the task."""
        check_classes(task, "SLCA")
        refuse_sharded(model, "SLCA")
        output_layer(model, self.output)
        self._is_begun = True
        self._num_steps = None

    def task_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the cross-entropy over the classes of the current task."""
        self._num_steps = self._num_steps or 0
        outputs = batch.forward(model)
        if not self.statistics:
            return batch.loss(outputs), outputs

        # Classes of earlier tasks are masked until the current task has an example of them.
        num_outputs = outputs.shape[-1]
        self.is_current = batch.mark_classes(num_outputs) | grown(self.is_current.to(outputs.device), [num_outputs])
        is_old = grown(self.class_tasks.to(outputs.device), [num_outputs]) > 0
        return batch.restrict(self.is_current | ~is_old).loss(outputs), outputs

    def before_step(self, model: nn.Module) -> None:
        """Copy the backbone."""
        if not self._is_begun:
            raise ValueError("SLCA needs begin_task(model, task) before the first step.")
        if self.num_tasks:
            self._check_statistics(model)
        self._start = {name: p.detach().clone() for name, p in self._backbone(model).items()}

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Scale the optimizer's update of the backbone: θ ← θ_start + share · (θ - θ_start)."""
        backbone = self._backbone(model)
        if backbone.keys() != self._start.keys():
            raise ValueError("SLCA.after_step needs the before_step(model) of the same step.")
        if backbone:  # torch._foreach functions need a tensor
            torch._foreach_lerp_(list(backbone.values()), list(self._start.values()), 1 - self.share)
        self._start = {}
        self._num_steps = (self._num_steps or 0) + 1

    def _backbone(self, model: nn.Module) -> Params:
        """Return the trainable parameters below the output layer."""
        _, layer = output_layer(model, self.output)
        head_ids = {id(p) for p in layer.parameters()}
        return {name: p for name, p in trainable_parameters(model).items() if id(p) not in head_ids}

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Add the Gaussians of the task's classes, and align the output layer from the second task on."""
        if self._num_steps == 0:
            raise ValueError("SLCA has not seen a step: call before_step(model) and after_step(model) in your loop.")
        name, layer = output_layer(model, self.output)
        statistics, is_new = collect_moments(model, name, as_task(task), self.statistics, "SLCA", layer.out_features)

        # Consecutive tasks with the same id are parts of one task.
        task_id = getattr(task, "id", None)
        if task_id is None or task_id != self.task_id:
            self.num_tasks += 1
        self.task_id = task_id
        self.statistics = statistics
        self.class_tasks = grown(self.class_tasks, is_new.shape).masked_fill(is_new, self.num_tasks)
        self.is_current = torch.zeros(0, dtype=torch.bool)

        # An earlier alignment, and weight decay since, have changed the rows of old classes.
        is_old = (self.class_tasks > 0) & ~is_new
        self.trained_rows = restore_rows(layer, self.trained_rows, is_old)
        if self.num_tasks > 1:
            seed = derive(self.seed, "SLCA", self.num_tasks)
            align_output(layer, self._gaussians(), self.epochs, self.samples, self.lr, self.temperature, seed)

    def _gaussians(self) -> Iterator[Gaussian]:
        """Yield N(γ_c μ_c, Σ_c + variance · I) of all classes with examples."""
        for c in self.class_tasks.nonzero().flatten().tolist():
            task = int(self.class_tasks[c])
            gamma = 1 - self.shrinkage * (1 - task / self.num_tasks)
            mean, factor = mean_and_factor(self.statistics, c, self.variance)
            yield Gaussian(c, task, gamma * mean, factor)
