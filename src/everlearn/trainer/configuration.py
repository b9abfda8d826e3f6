"""What a run is made of: its model from whatever makes one, and everything that decides its result, as facts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import nn

from everlearn.distributed import world
from everlearn.fingerprint import fingerprint
from everlearn.method import Method, label
from everlearn.result_format import storable
from everlearn.results import version
from everlearn.stream import Split, Stream, Task
from everlearn.trainer.training import OptimizerFactory, Training


def build(make_model: Callable[..., nn.Module] | nn.Module, stream: Stream) -> nn.Module:
    """The model for a stream, from a function that makes one or as a copy."""
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


def configuration(
    stream: Stream,
    method: Method,
    model: nn.Module,
    training: Training,
    optimizer: OptimizerFactory,
    keep_optimizer: bool,
    split: Split,
    data: str | None = None,
) -> dict[str, Any]:
    """Everything that decides the result, readable where it can be, as fingerprints where it cannot."""
    joint = stream.settings.get("joint", False)
    settings = {f.name: getattr(training, f.name) for f in fields(training) if f.name not in ("seed", "progress")}
    settings |= {"scheduler": _name(training.scheduler), "epochs": None if training.iterations else training.epochs}
    made = optimizer(list(model.parameters()))
    groups = [
        # As JSON has them: a table must not tell a result just made from one read back.
        {k: storable(v) for k, v in group.items() if isinstance(v, (int, float, tuple))}
        for group in made.param_groups
    ]
    return {
        "stream": storable(
            {
                "name": stream.name,
                **stream.settings,
                **({"merged": stream.merged} if stream.merged > 1 else {}),
                "tasks": len(stream.exams),
            }
        ),
        "scenario": stream.scenario,
        "score": stream.exams[0].likelihood.score_name,
        "method": "joint" if joint and type(method) is Method else label(method) + (" on joint" if joint else ""),
        "fields": repr(method),
        "model": repr(model),
        "training": {
            **settings,
            **({"processes": world()} if world() > 1 else {}),
            "keep_optimizer": keep_optimizer,
            "split": split,
            "optimizer": type(made).__name__,
            "groups": groups,
        },
        "seed": training.seed,
        "everlearn": version(),
        "fingerprints": {
            "data": data or data_of(stream),
            "model": model_word(model),
            "method": fingerprint(method),
            "scheduler": fingerprint(training.scheduler),
        },
    }


def model_word(model: nn.Module) -> str | None:
    """The fingerprint of a model: whatever is in it and in its classes."""
    whole = fingerprint(model)
    # A lock or an open file somewhere in the model must not keep its runs from being found and gone on with: its classes and
    # saved tensors (and its repr, which is a fact of its own) tell most models apart.
    return fingerprint([[type(m) for m in model.modules()], model.state_dict()]) if whole is None else whole


def data_of(stream: Stream) -> str | None:
    """The fingerprint of a stream's data, which takes a while."""
    return fingerprint([_content(t) for t in [*stream.tasks, *stream.exams]])


def _content(task: Task) -> dict[str, Any]:
    """What a task is made of; the planned steps are the trainer's, and the data are renumbered already."""
    return {f.name: getattr(task, f.name) for f in fields(task) if f.name not in ("steps", "labels")}


def _name(thing: Any) -> str | None:
    return None if thing is None else getattr(thing, "__qualname__", type(thing).__name__)
