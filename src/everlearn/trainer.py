"""The trainer: the loop of ``Method``'s docstring as functions, and nothing a method could not do without."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm

from everlearn import atomic
from everlearn.checks import check_batch, check_training, explain_loss
from everlearn.cost import Clock, peak_memory, reset_peak_memory, state_bytes
from everlearn.data import Arrays
from everlearn.method import Method, label
from everlearn.results import Result, file_name, fingerprint, provenance
from everlearn.seeds import derive
from everlearn.stream import Batch, Split, Stream, Task, as_task

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer, int], LRScheduler]
Precision = Literal["float32", "bfloat16"]


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """The default optimizer: plain SGD with learning rate 0.1."""
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass
class Trained:
    """What training a task leaves besides the model: the optimizer, the steps taken, the last loss, the seconds."""

    optimizer: Optimizer
    steps: int
    loss: float
    seconds: dict[str, float] = field(default_factory=dict)


def train(
    model: nn.Module,
    method: Method,
    task: Any,
    *,
    optimizer: OptimizerFactory | Optimizer = sgd,
    epochs: int = 1,
    iterations: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    scheduler: SchedulerFactory | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    precision: Precision = "float32",
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Trained:
    """Learn one task.

    Args:
        model: any module; it is trained in place.
        method: what protects the earlier tasks.
        task: a ``Task``, or a pair (x, y), a Dataset, a DataLoader or an iterable of batches.
        optimizer: a function of the parameters that makes one, or a live one to go on with.
        epochs: passes over the task's data.
        iterations: optimizer steps, instead of epochs.
        batch_size: examples per step; a DataLoader's own stands.
        seed: of the order of the examples.
        scheduler: a function (optimizer, planned steps) that makes one; it steps after every optimizer step.
        clip: largest norm of the whole gradient, after the method has edited it.
        accumulate: cut each batch into so many micro-batches; the step is that of the whole batch.
        precision: "bfloat16" runs the forward pass under autocast.
        device: where to train; by default where the model is.
        progress: a progress bar; by default only on a terminal.
    """
    task = as_task(task)
    check_training(task, epochs, iterations, batch_size, accumulate, precision)
    where = torch.device(device) if device is not None else _device(model)
    cast = torch.autocast(where.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()
    model.to(where).train()
    task.steps = task.planned_steps(batch_size, epochs, iterations)
    clock, step, loss = Clock(), 0, math.nan
    with clock("consolidate"):
        method.begin_task(model, task)
    live = _ready(optimizer, [*model.parameters(), *method.parameters()])
    schedule = scheduler(live, _known(task.steps)) if scheduler else None
    with clock("train"), tqdm(total=task.steps, desc=str(task), leave=False, disable=_hidden(progress)) as bar:
        for step, batch in enumerate(task.batches(batch_size, epochs, iterations, seed), 1):
            if step == 1:
                check_batch(task, batch, model)
            live.zero_grad()
            loss = _gradient(model, method, batch if where.type == "cpu" else batch.to(where), accumulate, cast)
            if not math.isfinite(loss):
                raise FloatingPointError(explain_loss(loss, task, step, batch))
            method.before_step(model)
            if clip is not None:
                nn.utils.clip_grad_norm_([*model.parameters(), *method.parameters()], clip)
            live.step()
            method.after_step(model)
            if schedule is not None:
                schedule.step()
            bar.update()
            if not bar.disable and step % 20 == 0:
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    with clock("consolidate"):
        method.end_task(model, task)
    return Trained(live, step, loss, dict(clock.seconds))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    method: Method,
    tasks: Sequence[Task],
    *,
    allowed: Tensor | None = None,
    split: Split = "test",
    batch_size: int = 1024,
) -> list[float]:
    """Mean score (accuracy) on each task.

    Args:
        model: in whatever mode; it is tested in eval mode and put back.
        method: whose ``predict`` answers.
        tasks: to be tested on.
        allowed: which class may be named now (see ``allowed_classes``); None for every class.
        split: which of the task's data.
        batch_size: examples per forward pass.
    """
    device, modes = _device(model), {m: m.training for m in model.modules()}
    model.eval()
    try:
        return [_score(model, method, task, allowed, split, batch_size, device) for task in tasks]
    finally:
        for module, mode in modes.items():
            module.training = mode


def run(
    make_model: Callable[..., nn.Module] | nn.Module,
    method: Method,
    stream: Stream,
    *,
    optimizer: OptimizerFactory = sgd,
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
    device: str | torch.device = "cpu",
    progress: bool | None = None,
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
        device: where to train.
        progress: progress bars; by default only on a terminal.
        out: a folder for the result; a run that is there already is read instead of done again ...
        force: ... unless you force it.

    >>> from everlearn import nets, streams
    >>> result = run(nets.mlp, Method(), streams.digits(scenario="class"), epochs=5)
    >>> result.accuracy.shape, result.average_accuracy < 0.25
    ((5, 5), True)
    """
    folder = None if out is None else atomic.writable_folder(out)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "model"))
        model, method = _build(make_model, stream).to(device), copy.deepcopy(method)
        training = {
            "optimizer": _describe(optimizer), "epochs": None if iterations else epochs, "iterations": iterations,
            "batch_size": batch_size, "scheduler": _name(scheduler), "clip": clip, "accumulate": accumulate,
            "precision": precision, "keep_optimizer": keep_optimizer, "split": split,
        }  # fmt: skip
        config = _config(stream, method, model, training, seed, exact=folder is not None)
        if folder is not None and not force and (done := _whole(folder / file_name(config))) is not None:
            return done
        learn = partial(
            train, epochs=epochs, iterations=iterations, batch_size=batch_size, seed=seed, scheduler=scheduler, clip=clip,
            accumulate=accumulate, precision=precision, progress=progress,
        )  # fmt: skip
        result = _learn_stream(model, method, stream, learn, optimizer, keep_optimizer, split, progress)
    result.config = config
    if folder is not None:
        result.save(folder)
    return result


