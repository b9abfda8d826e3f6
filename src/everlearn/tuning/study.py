"""Trials of one method, resumable, the first task trained once for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from tqdm.auto import tqdm

from everlearn import atomic
from everlearn.checks import check_settings
from everlearn.distributed import world
from everlearn.extras import needs
from everlearn.fingerprint import fingerprint
from everlearn.method import Method, label
from everlearn.stream import Stream
from everlearn.trainer.checkpoints import Every
from everlearn.trainer.training import OptimizerFactory, Training, adam, hide_bar
from everlearn.tuning import archive
from everlearn.tuning.side_by_side import Lost
from everlearn.tuning.space import Dimension, Given, changed, check_values, dimensions
from everlearn.tuning.start import Start
from everlearn.tuning.trials import Asked, Runs, Trial


@dataclass(frozen=True)
class Tuned:
    """What came of it: the best method, fresh, the fields that were tuned, and all trials."""

    method: Method
    at: list[Dimension]
    best: Trial
    trials: list[Trial]


def tune(
    make_model: Callable[..., nn.Module] | nn.Module,
    method: Method,
    stream: Stream | Callable[[int], Stream],
    *,
    fields: Mapping[str, Given] | None = None,
    trials: int = 16,
    seeds: int = 1,
    prune: bool = True,
    training: Training = Training(),  # noqa: B008 - frozen
    optimizer: OptimizerFactory = adam,
    keep_optimizer: bool = False,
    device: str | torch.device | None = None,
    out: str | os.PathLike[str] = "runs/tune",
    workers: int = 1,
    elsewhere: Runs | None = None,
    checkpoint: Every | None = Every(),  # noqa: B008 - frozen
    told: Callable[[int, int, Trial], None] | None = None,
) -> Tuned:
    """Find the values of a method's fields with which it does best on validation data, after the last task.

    Half of the trials of a single number are spread evenly over its range, each of the others halves the most promising gap
    between those before; of fields that name their values, or few whole numbers, all are tried; values of several fields are proposed by
    Optuna (TPE). Trials whose fields act only after the first task (``Search.late``) share it: it is trained once, and every
    trial goes on from a copy, to the result that a run of its own would have. A trial is given up after a task where it is worse
    than three quarters of those before it.

    Args:
        make_model: as for ``run``.
        method: its other fields stay as they are.
        stream: with a validation share in every task (``valid=0.1``), or a function of the seed that makes one;
            ``stream.first(3)`` to choose on the first three tasks alone.
        fields: which, and where to look; see ``space.dimensions``.
        trials: how many values to try.
        seeds: runs per trial, counted from that of the training, whose mean counts.
        prune: give up hopeless trials.
        training: how tasks are learned.
        optimizer: a function of the parameters that makes one.
        keep_optimizer: between tasks.
        device: where to train.
        out: a folder for the study and the results of all trials; the same call goes on where it was stopped, and with trials whose
            processes or machines were lost, of which ``Lost`` tells when all others are done.
        workers: trials side by side, in processes of one thread each; which values are proposed then depends on who is ready first.
        elsewhere: who does runs on other machines; there so many trials as workers are proposed at a time, each is a run of its
            own from the first task on, and none is given up. ``Lost`` instead of a result says that a machine has failed.
        checkpoint: how often a trial writes down where it is; one that was killed goes on from there.
        told: who is told of every trial: its number, how many there are, and what came of it.
    """
    _check_alone()
    check_settings({"trials": trials, "seeds": seeds, "workers": workers}, None, "float32")
    at, optuna = dimensions(method, fields), needs("optuna", "tune", "Tuning")
    check_values(method, at)
    _check_fresh(method)
    place = torch.device(device) if device is not None else None
    each = [replace(training, seed=training.seed + s) for s in range(seeds)]
    folder = Path(out)
    made = [stream(t.seed) if callable(stream) else stream for t in each]
    starts = [
        Start(make_model, method, at, s, t, optimizer, keep_optimizer, place, folder, checkpoint)
        for s, t in zip(made, each, strict=True)
    ]
    with archive.study(optuna, atomic.writable_folder(folder) / archive.STUDY_FILE, at, starts, trials) as study:
        trials = min(trials, archive.most(at, trials))
        asked = Asked(study, optuna, at, starts, prune, trials)
        seen = asked.known()
        hidden = hide_bar(training.progress)
        with tqdm(total=trials, initial=len(seen), desc=f"tune {label(method)}", leave=False, disable=hidden) as bar:
            for trial in asked.ended(workers, elsewhere):
                seen.append(trial)
                if told is not None:
                    told(len(seen), trials, seen[-1])
                bar.update()
                bar.set_postfix_str(f"best so far {_best(seen)}")
        if asked.lost:
            raise Lost(
                f"The processes of {len(asked.lost)} of {trials} trials were lost ({asked.lost[-1]}): the same command goes on with them."
            )
        for start in starts:
            start.close()
    best = _best(seen)
    if best.score is None:
        raise ValueError(f"Every trial has failed, the last one because of this: {seen[-1].why}")
    return Tuned(changed(method, at, [best.values[d.name] for d in at]), at, best, seen)


def _check_alone() -> None:
    if world() > 1:
        raise ValueError(
            f"Trials are not shared by the {world()} processes of torchrun: leave it out, and have them side by side with workers "
            "(--workers 2) or on a cluster (--cluster ray, or slurm)."
        )


def _check_fresh(method: Method) -> None:
    if fingerprint(method.state_dict()) != fingerprint(changed(method, [], []).state_dict()):
        raise ValueError(
            "This method has learned already, and a strength counts for tasks that end under it: give a fresh one, and the "
            "stream from its first task on."
        )


def _best(trials: Sequence[Trial]) -> Trial:
    return max(trials, key=lambda t: float("-inf") if t.score is None else t.score)
