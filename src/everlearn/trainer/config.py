"""The model of a run, and the configuration record that identifies its result."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import nn

from everlearn.core.chain import label
from everlearn.core.method import Method
from everlearn.core.stream import Stream
from everlearn.core.task import Split, Task
from everlearn.results.format import json_settings
from everlearn.results.provenance import version
from everlearn.runtime.distributed import world_size
from everlearn.runtime.fingerprint import fingerprint, fingerprint_model
from everlearn.trainer.settings import OptimizerFactory, Training


def build(make_model: Callable[..., nn.Module] | nn.Module, stream: Stream) -> nn.Module:
    """Create the model for a stream.

    Args:
        make_model: a function of (input shape, number of outputs), a function without arguments, or a module, which is
            copied.
        stream: gives the input shape and the number of outputs.
    """
    if isinstance(make_model, nn.Module):
        return copy.deepcopy(make_model)

    required_arguments = [
        p.name
        for p in inspect.signature(make_model).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required_arguments) not in (0, 2):
        raise TypeError(
            f"{_callable_name(make_model)} needs {', '.join(required_arguments)}: give a function of (inputs, "
            "outputs), one without arguments, or a module; 'lambda: Net(...)' makes any model such a function."
        )
    if required_arguments and not stream.inputs:
        raise ValueError("The shape of this stream's inputs is unknown: give a function without arguments or a module.")

    arguments = (stream.inputs, stream.outputs) if required_arguments else ()
    model = make_model(*arguments)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{_callable_name(make_model)} must return a torch.nn.Module, it returned a {type(model).__name__}."
        )
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
    """Record everything that determines the result: readable settings, and hashes of the rest.

    Args:
        stream: the stream.
        method: the method.
        model: the model with its initial weights.
        training: the training settings.
        optimizer: a function from parameters to an optimizer.
        keep_optimizer: whether the optimizer is kept between tasks.
        split: the data to test on.
        data: the hash of the stream's data, if known; computing it takes a while.
    """
    is_joint = stream.settings.get("joint", False)
    method_name = label(method)
    if is_joint and type(method) is Method:
        method_name = "joint"
    elif is_joint:
        method_name += " on joint"

    stream_settings = {"name": stream.name, **stream.settings}
    if stream.merged > 1:
        stream_settings["merged"] = stream.merged
    stream_settings["tasks"] = len(stream.test_tasks)

    return {
        "stream": json_settings(stream_settings),
        "scenario": stream.scenario,
        "score": stream.test_tasks[0].likelihood.score_name,
        "method": method_name,
        "fields": repr(method),
        "model": repr(model),
        "training": _training_settings(model, training, optimizer, keep_optimizer, split),
        "seed": training.seed,
        "everlearn": version(),
        "fingerprints": {
            "data": data or data_of(stream),
            "model": fingerprint_model(model),
            "method": fingerprint(method),
            "scheduler": fingerprint(training.scheduler),
        },
    }


def _training_settings(
    model: nn.Module, training: Training, optimizer: OptimizerFactory, keep_optimizer: bool, split: Split
) -> dict[str, Any]:
    """Record the training settings and the hyper-parameters of the optimizer."""
    settings = {f.name: getattr(training, f.name) for f in fields(training) if f.name not in ("seed", "progress")}
    settings["scheduler"] = _callable_name(training.scheduler)
    if training.iterations:
        settings["epochs"] = None
    if world_size() > 1:
        settings["processes"] = world_size()

    # In JSON's types, so that a new result and one loaded from a file have equal settings.
    new_optimizer = optimizer(list(model.parameters()))
    groups = [
        {key: json_settings(value) for key, value in group.items() if isinstance(value, (int, float, tuple))}
        for group in new_optimizer.param_groups
    ]

    return {
        **settings,
        "keep_optimizer": keep_optimizer,
        "split": split,
        "optimizer": type(new_optimizer).__name__,
        "groups": groups,
    }


def data_of(stream: Stream) -> str | None:
    """Hash the data of a stream, which takes a while."""
    return fingerprint([_task_content(task) for task in [*stream.tasks, *stream.test_tasks]])


def _task_content(task: Task) -> dict[str, Any]:
    """Collect the fields of a task, without the planned steps (of the trainer) and the labels (already applied)."""
    return {f.name: getattr(task, f.name) for f in fields(task) if f.name not in ("steps", "labels")}


def _callable_name(function: Any) -> str | None:
    if function is None:
        return None
    return getattr(function, "__qualname__", type(function).__name__)
