"""A dry run of a method on a model: what it will do, what it will cost, and known misuse."""

from __future__ import annotations

import difflib
import html
import inspect
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everlearn.core.attachment_checks import check_attachable, torch_optimizer
from everlearn.core.batch import Batch
from everlearn.core.parameters import evaluating, refuse_meta, unwrap
from everlearn.core.running_statistics import tracking_layers
from everlearn.core.traits import traits_of

if TYPE_CHECKING:
    from everlearn.core.method import Method

SHOWN_NAMES = 4
HOOKS = ("begin_task", "task_loss", "penalty", "observe", "before_step", "after_step", "end_task", "predict")


@dataclass(frozen=True)
class Report:
    """The result of ``method.check``; printing it shows a table.

    Args:
        method: the method's configuration.
        facts: what the method will do, by topic.
        problems: known misuse, one sentence each; empty if there is none.
    """

    method: str
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Topics and sentences, problems last."""
        problem_rows = [("PROBLEM", sentence) for sentence in self.problems]
        return [*self.facts.items(), *(problem_rows or [("problems", "none found")])]

    def __str__(self) -> str:
        width = max(len(topic) for topic, _ in self.rows)
        lines = [f"{topic:<{width}}  {sentence}" for topic, sentence in self.rows]
        return "\n".join([self.method, *lines])

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{html.escape(t)}</th><td>{html.escape(s)}</td></tr>" for t, s in self.rows)
        return f"<table><caption>{html.escape(self.method)}</caption>{rows}</table>"


def check_method(
    method: Method, model: nn.Module, optimizer: Optimizer | None = None, batch: Batch | None = None
) -> Report:
    """Check a method on a model, without a training step; model, method and random states stay as they are."""
    # Imported here because a chain is a method, which imports this module.
    from everlearn.core.chain import label

    if batch is not None and not isinstance(batch, Batch):
        raise TypeError(f"check() needs a Batch, got a {type(batch).__name__}: write Batch(x, y).")
    problems = _find_problems(method, model)
    if optimizer is not None:
        problems += _find_optimizer_problems(method, model, optimizer)
    if batch is not None:
        problems += _find_output_problems(model, batch)

    facts = _describe_model(model)
    facts |= _describe_cost(method, model)
    try:
        facts |= method.describe(model, batch)
    except (TypeError, ValueError) as error:
        problems.append(str(error))
    if method.needs_batch:
        facts["external loops"] = "need loss = attached.loss(loss, x, y, outputs) in every step"
    return Report(label(method), facts, problems)


def list_names(names: list[str]) -> str:
    """List the first names.

    >>> list_names(["a", "b", "c", "d", "e"])
    'a, b, c, d, … (5 in all)'
    """
    if len(names) <= SHOWN_NAMES:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:SHOWN_NAMES])}, … ({len(names)} in all)"


def format_bytes(count: float) -> str:
    """Format a number of bytes.

    >>> format_bytes(3_200_000)
    '3.2 MB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} KB"


def _describe_model(model: nn.Module) -> dict[str, str]:
    """Describe parameters, running statistics and hooks of a model."""
    parameters = list(unwrap(model).parameters())
    num_trainable = sum(p.numel() for p in parameters if p.requires_grad)
    num_frozen = sum(p.numel() for p in parameters if not p.requires_grad)

    statistics = "none"
    layers = tracking_layers(model)
    if layers:
        statistics = f"{len(layers)} layers: {list_names(list(layers))}"

    owners = set()
    for module in unwrap(model).modules():
        for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
            owners.add(str(getattr(hook, "owner", "") or type(hook).__name__))
    return {
        "parameters": f"{num_trainable:,} trainable, {num_frozen:,} frozen",
        "running statistics": statistics,
        "hooks": list_names(sorted(owners)),
    }


def _describe_cost(method: Method, model: nn.Module) -> dict[str, str]:
    """Estimate the memory of a method's state, without examples, from its traits."""
    methods: list[Method] = getattr(method, "methods", [method])
    all_traits = [traits_of(type(m)) for m in methods]
    if any(traits is not None and not traits.copies_scale for traits in all_traits):
        return {"state": "statistics, whose size depends on the features and classes, not on the model"}
    model_bytes = sum(p.numel() * p.element_size() for p in unwrap(model).parameters())
    sizes = []
    for num_tasks in (1, 10):
        copies = 0.0
        for traits in all_traits:
            method_copies = None if traits is None else traits.copies_after(num_tasks)
            if method_copies is None:
                return {"state": "not measured"}
            copies += method_copies
        sizes.append(f"{format_bytes(copies * model_bytes)} after {num_tasks}")
    return {"state": f"about {', '.join(sizes)} tasks, without examples"}


def _find_problems(method: Method, model: nn.Module) -> list[str]:
    """Find problems of the model itself."""
    problems = []
    parameters = list(model.parameters())
    try:
        refuse_meta(parameters)
    except ValueError as error:
        problems.append(str(error))
    if method.trains and not any(p.requires_grad for p in parameters):
        problems.append("All parameters are frozen, so there is nothing to train: call p.requires_grad_(True).")
    return problems


def _find_optimizer_problems(method: Method, model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Find out whether an optimizer serves the method; one that was created too early lacks parameters."""
    problems = []
    try:
        check_attachable(method, model, torch_optimizer(optimizer))
    except (TypeError, ValueError) as error:
        problems.append(str(error))
    if method.trains and not model.training:
        problems.append("The model is in evaluation mode: call model.train() before training.")
    return problems


def _find_output_problems(model: nn.Module, batch: Batch) -> list[str]:
    """Find out whether the outputs fit the likelihood, by one forward pass in evaluation mode."""
    problems = []
    with torch.random.fork_rng(), torch.no_grad(), evaluating(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outputs: Tensor = batch.forward(model)
            batch.likelihood.check_outputs(outputs)
            if batch.y is not None:
                batch.loss(outputs)
        except (TypeError, ValueError, RuntimeError) as error:
            problems.append(str(error))
    return problems + [str(warning.message) for warning in caught]


def refuse_problems(report: Report) -> None:
    """Raise ValueError if there is a problem, before a step is taken."""
    if report.problems:
        raise ValueError(" ".join(report.problems))


def refuse_misspelled_hooks(method_class: type, base: type) -> None:
    """Raise TypeError if a class has a function that looks like a hook and is none: it would never be called.

    The name must be close to that of a hook which the class does not define, with as many arguments.
    """
    for name, function in vars(method_class).items():
        if name.startswith("_") or hasattr(base, name) or not inspect.isfunction(function):
            continue
        for hook in difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.85):
            num_arguments = len(inspect.signature(getattr(base, hook)).parameters)
            if hook not in vars(method_class) and len(inspect.signature(function).parameters) == num_arguments:
                raise TypeError(
                    f"{method_class.__name__}.{name} is not a hook and would never be called: rename it to {hook}, or "
                    f"to something less similar. The hooks are {', '.join(HOOKS)}."
                )


def describe_parameters(names: list[str], all_parameters: dict[str, Any]) -> str:
    """Describe a selection of parameters by number and names."""
    num_entries = sum(all_parameters[name].numel() for name in names)
    return f"{num_entries:,} entries of {list_names(names)}"
