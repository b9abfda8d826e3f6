"""Training on a stream with tests after every task; returns one result."""

from __future__ import annotations

import copy
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from everlearn.core.chain import label
from everlearn.core.method import Method
from everlearn.core.stream import Stream
from everlearn.core.task import Split
from everlearn.results.provenance import provenance
from everlearn.results.result import Result, file_name, format_score
from everlearn.runtime import files
from everlearn.runtime.distributed import broadcast_object, rank
from everlearn.runtime.randomness import RandomStates, derive, get_random_states, restore_random_states, seeded
from everlearn.trainer.checkpoints import CheckpointEvery, Unusable, checkpoints_of
from everlearn.trainer.config import build, configuration
from everlearn.trainer.settings import (
    OptimizerFactory,
    Precision,
    SchedulerFactory,
    Training,
    adam,
    device_of,
    hide_bar,
)
from everlearn.trainer.stream_training import StreamTraining
from everlearn.trainer.trackers import Tracker, Trackers
from everlearn.trainer.validation import check_run


def run(
    make_model: Callable[..., nn.Module] | nn.Module,
    method: Method,
    stream: Stream,
    *,
    optimizer: OptimizerFactory = adam,
    epochs: int = 1,
    iterations: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    scheduler: SchedulerFactory | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    precision: Precision = "float32",
    keep_optimizer: bool = False,
    split: Split = "test",
    device: str | torch.device | None = None,
    progress: bool | None = None,
    trackers: Sequence[Tracker] = (),
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    checkpoint: CheckpointEvery | None = CheckpointEvery(),  # noqa: B008 - frozen
) -> Result:
    """Train a model on a stream and test it on all tasks after each task.

    Equal seeds give bit-identical results. The global random states, ``method`` and a given module are not changed.
    Under ``torch.distributed`` all processes call this function: each trains on its share of every batch, and the
    first one writes the result.

    Args:
        make_model: a function of (input shape, number of outputs), such as ``nets.mlp``; or a function without
            arguments; or a module, which is copied.
        method: the continual-learning method.
        stream: the tasks, in order.
        optimizer: a function from parameters to an optimizer.
        epochs: passes over each task's data.
        iterations: optimizer steps per task, instead of epochs; joint training takes as many for every merged task.
        batch_size: examples per step.
        seed: seed for the model's initial weights and the order of the examples.
        scheduler: a function (optimizer, planned steps) that returns a scheduler, called once per task.
        clip: maximum norm of the gradient.
        accumulate: micro-batches per step.
        precision: "bfloat16" runs the forward pass under autocast.
        keep_optimizer: continue with the same optimizer, including its momenta, instead of a new one per task.
        split: the data to test on; "valid" to choose hyper-parameters.
        device: device to train on; by default the model's.
        progress: whether to show progress bars; by default only on a terminal.
        trackers: loggers of the run, such as ``everlearn.integrations.tensorboard.TensorBoard()``.
        out: a folder for the result; if it already has the result of this run, that is loaded instead.
        force: run even if the result exists. Runs whose data cannot be hashed (generators) are never cached.
        checkpoint: the interval between checkpoints in the folder. A killed run resumes from the last one when it is
            called again, and ends with bit-identical results. None for no checkpoints.

    Returns:
        The accuracy matrix with the configuration and the costs of the run.

    >>> from everlearn import nets, streams
    >>> result = run(nets.mlp, Method(), streams.digits(scenario="class"), epochs=5)
    >>> result.accuracy.shape, result.average_accuracy < 0.25
    ((5, 5), True)
    """
    check_run(method, stream, optimizer, seed, split)
    folder = None if out is None else files.writable_folder(out)
    seed = operator.index(seed)
    if rank() > 0:
        progress = False
    training = Training(epochs, iterations, batch_size, seed, scheduler, clip, accumulate, precision, progress)
    if training.iterations is not None:
        training = replace(training, iterations=training.iterations * stream.merged)
    original_method = method
    random_device = None if device is None else torch.device(device)

    def create() -> tuple[nn.Module, Method]:
        return build(make_model, stream).to(device), copy.deepcopy(original_method)

    def learn(model: nn.Module, method: Method) -> StreamTraining:
        run_trackers.step = 0
        stream_training = StreamTraining(
            model, method, stream, training, optimizer, keep_optimizer, split, run_trackers, checkpoints
        )
        _train_remaining(stream_training, label(method), progress, config["score"])
        return stream_training

    with seeded(derive(seed, "model"), random_device):
        initial_random = get_random_states(random_device)
        model, method = create()
        config = broadcast_object(configuration(stream, method, model, training, optimizer, keep_optimizer, split))
        checkpoints = checkpoints_of(folder, config, stream, checkpoint)

        # The first process reads, so that all processes decide alike.
        if folder is not None and not force:
            cached: Result | None = broadcast_object(finished(folder, config) if rank() == 0 else None)
            if cached is not None:
                if checkpoints is not None:
                    checkpoints.tidy()
                return cached

        run_provenance = provenance()
        run_trackers = Trackers(trackers if rank() == 0 else ())
        result = None
        with nullcontext() if checkpoints is None else checkpoints.alone(restart=force):
            run_trackers.start(config)
            try:
                stream_training = _learn_from_checkpoints(learn, create, model, method, initial_random)
                if stream_training.resumed_from:
                    run_provenance["resumed_from"] = stream_training.resumed_from
                result = stream_training.result(config, run_provenance)
            finally:
                run_trackers.finish(result)

            if folder is not None and rank() == 0:
                result.save(folder)
            # A barrier: no process may delete its checkpoints before the result is saved.
            broadcast_object(None)
            if checkpoints is not None:
                checkpoints.clear()
    return result


