"""Learning a whole stream, tested after every task, as one result."""

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

from everlearn import atomic
from everlearn.checks import check_run
from everlearn.distributed import agreed, rank
from everlearn.method import Method, label
from everlearn.results import Result, amount, file_name, provenance
from everlearn.seeds import derive, restore, seeded, states
from everlearn.stream import Split, Stream
from everlearn.trainer.checkpoints import Every, Unusable, checkpoints_of
from everlearn.trainer.configuration import build, configuration
from everlearn.trainer.course import Course
from everlearn.trainer.tracking import Journal, Tracker
from everlearn.trainer.training import (
    OptimizerFactory,
    Precision,
    SchedulerFactory,
    Training,
    adam,
    device_of,
    hide_bar,
)


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
    checkpoint: Every | None = Every(),  # noqa: B008 - frozen
) -> Result:
    """Learn a whole stream and test on all tasks after each.

    One seed gives one result, bit for bit; your random state, your method and your model stay as they were. Called by every process of
    ``torch.distributed``, they learn together, each a share of every batch; the first of them writes.

    Args:
        make_model: a function of (inputs, outputs), the shape of one input and the number of outputs, such as
            ``nets.mlp``; or one without arguments; or a module, which is copied.
        method: what protects the earlier tasks.
        stream: what is learned, in order.
        optimizer: a function of the parameters that makes one.
        epochs: passes over each task's data.
        iterations: optimizer steps per task, instead of epochs; joint training takes as many for every task it has merged.
        batch_size: examples per step.
        seed: of the model's first weights and of the order of the examples.
        scheduler: a function (optimizer, planned steps) that makes one, per task.
        clip: largest norm of the whole gradient.
        accumulate: micro-batches per step.
        precision: "bfloat16" runs the forward pass under autocast.
        keep_optimizer: go on with the same optimizer, its momenta included, instead of a fresh one per task.
        split: which data to test on; "valid" to choose hyper-parameters.
        device: where to train; by default where the model is.
        progress: progress bars; by default only on a terminal.
        trackers: who is told what happens while it happens, such as ``everlearn.integrations.tensorboard.TensorBoard()``.
        out: a folder for the result; a run that is there already is read instead of done again ...
        force: ... unless you force it. A run on what cannot be told apart (a generator) is always done.
        checkpoint: how often the run writes down where it is, in the folder: a run that was killed goes on from there when it is
            called again, and ends as if nothing had happened, bit for bit. None for never.

    >>> from everlearn import nets, streams
    >>> result = run(nets.mlp, Method(), streams.digits(scenario="class"), epochs=5)
    >>> result.accuracy.shape, result.average_accuracy < 0.25
    ((5, 5), True)
    """
    check_run(method, stream, optimizer, seed, split)
    folder, seed = None if out is None else atomic.writable_folder(out), operator.index(seed)
    progress = progress if rank() == 0 else False
    training = Training(epochs, iterations, batch_size, seed, scheduler, clip, accumulate, precision, progress)
    if training.iterations is not None:
        training = replace(training, iterations=training.iterations * stream.merged)
    given = method

    def make_anew() -> tuple[nn.Module, Method]:
        return build(make_model, stream).to(device), copy.deepcopy(given)

    def learn(model: nn.Module, method: Method) -> Course:
        journal.step = 0
        course = Course(model, method, stream, training, optimizer, keep_optimizer, split, journal, saver)
        _go_through(course, label(method), progress, config["score"])
        return course

    with seeded(derive(seed, "model"), None if device is None else torch.device(device)):
        begun = states(None if device is None else torch.device(device))
        model, method = make_anew()
        config = agreed(configuration(stream, method, model, training, optimizer, keep_optimizer, split))
        saver = checkpoints_of(folder, config, stream, checkpoint)
        if folder is not None and not force:
            done: Result | None = agreed(finished(folder, config) if rank() == 0 else None)
            if done is not None:
                if saver is not None:
                    saver.tidy()
                return done
        made, journal, result = provenance(), Journal(trackers if rank() == 0 else ()), None
        with nullcontext() if saver is None else saver.alone(anew=force):
            journal.start(config)
            try:
                course = _from_any_checkpoint(learn, make_anew, model, method, begun)
                made |= {"gone_on_from": course.gone_on_from} if course.gone_on_from else {}
                result = course.result(config, made)
            finally:
                journal.finish(result)
            if folder is not None and rank() == 0:
                result.save(folder)
            agreed(None)  # or the others would forget where they were before the result is there
            if saver is not None:
                saver.clear()
    return result


def _from_any_checkpoint(
    learn: Callable[[nn.Module, Method], Course],
    make_anew: Callable[[], tuple[nn.Module, Method]],
    model: nn.Module,
    method: Method,
    begun: tuple[Any, ...],
) -> Course:
    """Learn the stream, from an earlier checkpoint where the newest does not fit.

    Args:
        learn: goes on from the newest checkpoint.
        make_anew: another model and method, as the run begins with them; nothing was loaded into them in part.
        model: the first.
        method: the first.
        begun: the random states when the first model was made.
    """
    random = states(device_of(model))
    while True:
        try:
            return learn(model, method)
        except Unusable as error:
            warnings.warn(str(error), stacklevel=3)
            unusable = model
            restore(begun)
            model, method = make_anew()
            if model is unusable:  # the function gives one module again and again, and another process has a fresh one
                raise
            restore(random)


def _go_through(course: Course, name: str, progress: bool | None, score: str) -> None:
    """All tasks that are left."""
    tasks, hidden = len(course.stream), hide_bar(progress)
    with tqdm(total=tasks, initial=course.at, desc=name, unit="task", leave=False, disable=hidden) as bar:
        while course.at < tasks:
            course.train()
            course.close()
            bar.update()
            if course.rows:
                bar.set_postfix_str(f"so far {amount(course.so_far, score)}")


def finished(folder: Path, config: dict[str, Any]) -> Result | None:
    """The result of a run done before; None where there is none, where it is torn, or where nobody can tell."""
    path = folder / file_name(config)
    try:
        result = Result.load(path) if path.exists() else None
    except ValueError:
        warnings.warn(f"{path} is no whole result: the run is done again, and replaces it.", stacklevel=2)
        return None
    if result is not None and file_name(result.config) != path.name:
        warnings.warn(f"{path} is the result of another run: the run is done, and replaces it.", stacklevel=2)
        return None
    return None if result is None or None in result.config["fingerprints"].values() else result
