"""Starting point of trials in the trainer: the first task, trained once where all trials agree on it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.forward import forward
from everlearn.core.method import Method
from everlearn.core.parameters import evaluating
from everlearn.results.provenance import provenance
from everlearn.results.result import Result
from everlearn.runtime.randomness import RandomStates, derive, get_random_states, restore_random_states, seeded
from everlearn.trainer.checkpoints import Checkpoints, checkpoints_of
from everlearn.trainer.config import configuration, data_of
from everlearn.trainer.settings import OptimizerFactory, Training, device_of
from everlearn.trainer.stream_training import StreamTraining
from everlearn.trainer.trackers import Trackers
from everlearn.trainer.validation import check_run
from everlearn.tuning.search_space import Value, set_values
from everlearn.tuning.start import OnRows, Start


@dataclass
class SharedStart(Start):
    """Starting point of trials in the trainer: the model after the first task, where that is the same for all.

    After a process was killed, the training of the first task and every trial resume from their checkpoints.

    Args:
        training: training settings.
        optimizer: function of the parameters that makes an optimizer.
        keep_optimizer: whether to keep the optimizer between tasks.
    """

    training: Training
    optimizer: OptimizerFactory
    keep_optimizer: bool

    def __post_init__(self) -> None:
        check_run(self.method, self.stream, self.optimizer, self.seed, "valid")
        super().__post_init__()
        tasks_without_valid = [str(task) for task in self.stream.test_tasks if task.valid is None]
        if tasks_without_valid:
            raise ValueError(
                f"Tuning needs validation data, {tasks_without_valid[0]} has none: make the stream with valid=0.1."
            )

    def prepare(self) -> None:
        """Train what all trials share, before processes are forked."""
        _ = self._shared_training

    def close(self) -> None:
        """Remove the checkpoints of the first task when all trials have ended."""
        if self._first_task_checkpoints is not None:
            self._first_task_checkpoints.tidy()

    def _train_stream(
        self,
        method: Method,
        values: Sequence[Value],
        config: dict[str, Any],
        checkpoints: Checkpoints | None,
        on_rows: OnRows,
    ) -> Result:
        run_provenance = provenance()
        is_resumed = checkpoints is not None and checkpoints.newest() is not None
        shared = None if is_resumed else self._shared_training
        with self._seeded():
            if shared is None:
                training = self._new_training(method, checkpoints)
            else:
                shared_training, random_states = shared
                training = shared_training.fork(checkpoints)
                restore_random_states(random_states)
                set_values(training.method, self.dimensions, values)
                training.close()

            while True:
                # The callback may draw random numbers.
                random_states = get_random_states(self.device)
                on_rows(training.rows)
                restore_random_states(random_states)
                if training.task_index == len(self.stream):
                    return training.result(config, run_provenance)
                training.train()
                training.close()

    def config(self, method: Method) -> dict[str, Any]:
        """Configuration of the run with a method."""
        return configuration(
            self.stream,
            method,
            self._initial_model,
            self.training,
            self.optimizer,
            self.keep_optimizer,
            "valid",
            self._data_digest,
        )

    @cached_property
    def _data_digest(self) -> str | None:
        return data_of(self.stream)

    @cached_property
    def _initial_model(self) -> nn.Module:
        with self._seeded():
            return self._build_model()

    @cached_property
    def _shared_training(self) -> tuple[StreamTraining, RandomStates] | None:
        """Training after the first task, with its random states; None if trials differ in it or it cannot be copied."""
        if not all(dimension.search.late for dimension in self.dimensions):
            return None
        checkpoints = self._first_task_checkpoints
        with nullcontext() if checkpoints is None else checkpoints.alone(), self._seeded():
            training = self._new_training(copy.deepcopy(self.method), checkpoints)
            training.train()
            random_states = get_random_states(self.device)

        mismatch = fork_mismatch(training)
        if mismatch:
            warnings.warn(f"Trials do not share the first task: {mismatch}", stacklevel=2)
            return None
        return training, random_states

    @cached_property
    def _first_task_checkpoints(self) -> Checkpoints | None:
        return self._make_checkpoints(self.folder, self.config(self.method))

    def _make_checkpoints(self, folder: Path, config: dict[str, Any]) -> Checkpoints | None:
        return checkpoints_of(folder, config, self.stream, self.checkpoint_every)

    def _new_training(self, method: Method, checkpoints: Checkpoints | None) -> StreamTraining:
        return StreamTraining(
            self._build_model(),
            method,
            self.stream,
            self.training,
            self.optimizer,
            self.keep_optimizer,
            "valid",
            Trackers(),
            checkpoints,
        )

    def _seeded(self) -> AbstractContextManager[None]:
        return seeded(derive(self.seed, "model"), self.device)


@torch.no_grad()
def fork_mismatch(training: StreamTraining) -> str:
    """Reason why a copy of a training would differ from the original; empty if it would not.

    The parameters of copy and original are scaled in turn, and their outputs compared: a copy that still refers to the
    original, as hooks with closures do, gives other outputs.
    """
    try:
        fork = training.fork()
    except (RuntimeError, TypeError) as error:
        return f"the model cannot be copied ({error})"
    x = next(training.stream[training.task_index].examples(8)).to(device_of(training.model)).x

    parameters = list(training.model.parameters())
    values = [p.clone() for p in parameters]
    scaled_values = [value * 1.1 for value in values]

    _copy_values(list(fork.model.parameters()), scaled_values)
    with evaluating(fork.model):
        fork_outputs = forward(fork.model, x)
    # A parameter that both share was scaled with the copy.
    _copy_values(parameters, values)

    _copy_values(parameters, scaled_values)
    with evaluating(training.model):
        outputs = forward(training.model, x)
    _copy_values(parameters, values)

    if torch.equal(fork_outputs, outputs):
        return ""
    return "a copy of the model still refers to the original, as hooks with closures do"


def _copy_values(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)
