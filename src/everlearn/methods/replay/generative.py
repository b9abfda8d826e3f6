"""Generative replay: train on inputs from a generator instead of stored examples."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.hyperparameters import Range
from everlearn.core.likelihood import Categorical
from everlearn.core.method import Method
from everlearn.core.task import as_task
from everlearn.core.traits import Traits
from everlearn.methods.regularization.teacher import (
    Teacher,
    append_task,
    distillation_groups,
    find_teacher_conflict,
    snapshot_teacher,
    softened_kl,
    teacher_outputs,
)
from everlearn.methods.replay.base import forward_both
from everlearn.nets.vae import VAE
from everlearn.runtime import distributed
from everlearn.runtime.randomness import derive, generator, seeded


@dataclass(eq=False)
class GenerativeReplay(Method):
    """Deep generative replay (Shin et al., NeurIPS 2017): replay samples of a variational autoencoder.

        L = (1/t) L_task + (1 - 1/t) L_replay + L_generator,   t the number of tasks including this one
        L_replay: on inputs x′ of the generator, labeled by the model, both from before this task
        L_generator = (1/t) · (-ELBO of x) + (1 - 1/t) · (-ELBO of x′)

    No example is stored. The generator's parameters belong to the method and are trained with the same optimizer at
    the same time. If tasks have separate outputs, L_replay is the mean over the old tasks of the loss for every x′, as
    in van de Ven & Tolias (2019). Inputs are floating-point tensors: vectors, or images small enough for a
    multi-layer perceptron. New and generated inputs pass through the model as one batch, so that BatchNorm normalizes
    them together; with ``joint=False`` they pass separately.

    Args:
        size: number of generated inputs per step; by default as many as the current batch has.
        targets: "soft" for the old model's probabilities at the temperature, with a divergence times T², or "hard" for
            its most likely labels, as in Shin et al.
        temperature: T of soft targets.
        hidden: width of the generator's layers.
        latent: dimension of the generator's code.
        joint: whether new and generated inputs pass through the model as one batch.
    """

    traits = Traits(
        family="replay",
        pro="stores no data, yet learns new classes",
        con="limited by its generator: small inputs, thousands of steps",
        step=8.2,
        # Of 784-400-400-10: two copies of the model, and generators, whose size does not depend on the model's.
        copies=(8.7,),
    )

    size: Annotated[int, Range(1)] | None = None
    targets: Literal["hard", "soft"] = "soft"
    temperature: Annotated[float, Range(1e-3)] = 2.0
    hidden: Annotated[int, Range(1)] = 400
    latent: Annotated[int, Range(1)] = 100
    joint: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.input_shape: list[int] = []
        self.pixels: bool = True  # whether inputs are in [0, 1]
        self.generator_weights: dict[str, Tensor] = {}  # of the current generator, when the state was saved
        self.next_teacher: Teacher = {}  # model and generator at the end of the last task
        self.teacher: Teacher = {}  # model and generator that replay in the current task
        self.task_ids: list[int] = []  # of the ended tasks
        self.current_task: int | None = None
        self.num_draws = 0
        self._generator: VAE | None = None
        self._old_generator: VAE | None = None

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Replay from the model and the generator of the last task's end; chunks of one task share theirs."""
        self._open(task)
        self.current_task = getattr(task, "id", None)
        if self._generator is None:
            self._generator = self._build_generator(model, task)
        self._generator.to(next(model.parameters()).device)
        if self.next_teacher and (self.current_task is None or self.current_task != self.next_teacher["ids"][-1]):
            self.teacher = self.next_teacher
            self._old_generator = None

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the generator."""
        if self._generator is None:
            return []
        return list(self._generator.parameters())

    def extra_parameters(self, model: nn.Module) -> int:
        """Return 0: only training needs the generator."""
        return 0

    def task_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (1/t) L_task + (1 - 1/t) L_replay + L_generator."""
        if self._generator is None:
            return super().task_loss(model, batch)
        # Read before the inputs were moved to an accelerator, which need not be waited for.
        host_x = batch.host.x
        if self.pixels and (host_x.min() < 0 or host_x.max() > 1):
            raise ValueError(
                "The generator was built for inputs in [0, 1], and these are outside: scale the inputs of all tasks to "
                "the same range."
            )
        if not self.teacher:
            task_loss, outputs = super().task_loss(model, batch)
            noise = self._draw_noise(len(batch), batch.x)
            return task_loss + self._generator.loss(batch.x, noise), outputs
        self._check_statistics(model)

        x = self._generate_inputs(batch)
        noise = self._draw_noise(len(batch), batch.x)
        outputs, generated_outputs = forward_both(model, batch, x, self.joint)
        target = teacher_outputs(model, self.teacher, x)
        replay_loss = self._replay_loss(batch, x, target, generated_outputs)

        # Weights 1/t and 1 - 1/t, divided by the number of examples: L_generator is a weighted sum.
        task_weight = self._task_weight()
        joint_noise = torch.cat([noise, self._draw_noise(len(x), x)])
        new_weights = x.new_full((len(batch),), task_weight / len(batch))
        replay_weights = x.new_full((len(x),), (1 - task_weight) / len(x))
        generator_loss = self._generator.loss(
            torch.cat([batch.x, x]), joint_noise, torch.cat([new_weights, replay_weights])
        )
        penalty = generator_loss + (1 - task_weight) * replay_loss
        return task_weight * batch.loss(outputs) + penalty, outputs

    def _replay_loss(self, batch: Batch, x: Tensor, target: Tensor, outputs: Tensor) -> Tensor:
        """Compute L_replay, the mean over old tasks of the loss on generated inputs.

        Args:
            batch: the current batch, for its scenario mask.
            x: x′.
            target: outputs of the old model for x′.
            outputs: outputs of the model for x′.
        """
        if not isinstance(batch.likelihood, Categorical):
            raise TypeError(f"Generative replay needs classes; {batch.likelihood} has none: use ER.")
        if outputs.dim() != 2:
            raise TypeError(
                f"Generative replay needs one row of outputs per input, got outputs of shape {tuple(outputs.shape)}."
            )

        groups = distillation_groups(self.teacher, self.current_task, target, (outputs, batch.host.allowed))
        total: Tensor = outputs.new_zeros(())
        for old, new, num_tasks, k in groups:
            if self.targets == "hard":
                y = old[target[:, old].argmax(-1)]
                t = None if batch.t is None else torch.full((len(x),), k, device=x.device)
                loss = batch.like(x, y, t).loss(outputs)
            else:
                divergence = softened_kl(target[:, old], outputs[:, old], outputs[:, new], self.temperature).sum()
                loss = self.temperature * self.temperature * divergence / len(x)
            total = total + num_tasks * loss
        return total / max(1, sum(group.num_tasks for group in groups))

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Store the model and the generator for the next task."""
        if self._generator is None:
            raise ValueError(
                "GenerativeReplay has no generator yet: call begin_task(model, task) before the task's first step."
            )
        self._open_task = None
        self.task_ids = append_task(self.task_ids, task)
        self._copy_generator_weights()
        self.next_teacher = {**snapshot_teacher(model, task, self.task_ids), "generator": self.generator_weights}

    def conflict_with(self, other: Method) -> str:
        """Refuse methods that predict with more than the model's weights, which the teacher lacks."""
        return find_teacher_conflict(other)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the current weights of the generator."""
        self._copy_generator_weights()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a method with the same settings, and rebuild its generator."""
        super().load_state_dict(state)
        self._old_generator = None
        if self.generator_weights:
            self._generator = self._load_generator(self.generator_weights)

    def _copy_generator_weights(self) -> None:
        if self._generator is not None:
            self.generator_weights = {n: v.detach().clone() for n, v in self._generator.state_dict().items()}

    def _generate_inputs(self, batch: Batch) -> Tensor:
        """Sample x′ from the generator of the last task's end."""
        if self._old_generator is None:
            self._old_generator = self._load_generator(self.teacher["generator"]).requires_grad_(False)
        return self._old_generator.sample(self._draw_noise(self.size or len(batch), batch.x))

    def _task_weight(self) -> float:
        """Return 1/t."""
        ids: list[int] = self.teacher["ids"]
        return 1 / (1 + sum(k != self.current_task for k in ids))

    def _draw_noise(self, rows: int, like: Tensor) -> Tensor:
        """Draw standard normal noise from its own sequence, which does not change the model's random numbers."""
        self.num_draws += 1
        source = generator(distributed.rank(), "generative", self.num_draws)
        return torch.randn(rows, self.latent, generator=source).to(like)

    def _build_generator(self, model: nn.Module, task: Any) -> VAE:
        """Build a generator for the shape and the range of the first task's inputs."""
        batch = next(as_task(task).examples(256), None)
        if batch is None or not isinstance(batch.x, Tensor) or not batch.x.is_floating_point():
            raise TypeError(
                "GenerativeReplay needs inputs that are tensors of floating-point numbers, vectors or small images."
            )
        self.input_shape = list(batch.x.shape[1:])
        self.pixels = bool(batch.x.min() >= 0 and batch.x.max() <= 1)
        with seeded(derive(0, "generative")):
            vae = VAE(self.input_shape, self.pixels, self.hidden, self.latent)
        p = next(model.parameters())
        return vae.to(p.device, p.dtype)

    def _load_generator(self, weights: dict[str, Tensor]) -> VAE:
        """Build a generator with these weights."""
        with seeded(0):
            vae = VAE(self.input_shape, self.pixels, self.hidden, self.latent)
        weight = next(iter(weights.values()))
        vae.to(weight.device, weight.dtype).load_state_dict(copy.deepcopy(weights))
        return vae
