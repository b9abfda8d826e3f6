"""Where the trials of one seed begin."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everlearn.checks import check_run
from everlearn.forward import ask
from everlearn.method import Method
from everlearn.params import evaluating
from everlearn.results import Result, provenance
from everlearn.seeds import derive, restore, seeded, states
from everlearn.stream import Stream
from everlearn.trainer.checkpoints import Checkpoints, Every, checkpoints_of
from everlearn.trainer.configuration import build, configuration, data_of
from everlearn.trainer.course import Course
from everlearn.trainer.running import finished
from everlearn.trainer.tracking import Journal
from everlearn.trainer.training import OptimizerFactory, Training, device_of
from everlearn.tuning.space import Dimension, Value, change, changed


class GivenUp(Exception):
    """A trial is worse than most."""


@dataclass
class Start:
    """Where the trials of one seed begin: after the first task's training, where that is the same for all of them.

    The training of the first task and every trial go on where a process that was killed has left them.

    Args:
        make_model: as for ``run``.
        method: whose fields are tuned.
        at: these.
        stream: what is learned.
        training: how.
        optimizer: a function of the parameters that makes one.
        keep_optimizer: between tasks.
        device: where to train.
        folder: of the study.
        every: how often it is written down where a trial is.
    """

    make_model: Callable[..., nn.Module] | nn.Module
    method: Method
    at: Sequence[Dimension]
    stream: Stream
    training: Training
    optimizer: OptimizerFactory
    keep_optimizer: bool
    device: torch.device | None
    folder: Path
    every: Every | None

    def __post_init__(self) -> None:
        check_run(self.method, self.stream, self.optimizer, self.training.seed, "valid")
        if len(self.stream.exams) < 2:
            raise ValueError(
                "Tuning is about what later tasks do to earlier ones: the stream needs two tasks at least."
            )
        self._made: list[weakref.ref[nn.Module]] = []  # a model lives as long as its trial
        if missing := [str(exam) for exam in self.stream.exams if exam.valid is None]:
            raise ValueError(f"Tuning needs validation data, {missing[0]} has none: make the stream with valid=0.1.")

    def prepare(self) -> None:
        """Learn what all trials share, before there are several processes of them."""
        _ = self._shared

    def close(self) -> None:
        """There are no more trials."""
        if self._first is not None:
            self._first.tidy()

    def learn(self, values: Sequence[Value], told: Callable[[Sequence[Sequence[float]]], None]) -> Result:
        """The result that a run with these values has, which is saved.

        Args:
            values: of the fields.
            told: who is told after every task of the scores after each so far, and may raise ``GivenUp``.
        """
        method = changed(self.method, self.at, values)
        config, made, folder = self.config(method), provenance(), self.folder / "trials"
        saver = checkpoints_of(folder, config, self.stream, self.every)
        # Several fields may be given the same values twice at a time: the second trial reads the result of the first.
        with nullcontext() if saver is None else saver.alone(wait=True):
            result = finished(folder, config)
            if result is not None:
                told(result.accuracy.tolist())
            else:
                try:
                    result = self._learned(method, values, saver, told).result(config, made)
                except (GivenUp, FloatingPointError):
                    if saver is not None:
                        saver.clear()
                    raise
                result.save(folder)
            if saver is not None:
                saver.clear()
        return result

    def _learned(
        self,
        method: Method,
        values: Sequence[Value],
        saver: Checkpoints | None,
        told: Callable[[Sequence[Sequence[float]]], None],
    ) -> Course:
        """A course that was gone through, from where an earlier process was, or from what all trials share."""
        goes_on = saver is not None and saver.newest() is not None
        begun = None if goes_on else self._shared
        with self._seeded():
            if begun is None:
                course = self._begun(method, saver)
            else:
                shared, random = begun
                course = shared.fork(saver)
                restore(random)
                change(course.method, self.at, values)
                course.close()
            while True:
                random = states(self.device)  # who is told may draw numbers of its own
                told(course.rows)
                restore(random)
                if course.at == len(self.stream):
                    return course
                course.train()
                course.close()

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
        with nullcontext() if self._first is None else self._first.alone(), self._seeded():
            course = self._begun(copy.deepcopy(self.method), self._first)
            course.train()
            random = states(self.device)
        if why := unfaithful(course):
            warnings.warn(f"Trials do not share the first task: {why}", stacklevel=2)
            return None
        return course, random

    def _build(self) -> nn.Module:
        model = build(self.make_model, self.stream).to(self.device)
        self._made = [other for other in self._made if other() is not None]
        if any(model is other() for other in self._made):
            raise ValueError("make_model gives one module again and again: give the module itself, which is copied.")
        self._made.append(weakref.ref(model))
        return model

    @cached_property
    def _first(self) -> Checkpoints | None:
        """Of the first task, as all trials share it."""
        return checkpoints_of(self.folder, self.config(self.method), self.stream, self.every)

    def _begun(self, method: Method, saver: Checkpoints | None) -> Course:
        t, made = self.training, self._build()
        return Course(made, method, self.stream, t, self.optimizer, self.keep_optimizer, "valid", Journal(), saver)

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
            said.append(ask(one.model, x))
        if side:
            for (p, _), value in zip(pairs, before, strict=True):
                p.copy_(value)
    for (p, _), value in zip(pairs, before, strict=True):
        p.copy_(value)
    return "" if torch.equal(*said) else "a copy of the model still looks at the original, as hooks with closures do"
