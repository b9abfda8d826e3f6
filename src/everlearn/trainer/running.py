"""Learning a whole stream, tested after every task, as one result."""

from __future__ import annotations

import copy
import inspect
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from tqdm.auto import tqdm

from everlearn import atomic
from everlearn.checks import check_run
from everlearn.cost import Clock, peak_memory, reset_peak_memory, state_bytes
from everlearn.fingerprint import fingerprint
from everlearn.method import Method, label
from everlearn.metrics import Matrix
from everlearn.results import Result, amount, file_name, provenance, version
from everlearn.seeds import derive, seeded
from everlearn.stream import Split, Stream, Task
from everlearn.trainer.evaluation import evaluate
from everlearn.trainer.tracking import Journal, Tracker
from everlearn.trainer.training import (
    OptimizerFactory,
    Precision,
    SchedulerFactory,
    Training,
    adam,
    device_of,
    hide_bar,
    learn_task,
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
) -> Result:
    """Learn a whole stream and test on all tasks after each.

    One seed gives one result, bit for bit; your random state, your method and your model stay as they were.

    Args:
        make_model: a function of (inputs, outputs), the shape of one input and the number of outputs, such as
            ``nets.mlp``; or one without arguments; or a module, which is copied.
        method: what protects the earlier tasks.
        stream: what is learned, in order.
        optimizer: a function of the parameters that makes one.
        epochs: passes over each task's data.
        iterations: optimizer steps per task, instead of epochs.
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

    >>> from everlearn import nets, streams
    >>> result = run(nets.mlp, Method(), streams.digits(scenario="class"), epochs=5)
    >>> result.accuracy.shape, result.average_accuracy < 0.25
    ((5, 5), True)
    """
    check_run(method, stream, optimizer, seed, split)
    folder, seed = None if out is None else atomic.writable_folder(out), operator.index(seed)
    training = Training(epochs, iterations, batch_size, seed, scheduler, clip, accumulate, precision, progress)
    if scheduler is not None and stream.once:
        raise ValueError("An online stream's chunks are too short for a scheduler: set the learning rate instead.")
    with seeded(derive(seed, "model"), None if device is None else torch.device(device)):
        model, method = _build(make_model, stream).to(device), copy.deepcopy(method)
        config = _config(stream, method, model, training, optimizer, keep_optimizer, split)
        if folder is not None and not force and (done := _whole(folder / file_name(config))) is not None:
            return done
        made, journal, result = provenance(), Journal(trackers), None
        journal.start(config)
        try:
            learned = _learn(model, method, stream, training, optimizer, keep_optimizer, split, journal)
            result = Result(learned[0], config, *learned[1:], made)
        finally:
            journal.finish(result)
    if folder is not None:
        result.save(folder)
    return result


def _learn(
    model: nn.Module,
    method: Method,
    stream: Stream,
    training: Training,
    optimizer: OptimizerFactory,
    keep_optimizer: bool,
    split: Split,
    journal: Journal,
) -> tuple[Matrix, list[float], dict[str, Any]]:
    """Task after task, each followed by the tests; consecutive tasks with one id count as one."""
    device, clock = device_of(model), Clock()
    test = partial(evaluate, model, method, stream.exams, split=split)
    before = reset_peak_memory(device)
    with clock("evaluate"):
        initial = test(allowed=stream[0].allowed)
    rows: list[list[float]] = []
    parameters: list[int] = []
    held: list[int] = []
    facts: list[dict[str, float]] = []
    current: OptimizerFactory | Optimizer = optimizer
    bar = tqdm(stream.tasks, desc=label(method), leave=False, disable=hide_bar(training.progress))
    for i, task in enumerate(bar):
        trained = learn_task(model, method, task, training, current, journal)
        clock.add(trained.seconds)
        goes_on = i + 1 < len(stream) and task.id is not None and stream[i + 1].id == task.id
        current = trained.optimizer if keep_optimizer or goes_on else optimizer
        if not goes_on:
            with clock("evaluate"):
                rows.append(test(allowed=task.allowed))
            journal.learned(rows[-1], len(rows) if len(stream) > 1 else len(stream.exams))
            bar.set_postfix_str(
                f"so far {amount(float(np.mean(rows[-1][: len(rows)])), stream.exams[0].likelihood.score_name)}"
            )
            parameters.append(sum(p.numel() for p in model.parameters()))
            held.append(state_bytes(method.state_dict()))
            facts.append(method.facts())
    cost = {
        "seconds": dict(clock.seconds),
        "peak_memory": max(0, peak_memory(device) - before),
        "parameters": parameters,
        "state_bytes": held,
        "facts": facts,
    }
    return np.array(rows), initial, cost


