"""Tune the fields of a method on validation data, with resumable trials that share the first task."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from everlearn.core.chain import label
from everlearn.core.method import Method
from everlearn.core.stream import Stream
from everlearn.experiments.executors import WorkerLost
from everlearn.runtime import files
from everlearn.runtime.distributed import world_size
from everlearn.runtime.fingerprint import fingerprint
from everlearn.runtime.optional_imports import import_optional
from everlearn.trainer.checkpoints import CheckpointEvery
from everlearn.trainer.settings import OptimizerFactory, Training, adam, hide_bar
from everlearn.trainer.validation import check_settings
from everlearn.tuning import storage
from everlearn.tuning.loop_start import EvaluateFunction, LoopStart, TrainFunction, as_stream
from everlearn.tuning.search_space import Dimension, SearchRange, check_values, find_dimensions, with_values
from everlearn.tuning.shared_start import SharedStart
from everlearn.tuning.start import Start
from everlearn.tuning.trials import RemoteRuns, StudyRunner, Trial


@dataclass(frozen=True)
class Tuned:
    """Result of a study.

    Args:
        method: a fresh method with the best values.
        dimensions: the fields that were tuned.
        best: the trial with the highest score.
        trials: all trials.
    """

    method: Method
    dimensions: list[Dimension]
    best: Trial
    trials: list[Trial]


def tune(
    make_model: Callable[..., nn.Module] | nn.Module,
    method: Method,
    stream: Stream | Sequence[Any] | Callable[[int], Stream | Sequence[Any]],
    *,
    train: TrainFunction | None = None,
    evaluate: EvaluateFunction | None = None,
    fields: Mapping[str, SearchRange] | None = None,
    trials: int = 16,
    seeds: int = 1,
    prune: bool = True,
    training: Training = Training(),  # noqa: B008 - frozen
    optimizer: OptimizerFactory = adam,
    keep_optimizer: bool = False,
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] = "runs/tune",
    workers: int = 1,
    run_remotely: RemoteRuns | None = None,
    checkpoint: CheckpointEvery | None = CheckpointEvery(),  # noqa: B008 - frozen
    on_trial: Callable[[int, int, Trial], None] | None = None,
) -> Tuned:
    """Find the values of a method's fields with the best score on validation data after the last task.

    For a single real number, half of the trials are spread evenly over its range, and each of the others halves the
    most promising gap between earlier values. Fields with named values or few integers are tried exhaustively. Values
    of several fields are proposed by Optuna (TPE). If all fields act only after the first task (``Search.late``), it is
    trained once, and every trial continues from a copy, with the result of a separate run. A trial is pruned after a
    task if it is worse than three quarters of the earlier trials.

    Args:
        make_model: model or function that makes one, as for ``run``.
        method: method to tune; its other fields stay as they are.
        stream: stream with validation data in every task (``valid=0.1``), or a function of the seed that makes one;
            ``stream.first(3)`` tunes on the first three tasks only. With ``train``, a list of tasks of any type, too.
        train: your training loop in place of the trainer: ``train(model, method, task)`` trains the model on one task,
            in place, and calls ``method.end_task`` last. It creates its own optimizer and keeps nothing between calls
            but what is in the model and the method. Results are those of calling it for task after task, after
            ``torch.manual_seed(seed)`` and making the model.
        evaluate: ``evaluate(model, method, task)`` returns the score of your loop's model on the held-out data of a
            task, higher is better. By default the accuracy on the stream's validation data.
        fields: fields to tune and their ranges; see ``search_space.find_dimensions``.
        trials: number of trials.
        seeds: runs per trial, whose mean score counts; seeds start at that of ``training``.
        prune: whether to stop trials that are worse than most.
        training: training settings; with ``train``, only the seed and the progress bar.
        optimizer: function of the parameters that makes an optimizer.
        keep_optimizer: whether to keep the optimizer between tasks.
        device: device to train on; with ``train``, the one that the model is moved to first.
        out: folder of the study and the results of all trials; repeating the call resumes the study, and the trials
            whose processes or machines were lost. ``WorkerLost`` reports these after all others have ended.
        workers: number of worker processes, with one thread each; with several, the proposed values depend on the order
            in which trials end.
        run_remotely: runs trials remotely, ``workers`` at a time, without sharing the first task and without pruning;
            ``WorkerLost`` in place of a result reports a lost machine.
        checkpoint: interval between the checkpoints from which a killed trial resumes.
        on_trial: called when a trial ends, with its number, the number of trials, and the trial.

    Returns:
        The best values, as a fresh method, and all trials.
    """
    _check_not_distributed()
    check_settings({"trials": trials, "seeds": seeds, "workers": workers}, None, "float32")
    dimensions = find_dimensions(method, fields)
    optuna = import_optional("optuna", "tune", "Tuning")
    check_values(method, dimensions)
    _check_fresh(method)

    if train is not None:
        _check_loop(train, evaluate, training, optimizer, keep_optimizer, run_remotely)
    elif evaluate is not None:
        raise ValueError("evaluate scores the model of your own loop: give train=, too, or leave it out.")

    # One starting point per seed.
    torch_device = None if device is None else torch.device(device)
    folder = Path(out)
    starts: list[Start] = []
    for seed in [training.seed + offset for offset in range(seeds)]:
        seed_stream: Any = stream(seed) if callable(stream) else stream
        if train is not None:
            seed_stream = as_stream(seed_stream)
        common = (make_model, method, dimensions, seed_stream, seed, torch_device, folder, checkpoint)
        if train is not None:
            starts.append(LoopStart(*common, train, evaluate))
        else:
            starts.append(SharedStart(*common, replace(training, seed=seed), optimizer, keep_optimizer))

    study_file = files.writable_folder(folder) / storage.STUDY_FILE
    with storage.open_study(optuna, study_file, dimensions, starts, trials) as study:
        trials = min(trials, storage.max_trials(dimensions, trials))
        runner = StudyRunner(study, optuna, dimensions, starts, prune, trials)
        ended = runner.ended_trials()
        is_hidden = hide_bar(training.progress)
        with tqdm(
            total=trials, initial=len(ended), desc=f"tune {label(method)}", leave=False, disable=is_hidden
        ) as bar:
            for trial in runner.run_trials(workers, run_remotely):
                ended.append(trial)
                if on_trial is not None:
                    on_trial(len(ended), trials, trial)
                bar.update()
                bar.set_postfix_str(f"best so far {_best_trial(ended)}")

        if runner.lost_workers:
            raise WorkerLost(
                f"The processes of {len(runner.lost_workers)} of {trials} trials were lost "
                f"({runner.lost_workers[-1]}): repeat the command to resume them."
            )
        for start in starts:
            start.close()

    best = _best_trial(ended)
    if best.score is None:
        raise ValueError(f"Every trial has failed, the last one because of this: {ended[-1].failure}")
    best_values = [best.values[dimension.name] for dimension in dimensions]
    return Tuned(with_values(method, dimensions, best_values), dimensions, best, ended)


def _check_not_distributed() -> None:
    if world_size() > 1:
        raise ValueError(
            f"Trials are not shared by the {world_size()} processes of torchrun: start without it, and run trials in "
            "parallel with workers (--workers 2) or on a cluster (--cluster ray, or slurm)."
        )


def _check_loop(
    train: object,
    evaluate: object,
    training: Training,
    optimizer: OptimizerFactory,
    keep_optimizer: bool,
    run_remotely: RemoteRuns | None,
) -> None:
    """Raise for arguments that do not fit a training loop of the user."""
    for name, function in (("train", train), ("evaluate", evaluate)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function of (model, method, task), got {function!r}.")
    is_trainer_set = replace(training, seed=0, progress=None) != Training() or optimizer is not adam or keep_optimizer
    if is_trainer_set:
        raise ValueError(
            "training, optimizer and keep_optimizer are settings of Everlearn's trainer, and train is used in its "
            "place: set epochs, batch size and optimizer in train; Training(seed=1) alone is allowed."
        )
    if run_remotely is not None:
        raise ValueError("Trials of your own loop run on this machine: leave run_remotely out, and set workers.")


def _check_fresh(method: Method) -> None:
    fresh_method = with_values(method, [], [])
    if fingerprint(method.state_dict()) != fingerprint(fresh_method.state_dict()):
        raise ValueError(
            "This method has learned already, and its fields act on tasks learned with them: give a fresh method, and "
            "the stream from its first task on."
        )


def _best_trial(trials: Sequence[Trial]) -> Trial:
    return max(trials, key=lambda trial: float("-inf") if trial.score is None else trial.score)
