"""Starting point of the trials of one seed, whatever trains them."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everlearn.core.method import Method
from everlearn.core.stream import Stream
from everlearn.results.result import Result
from everlearn.trainer.checkpoints import CheckpointEvery, Checkpoints
from everlearn.trainer.config import build
from everlearn.trainer.run import finished
from everlearn.tuning.search_space import Dimension, Value, with_values

OnRows = Callable[[Sequence[Sequence[float]]], None]  # called with the rows of the accuracy matrix


class TrialPruned(Exception):
    """A trial is worse than most others."""


@dataclass
class Start(ABC):
    """Starting point of all trials of one seed.

    Args:
        make_model: model or function that makes one, as for ``run``.
        method: method whose fields are tuned.
        dimensions: these fields.
        stream: tasks to train on.
        seed: seed of the trials.
        device: device to train on.
        folder: folder of the study.
        checkpoint_every: interval between checkpoints; None writes none.
    """

    make_model: Callable[..., nn.Module] | nn.Module
    method: Method
    dimensions: Sequence[Dimension]
    stream: Stream
    seed: int
    device: torch.device | None
    folder: Path
    checkpoint_every: CheckpointEvery | None

    # Weak references: a model lives as long as its trial.
    _built_models: list[weakref.ref[nn.Module]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.num_tasks < 2:
            raise ValueError(
                "Tuning measures what later tasks do to earlier ones: give a stream of at least two tasks."
            )

    @property
    def num_tasks(self) -> int:
        """Number of tasks that a trial is scored on."""
        return len(self.stream.test_tasks)

    @abstractmethod
    def prepare(self) -> None:
        """Train what all trials share, before processes are forked."""

    @abstractmethod
    def config(self, method: Method) -> dict[str, Any]:
        """Configuration of the run with a method."""

    @abstractmethod
    def _train_stream(
        self,
        method: Method,
        values: Sequence[Value],
        config: dict[str, Any],
        checkpoints: Checkpoints | None,
        on_rows: OnRows,
    ) -> Result:
        """Train on the whole stream, from the trial's checkpoint, a copy of the shared first task, or the beginning."""

    @abstractmethod
    def _make_checkpoints(self, folder: Path, config: dict[str, Any]) -> Checkpoints | None:
        """Checkpoints of a run; None if it cannot be resumed exactly."""

    def close(self) -> None:  # noqa: B027 - optional
        """Remove the files of what all trials share, when all have ended."""

    def train_trial(self, values: Sequence[Value], on_rows: OnRows) -> Result:
        """Train with these values and save the result, which equals that of a separate run.

        Args:
            values: values of the tuned fields.
            on_rows: called after every task with the scores after each task so far; may raise ``TrialPruned``.
        """
        method = with_values(self.method, self.dimensions, values)
        config = self.config(method)
        folder = self.folder / "trials"
        checkpoints = self._make_checkpoints(folder, config)

        # Two trials of several fields may get the same values at the same time: the second reads the first's result.
        with nullcontext() if checkpoints is None else checkpoints.alone(wait=True):
            result = finished(folder, config)
            if result is not None:
                on_rows(result.accuracy.tolist())
            else:
                try:
                    result = self._train_stream(method, values, config, checkpoints, on_rows)
                except (TrialPruned, FloatingPointError):
                    if checkpoints is not None:
                        checkpoints.clear()
                    raise
                result.save(folder)
            if checkpoints is not None:
                checkpoints.clear()
        return result

    def _build_model(self) -> nn.Module:
        model = build(self.make_model, self.stream).to(self.device)
        self._built_models = [reference for reference in self._built_models if reference() is not None]
        if any(model is reference() for reference in self._built_models):
            raise ValueError(
                "make_model returns the same module at every call: give the module itself, which is copied."
            )
        self._built_models.append(weakref.ref(model))
        return model
