"""Generative replay: dream up old inputs instead of keeping them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.forward import forward
from everlearn.core.hyperparameters import Range
from everlearn.core.likelihood import Categorical
from everlearn.core.method import Method
from everlearn.core.task import as_task
from everlearn.core.traits import Traits
from everlearn.methods.regularization.teacher import (
    Teacher,
    append_task,
    distillation_groups,
    snapshot_teacher,
    softened_kl,
    teacher_outputs,
)
from everlearn.nets.vae import VAE
from everlearn.runtime import distributed
from everlearn.runtime.randomness import derive, generator, seeded


@dataclass(eq=False)
class GenerativeReplay(Method):
    """Deep generative replay (Shin et al., NeurIPS 2017), with a variational autoencoder.

        L = (1/t) L_task + (1 - 1/t) L_replay + L_generator,   t the number of tasks, this one included
        L_replay: on inputs x′ from the generator as it was before this task, labelled by the model as it was
        L_generator = (1/t) · (-ELBO of x) + (1 - 1/t) · (-ELBO of x′)

    No old example is kept. The generator's parameters are the method's own and learn with the same optimizer, at the same time.
    Where tasks have outputs of their own, every old task is asked about every x′ and the losses are averaged, as van de Ven &
    Tolias (2019) do. Inputs are tensors of numbers: vectors, or images small enough for a perceptron. New and generated ones go
    through the model together, so that a BatchNorm sees both.

    Args:
        size: how many inputs are generated at a step; by default as many as the current batch has.
        targets: "hard" labels, the old model's most likely ones, or "soft" ones: its probabilities at the temperature, and a
            divergence times T².
        temperature: T of soft targets.
        hidden: width of the generator's layers.
        latent: length of its code.
    """

    traits = Traits(
        family="replay",
        pro="keeps no data and yet works where new classes come",
        con="as good as its generator: vectors and small images, some thousand steps a task",
        step=7.8,
        copies=(
            8.7,
        ),  # of 784-400-400-10: two of the model, the others are generators, whose size does not follow the model's
    )

    size: Annotated[int, Range(1)] | None = None
    targets: Literal["hard", "soft"] = "hard"
    temperature: Annotated[float, Range(1e-3)] = 2.0
    hidden: Annotated[int, Range(1)] = 400
    latent: Annotated[int, Range(1)] = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inputs: list[int] = []
        self.pixels: bool = True
        self.weights: dict[str, Tensor] = {}  # the generator's, while it learns
        self.latest: Teacher = {}
        self.teacher: Teacher = {}
        self.learned: list[int] = []
        self.current: int | None = None
        self.draws = 0
        self._generator: VAE | None = None
        self._past: VAE | None = None
        self._new = 0  # how many examples a batch has before what is made up: x′, and what the model has said to it
        self._dream: Tensor | None = None
        self._said: Tensor | None = None

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """The generator and the model as the last task left them become the source of what is replayed."""
        self.current = getattr(task, "id", None)
        if self._generator is None:
            self._generator = self._build(model, task)
        self._generator.to(next(model.parameters()).device)
        if self.latest and (self.current is None or self.current != self.latest["ids"][-1]):
            self.teacher, self._past = self.latest, None

    def parameters(self) -> list[nn.Parameter]:
        """The generator's."""
        return [] if self._generator is None else list(self._generator.parameters())

    def extra_parameters(self, model: nn.Module) -> int:
        """None: the generator serves training alone."""
        return 0

    def join(self, batch: Batch) -> Batch:
        """The batch, and inputs that the generator makes up, which have no labels yet: one pass costs less than two."""
        if not self.teacher:
            return batch
        self._new, self._dream = len(batch), self._made_up(batch)
        return replace(batch, x=torch.cat([batch.x, self._dream]))

    def task_loss(self, batch: Batch, out: Tensor) -> Tensor:
        """The share of the current task."""
        if self._dream is None:
            return batch.loss(out)
        self._said = out[self._new :]
        return self._share() * batch[: self._new].loss(out[: self._new])

    def penalty(self, model: nn.Module, batch: Batch | None = None, out: Tensor | None = None) -> Tensor | float:
        """What is replayed, and the generator's own lesson."""
        if batch is None or self._generator is None:
            return 0.0
        if self.pixels and (batch.x.min() < 0 or batch.x.max() > 1):
            raise ValueError(
                "The generator has begun with inputs in [0, 1], these are not: scale all tasks' inputs alike."
            )
        noise = self._noise(len(batch), batch.x)
        if not self.teacher:
            return self._generator.loss(batch.x, noise)
        self._check_statistics(model)
        share, x, said = self._share(), self._dream, self._said
        self._dream = self._said = None
        if x is None or said is None:  # asked for the penalty alone
            x = self._made_up(batch)
            said = forward(model, x)
        both, noise = torch.cat([batch.x, x]), torch.cat([noise, self._noise(len(x), x)])
        weights = [x.new_full((len(batch),), share / len(batch)), x.new_full((len(x),), (1 - share) / len(x))]
        replayed = self._replayed(batch, x, teacher_outputs(model, self.teacher, x), said)
        return self._generator.loss(both, noise, torch.cat(weights)) + (1 - share) * replayed

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Remember the model and its generator as they are."""
        if self._generator is None:
            raise ValueError(
                "GenerativeReplay has no generator yet: call begin_task(model, task) before the task's first step."
            )
        self.learned = append_task(self.learned, task)
        self.weights = {n: v.detach().clone() for n, v in self._generator.state_dict().items()}
        self.latest = {**snapshot_teacher(model, task, self.learned), "generator": self.weights}

    def state_dict(self) -> dict[str, Any]:
        """With the generator as it is just now."""
        if self._generator is not None:
            self.weights = {n: v.detach().clone() for n, v in self._generator.state_dict().items()}
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another had learned, its generator included."""
        super().load_state_dict(state)
        self._past = None
        if self.weights:
            self._generator = self._vae(self.weights)

    def _made_up(self, batch: Batch) -> Tensor:
        """Inputs from the generator as it was before this task."""
        if self._past is None:
            self._past = self._vae(self.teacher["generator"]).requires_grad_(False)
        return self._past.sample(self._noise(self.size or len(batch), batch.x))

    def _replayed(self, batch: Batch, x: Tensor, target: Tensor, out: Tensor) -> Tensor:
        if not isinstance(batch.likelihood, Categorical):
            raise TypeError(f"Generative replay is about classes; {batch.likelihood} has none: use ER.")
        if out.dim() != 2:
            raise TypeError(
                f"Generative replay needs one row of outputs per input, got outputs of shape {tuple(out.shape)}."
            )
        now = (out, batch.allowed)
        asked = distillation_groups(self.teacher, self.current, target, now)
        total: Tensor = out.new_zeros(())
        for old, new, times, k in asked:
            if self.targets == "hard":
                y = old[target[:, old].argmax(-1)]
                t = None if batch.t is None else torch.full((len(x),), k, device=x.device)
                loss = batch.like(x, y, t).loss(out)
            else:
                apart = softened_kl(target[:, old], out[:, old], out[:, new], self.temperature).sum()
                loss = self.temperature * self.temperature * apart / len(x)
            total = total + times * loss
        count = max(1, sum(times for _, _, times, _ in asked))
        return total / count

    def _share(self) -> float:
        ids: list[int] = self.teacher["ids"]
        return 1 / (1 + sum(k != self.current for k in ids))

    def _noise(self, rows: int, like: Tensor) -> Tensor:
        """From a sequence of its own, which does not shift the model's random numbers."""
        self.draws += 1
        source = generator(distributed.rank(), "generative", self.draws)
        return torch.randn(rows, self.latent, generator=source).to(like)

    def _build(self, model: nn.Module, task: Any) -> VAE:
        """A generator for this task's inputs."""
        batch = next(as_task(task).examples(256), None)
        if batch is None or not isinstance(batch.x, Tensor) or not batch.x.is_floating_point():
            raise TypeError(
                "GenerativeReplay needs inputs that are tensors of floating-point numbers, vectors or small images."
            )
        self.inputs, self.pixels = list(batch.x.shape[1:]), bool(batch.x.min() >= 0 and batch.x.max() <= 1)
        with seeded(derive(0, "generative")):
            vae = VAE(self.inputs, self.pixels, self.hidden, self.latent)
        like = next(model.parameters())
        return vae.to(like.device, like.dtype)

    def _vae(self, weights: dict[str, Tensor]) -> VAE:
        with seeded(0):
            vae = VAE(self.inputs, self.pixels, self.hidden, self.latent)
        like = next(iter(weights.values()))
        vae.to(like.device, like.dtype).load_state_dict(copy.deepcopy(weights))
        return vae
