"""Where the trials of one seed begin."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from everlearn.checks import check_run
from everlearn.method import Method
from everlearn.params import evaluating
from everlearn.results import Result, provenance
from everlearn.seeds import derive, restore, seeded, states
from everlearn.stream import Stream
from everlearn.trainer.configuration import build, configuration, data_of
from everlearn.trainer.course import Course
from everlearn.trainer.tracking import Journal
from everlearn.trainer.training import OptimizerFactory, Training, device_of
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
        check_run(self.method, self.stream, self.optimizer, self.training.seed, "valid")
        if len(self.stream.exams) < 2:
            raise ValueError(
                "Tuning is about what later tasks do to earlier ones: the stream needs two tasks at least."
            )
        self._made: list[nn.Module] = []
        if missing := [str(exam) for exam in self.stream.exams if exam.valid is None]:
            raise ValueError(f"Tuning needs validation data, {missing[0]} has none: make the stream with valid=0.1.")

    def prepare(self) -> None:
        """Learn what all trials share, before there are several processes of them."""
        _ = self._shared

    def learn(self, values: Sequence[Value], told: Callable[[Course], None]) -> Result:
        """The result that a run with these values has; after every task somebody is told, who may put an end to it."""
        config, made, begun = self.config(changed(self.method, self.at, values)), provenance(), self._shared
        with self._seeded():
            if begun is not None:
                shared, random = begun
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
            self.stream, method, self._model, self.training, self.optimizer, self.keep_optimizer, "valid", self._data
        )

    @cached_property
    def _data(self) -> str | None:
        return data_of(self.stream)

    @cached_property
    def _model(self) -> nn.Module:
        """With its first weights."""
        with self._seeded():
            return self._build()

    @cached_property
    def _shared(self) -> tuple[Course, tuple[Any, ...]] | None:
        """Trained on the first task, and the random states after it; None where trials differ in it or cannot be forked."""
        if not all(d.search.late for d in self.at):
            return None
        with self._seeded():
            course, random = self._begun(copy.deepcopy(self.method)), states(self.device)
        if why := unfaithful(course):
            warnings.warn(f"Trials do not share the first task: {why}", stacklevel=2)
            return None
        return course, random

    def _build(self) -> nn.Module:
        model = build(self.make_model, self.stream).to(self.device)
        if any(model is other for other in self._made):
            raise ValueError("make_model gives one module again and again: give the module itself, which is copied.")
        self._made.append(model)
        return model

    def _begun(self, method: Method) -> Course:
        model = self._build()
        course = Course(
            model, method, self.stream, self.training, self.optimizer, self.keep_optimizer, "valid", Journal()
        )
        course.train()
        return course

    def _seeded(self) -> AbstractContextManager[None]:
        return seeded(derive(self.training.seed, "model"), self.device)


@torch.no_grad()
def unfaithful(course: Course) -> str:
    """Why a fork of a course would not be the course again; empty where it is.

    Both are moved alike and asked: a copy that still looks at the original, as closures do, gives itself away.
    """
    try:
        other = course.fork()
    except (RuntimeError, TypeError) as error:
        return f"the model cannot be copied ({error})"
    x = next(course.stream[course.at].examples(8)).to(device_of(course.model)).x
    pairs = list(zip(course.model.parameters(), other.model.parameters(), strict=True))
    before = [p.clone() for p, _ in pairs]
    said = []
    for one, side in ((other, 1), (course, 0)):
        for pair, value in zip(pairs, before, strict=True):
            pair[side].copy_(value * 1.1)
        with evaluating(one.model):
            said.append(one.model(x))
        if side:
            for (p, _), value in zip(pairs, before, strict=True):
                p.copy_(value)
    for (p, _), value in zip(pairs, before, strict=True):
        p.copy_(value)
    return "" if torch.equal(*said) else "a copy of the model still looks at the original, as hooks with closures do"