def _learn_from_checkpoints(
    learn: Callable[[nn.Module, Method], StreamTraining],
    create: Callable[[], tuple[nn.Module, Method]],
    model: nn.Module,
    method: Method,
    initial_random: RandomStates,
) -> StreamTraining:
    """Train on the stream; if the newest checkpoint does not fit, try again from an earlier one.

    Args:
        learn: trains from the newest checkpoint.
        create: creates a new model and method, since a failed attempt leaves them partly loaded.
        model: the model of the first attempt.
        method: the method of the first attempt.
        initial_random: the random states before the first model was created.
    """
    random_after_creation = get_random_states(device_of(model))
    while True:
        try:
            return learn(model, method)
        except Unusable as error:
            warnings.warn(str(error), stacklevel=3)
            partly_loaded = model
            restore_random_states(initial_random)
            model, method = create()
            # A function that returns the same module each time cannot give a new one; a new process can.
            if model is partly_loaded:
                raise
            restore_random_states(random_after_creation)


def _train_remaining(stream_training: StreamTraining, name: str, progress: bool | None, score: str) -> None:
    """Train, consolidate and test the remaining tasks, with a progress bar.

    Args:
        stream_training: the training of the stream.
        name: the name of the method, shown in the bar.
        progress: whether to show the bar.
        score: the name of the score, which decides how it is shown.
    """
    num_tasks = len(stream_training.stream)
    with tqdm(
        total=num_tasks,
        initial=stream_training.task_index,
        desc=name,
        unit="task",
        leave=False,
        disable=hide_bar(progress),
    ) as bar:
        while stream_training.task_index < num_tasks:
            stream_training.train()
            stream_training.close()
            bar.update()
            if stream_training.rows:
                bar.set_postfix_str(f"so far {format_score(stream_training.average_so_far, score)}")


def finished(folder: Path, config: dict[str, Any]) -> Result | None:
    """Load the result of a finished run.

    Returns:
        The result; None if there is none, if the file is damaged, or if the run cannot be identified by hashes.
    """
    path = folder / file_name(config)
    if not path.exists():
        return None
    try:
        result = Result.load(path)
    except ValueError:
        warnings.warn(f"{path} is damaged or not a result: the run is repeated, and replaces it.", stacklevel=2)
        return None
    if file_name(result.config) != path.name:
        warnings.warn(f"{path} is the result of another run: this run replaces it.", stacklevel=2)
        return None
    if None in result.config["fingerprints"].values():
        return None
    return result
