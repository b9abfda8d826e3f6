"""Where the trials of one seed begin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from everlearn.method import Method
from everlearn.results import Result, provenance
from everlearn.seeds import derive, restore, seeded, states
from everlearn.stream import Stream
from everlearn.trainer.configuration import build, configuration
from everlearn.trainer.course import Course
from everlearn.trainer.tracking import Journal
from everlearn.trainer.training import OptimizerFactory, Training
from everlearn.tuning.space import Dimension, Value, change, changed


@dataclass
class Start:
    """Where the trials of one seed begin: after the first task's training, where that is the same for all of them."""

    make_model: Callable[..., nn.Module] | nn.Module
    method: Method
    at: Sequence[Dimension]
    stream: Stream
    training: Training
    optimizer: OptimizerFactory
    keep_optimizer: bool
    device: torch.device | None

    def __post_init__(self) -> None:
        if missing := [str(exam) for exam in self.stream.exams if exam.valid is None]:
            raise ValueError(f"Tuning needs validation data, {missing[0]} has none: make the stream with valid=0.1.")

    def learn(self, values: Sequence[Value], told: Callable[[Course], None]) -> Result:
        """The result that a run with these values has; after every task somebody is told, who may put an end to it."""
        config, made = self.config(changed(self.method, self.at, values)), provenance()
        with self._seeded():
            if self.shares:
                shared, random = self._shared
                course = shared.fork()
                restore(random)
                change(course.method, self.at, values)
            else:
                course = self._begun(changed(self.method, self.at, values))
            while True:
                course.close()
                random = states(self.device)  # who is told may draw numbers of its own
                told(course)
                restore(random)
                if course.at == len(self.stream):
                    return course.result(config, made)
                course.train()

    def config(self, method: Method) -> dict[str, Any]:
        """That of the run with a method."""
        return configuration(
            self.stream, method, self._model, self.training, self.optimizer, self.keep_optimizer, "valid"
        )

    @property
    def shares(self) -> bool:
        """Whether the first task is the same for all trials."""
        return all(d.search.late for d in self.at)

    @cached_property
    def _model(self) -> nn.Module:
        """With its first weights."""
        with self._seeded():
            return build(self.make_model, self.stream).to(self.device)

    @cached_property
    def _shared(self) -> tuple[Course, tuple[Any, ...]]:
        """Trained on the first task, and the random states after it."""
        return self._begun(copy.deepcopy(self.method)), states(self.device)

    def _begun(self, method: Method) -> Course:
        model = build(self.make_model, self.stream).to(self.device)
        course = Course(
            model, method, self.stream, self.training, self.optimizer, self.keep_optimizer, "valid", Journal()
        )
        course.train()
        return course

    def _seeded(self) -> AbstractContextManager[None]:
        return seeded(derive(self.training.seed, "model"), self.device)