def _learn_stream(
    model: nn.Module,
    method: Method,
    stream: Stream,
    learn: Callable[..., Trained],
    optimizer: OptimizerFactory,
    keep_optimizer: bool,
    split: Split,
    progress: bool | None,
) -> Result:
    """Task after task, each followed by the tests; consecutive tasks with one id count as one."""
    device, clock = _device(model), Clock()
    test = partial(evaluate, model, method, stream.exams, split=split)
    reset_peak_memory(device)
    with clock("evaluate"):
        initial = test(allowed=stream[0].allowed)
    rows: list[list[float]] = []
    parameters: list[int] = []
    held: list[int] = []
    current: OptimizerFactory | Optimizer = optimizer
    for i, task in enumerate(tqdm(stream.tasks, desc=label(method), leave=False, disable=_hidden(progress))):
        trained = learn(model, method, task, optimizer=current)
        clock.add(trained.seconds)
        goes_on = i + 1 < len(stream) and task.id is not None and stream[i + 1].id == task.id
        current = trained.optimizer if keep_optimizer or goes_on else optimizer
        if not goes_on:
            with clock("evaluate"):
                rows.append(test(allowed=task.allowed))
            parameters.append(sum(p.numel() for p in model.parameters()))
            held.append(state_bytes(method.state_dict()))
    cost = {
        "seconds": dict(clock.seconds),
        "peak_memory": peak_memory(device),
        "parameters": parameters,
        "state_bytes": held,
    }
    return Result(np.array(rows), {}, initial, cost, provenance())


def _gradient(
    model: nn.Module, method: Method, batch: Batch, accumulate: int, cast: AbstractContextManager[Any]
) -> float:
    """Leave the gradient of the batch's loss in ``p.grad``, micro-batch by micro-batch, and return the loss."""
    if accumulate == 1:
        with cast:
            loss = method.loss(model, batch)
        loss.backward()
        return loss.item()
    total = 0.0
    for part in batch.chunk(accumulate):
        with cast:
            loss = method.loss(model, part) * (len(part) / len(batch))
        loss.backward()
        total += loss.item()
    return total


def _score(
    model: nn.Module, method: Method, task: Task, allowed: Tensor | None, split: Split, size: int, device: torch.device
) -> float:
    total, count = 0.0, 0
    for batch in task.examples(size, split):
        here = Batch(batch.x, batch.y, batch.t, allowed, batch.likelihood).to(device)
        total += here.score(method.predict(model, here.x, here.t if task.identity else None)).sum().item()
        count += len(here)
    if not count:
        raise ValueError(f"{task} has no {split} examples: give it some, or leave it out of the stream.")
    return total / count


def _ready(optimizer: OptimizerFactory | Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    learning = [p for p in parameters if p.requires_grad]
    if not isinstance(optimizer, Optimizer):
        return optimizer(learning)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if new := [p for p in learning if id(p) not in known]:
        optimizer.add_param_group({"params": new})
    return optimizer


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
    return make_model(stream.inputs, stream.outputs) if needed else make_model()


def _config(
    stream: Stream, method: Method, model: nn.Module, training: dict[str, Any], seed: int, exact: bool
) -> dict[str, Any]:
    """Everything that decides the result; ``exact`` adds words for the very data, first weights and method state."""
    arrays = [v for t in [*stream.tasks, *stream.exams] for v in _arrays(t)]
    state = [v for v in tree_leaves(method.state_dict()) if isinstance(v, Tensor)]
    contents = {"data": arrays, "weights": list(model.state_dict().values()), "method": state}
    joint = stream.settings.get("joint", False)
    return {
        "stream": {"name": stream.name, **stream.settings, "tasks": len(stream)},
        "scenario": stream.scenario,
        "method": "joint" if joint and type(method) is Method else label(method) + (" on joint" if joint else ""),
        "fields": repr(method),
        "model": repr(model),
        "fingerprints": {name: fingerprint(tensors) for name, tensors in contents.items()} if exact else {},
        "training": training,
        "seed": seed,
    }


def _arrays(task: Task) -> list[Tensor]:
    parts = [task.train, *getattr(task.train, "parts", ()), task.valid, task.test]
    return [v for part in parts if isinstance(part, Arrays) for v in (part.x, part.y) if isinstance(v, Tensor)]


def _describe(optimizer: OptimizerFactory) -> dict[str, Any]:
    made = optimizer([nn.Parameter(torch.zeros(1))])
    return {
        "name": type(made).__name__,
        **{k: v for k, v in made.defaults.items() if isinstance(v, (int, float, tuple))},
    }


def _whole(path: Path) -> Result | None:
    try:
        return Result.load(path) if path.exists() else None
    except ValueError:
        return None  # a torn or foreign file under this run's name: the run is done again and replaces it


def _name(thing: Any) -> str | None:
    return None if thing is None else getattr(thing, "__qualname__", type(thing).__name__)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _hidden(progress: bool | None) -> bool | None:
    return None if progress is None else not progress  # tqdm's None: hidden unless on a terminal


def _known(steps: int | None) -> int:
    if steps is None:
        raise ValueError(
            "A scheduler needs to know the number of steps, which these data do not tell: give iterations."
        )
    return steps