def _build(make_model: Callable[..., nn.Module] | nn.Module, stream: Stream) -> nn.Module:
    if isinstance(make_model, nn.Module):
        return copy.deepcopy(make_model)
    needed = [
        p.name
        for p in inspect.signature(make_model).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) not in (0, 2):
        raise TypeError(
            f"{_name(make_model)} needs {', '.join(needed)}: give a function of (inputs, outputs), one without "
            "arguments, or a module; 'lambda: Net(...)' makes any model such a function."
        )
    if needed and not stream.inputs:
        raise ValueError(
            "This stream does not tell the shape of its inputs: give a function without arguments or a module."
        )
    model = make_model(stream.inputs, stream.outputs) if needed else make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_name(make_model)} must make a torch.nn.Module, it made a {type(model).__name__}.")
    return model


def _config(
    stream: Stream,
    method: Method,
    model: nn.Module,
    training: Training,
    optimizer: OptimizerFactory,
    keep_optimizer: bool,
    split: Split,
) -> dict[str, Any]:
    """Everything that decides the result, readable where it can be, as fingerprints where it cannot."""
    joint = stream.settings.get("joint", False)
    settings = {f.name: getattr(training, f.name) for f in fields(training) if f.name not in ("seed", "progress")}
    settings |= {"scheduler": _name(training.scheduler), "epochs": None if training.iterations else training.epochs}
    made = optimizer(list(model.parameters()))
    groups = [
        # Lists, as JSON has them: a table must not tell a result just made from one read back.
        {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if isinstance(v, (int, float, tuple))}
        for group in made.param_groups
    ]
    return {
        "stream": {"name": stream.name, **stream.settings, "tasks": len(stream.exams)},
        "scenario": stream.scenario,
        "score": stream.exams[0].likelihood.score_name,
        "method": "joint" if joint and type(method) is Method else label(method) + (" on joint" if joint else ""),
        "fields": repr(method),
        "model": repr(model),
        "training": {
            **settings,
            "keep_optimizer": keep_optimizer,
            "split": split,
            "optimizer": type(made).__name__,
            "groups": groups,
        },
        "seed": training.seed,
        "everlearn": version(),
        "fingerprints": {
            "data": fingerprint([_content(t) for t in [*stream.tasks, *stream.exams]]),
            "model": fingerprint([[type(m) for m in model.modules()], model.state_dict()]),
            "method": fingerprint(method),
            "scheduler": fingerprint(training.scheduler),
        },
    }


def _content(task: Task) -> dict[str, Any]:
    """What a task is made of; the planned steps are the trainer's."""
    return {f.name: getattr(task, f.name) for f in fields(task) if f.name != "steps"}


def _whole(path: Path) -> Result | None:
    """The result of a run done before; None where there is none, where it is torn, or where nobody can tell."""
    try:
        result = Result.load(path) if path.exists() else None
    except ValueError:
        return None  # a torn or foreign file under this run's name: the run is done again and replaces it
    return None if result is None or None in result.config["fingerprints"].values() else result


def _name(thing: Any) -> str | None:
    return None if thing is None else getattr(thing, "__qualname__", type(thing).__name__)
