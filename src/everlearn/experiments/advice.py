"""Select methods for a project: rank those that fit its constraints, and give reasons against the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import inf
from statistics import fmean
from typing import Annotated, Any, get_type_hints

from everlearn.core.hyperparameters import Range, check_field
from everlearn.core.method import Method
from everlearn.core.scenario import DataKind, Scenario
from everlearn.core.traits import Traits, traits_of
from everlearn.methods import METHODS

DEFAULT_TASKS = 5  # number of tasks if none is given
UNIT_BYTES = {"kb": 1e3, "mb": 1e6, "gb": 1e9}
BYTES_PER_NUMBER = 4  # float32


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Constraints of a project; None means no constraint.

    Args:
        scenario: "task" if the task of each example is known at test time; otherwise "class" if later tasks add
            classes, or "domain" if all tasks have the same classes.
        keep_data: whether examples of old tasks may be stored.
        grow: whether the model may grow with the number of tasks.
        labels: whether there are labels of the data to remember; if not, there are a trained model and inputs only.
        boundaries: whether task boundaries are known during training.
        pretrained: whether the model was pretrained on data like those to come, so that its features suit them.
        data: "images", "text" or "table"; results on the same kind of data count first.
        memory: memory a method may use besides the model, in copies of the model ("2x") or in bytes ("20MB").
        time: maximum time of a training step, as a multiple of a baseline step.
        tasks: number of tasks.
        parameters: number of parameters of the model, to convert bytes to copies of the model.
        inputs: numbers per example, to compute how many examples fit into the memory.
    """

    scenario: Scenario | None = None
    keep_data: bool | None = None
    grow: bool | None = None
    labels: bool | None = None
    boundaries: bool | None = None
    pretrained: bool | None = None
    data: DataKind | None = None
    memory: str | None = None
    time: Annotated[float, Range(0)] | None = None
    tasks: Annotated[int, Range(1)] | None = None
    parameters: Annotated[int, Range(1)] | None = None
    inputs: Annotated[int, Range(1)] | None = None

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            check_field(field.name, getattr(self, field.name), hints[field.name])
        if is_in_bytes(self.memory) and self.parameters is None:
            raise ValueError(
                f"memory: {self.memory} is compared with the size of the model: give its number of parameters."
            )

    @property
    def memory_copies(self) -> float | None:
        """The memory in copies of the model."""
        if self.memory is None:
            return None
        amount, unit = _parse_memory(self.memory)
        if unit == "x":
            return amount
        return amount * UNIT_BYTES[unit] / (BYTES_PER_NUMBER * (self.parameters or 1))


@dataclass(frozen=True)
class Measured:
    """Recorded result of a method in a published table, in percent.

    Args:
        method: name of the method.
        scenario: scenario of the runs.
        table: name of the table.
        title: title of the table.
        cell: name of the cell.
        accuracies: average accuracy, by seed.
        settings: fields of the method that differ from their defaults.
        finetune: mean accuracy of fine-tuning in the same table and scenario, if recorded.
        joint: mean accuracy of joint training in the same table and scenario, if recorded.
        data: kind of data of the table.
        pretrained: whether the model of the table is pretrained.
    """

    method: str
    scenario: Scenario
    table: str
    title: str
    cell: str
    accuracies: tuple[float, ...]
    settings: Mapping[str, Any]
    finetune: float | None
    joint: float | None
    data: DataKind = "images"
    pretrained: bool = False

    @property
    def mean(self) -> float:
        """Mean accuracy over seeds."""
        return fmean(self.accuracies)


@dataclass(frozen=True)
class Advice:
    """A method, whether it fits a project, and its recorded results.

    Args:
        name: name of the method on the command line.
        method_class: class of the method.
        traits: traits of the method; None if the class has none.
        objections: reasons against the method; empty if it fits.
        unchecked: constraints that could not be checked, because the cost of the method is not measured.
        settings: fields to set for this project.
        measured: best recorded result of each table.
    """

    name: str
    method_class: type[Method]
    traits: Traits | None
    objections: list[str]
    unchecked: list[str]
    settings: Mapping[str, Any]
    measured: list[Measured]

    @property
    def fits(self) -> bool:
        """Whether there is no objection."""
        return not self.objections

    @property
    def closed_gap(self) -> float | None:
        """Fraction of the gap from fine-tuning (0) to joint training (1) that was closed, over all tables.

            closed gap = Σ (accuracy − finetune) / Σ (joint − finetune)

        Sums are taken before the division, so that a table in which fine-tuning loses little has little weight. None if
        no table has both ends.
        """
        gain = 0.0
        possible_gain = 0.0
        for result in self.measured:
            if result.finetune is not None and result.joint is not None:
                gain += result.mean - result.finetune
                possible_gain += result.joint - result.finetune
        return gain / possible_gain if possible_gain > 0 else None


def advise(
    needs: Needs, measured: Iterable[Measured] = (), methods: Mapping[str, type[Method]] = METHODS
) -> list[Advice]:
    """Rank methods: those that fit, best recorded results first, then the others, fewest objections first.

    A cost that is not measured is no objection: the constraints that it leaves open are listed in ``unchecked``. If
    ``needs.pretrained`` is given, only results of such models count: of pretrained ones, or of those from scratch.

    Args:
        needs: constraints of the project.
        measured: recorded results, as ``everlearn.experiments.recorded.load_recorded`` returns them.
        methods: methods by name.

    >>> {advice.name: advice.objections for advice in advise(Needs(scenario="class", keep_data=False))}["er"]
    ['stores examples']
    """
    measured = _comparable_results(list(measured), needs)
    advices = []
    for name, method_class in methods.items():
        traits = traits_of(method_class)
        best_results = _best_results([result for result in measured if result.method == name])
        unchecked: list[str] = []
        settings: Mapping[str, Any] = {}
        if traits is None:
            objections = ["unknown requirements: its class has no traits"]
        else:
            objections = _find_objections(needs, traits)
            unchecked = _find_unchecked(needs, traits)
            if needs.boundaries is False:
                settings = traits.without_boundaries or {}
        advices.append(Advice(name, method_class, traits, objections, unchecked, settings, best_results))
    return sorted(advices, key=lambda advice: _rank_key(advice, needs))


def _comparable_results(measured: list[Measured], needs: Needs) -> list[Measured]:
    """Results of the project's scenario and kind of model, and of its kind of data if there are any."""
    comparable = [
        result
        for result in measured
        if needs.scenario in (None, result.scenario) and needs.pretrained in (None, result.pretrained)
    ]
    same_data = [result for result in comparable if result.data == needs.data]
    return same_data or comparable


def _best_results(measured: list[Measured]) -> list[Measured]:
    """Best result of each table and scenario."""
    best: dict[tuple[str, Scenario], Measured] = {}
    for result in sorted(measured, key=lambda result: result.mean):
        best[result.table, result.scenario] = result
    return [best[key] for key in sorted(best)]


def _find_objections(needs: Needs, traits: Traits) -> list[str]:
    """List the constraints a method violates."""
    num_tasks = needs.tasks or DEFAULT_TASKS
    num_copies = traits.copies_after(num_tasks)
    step_time = traits.step_of(num_tasks)
    objections = []
    if needs.scenario is not None and needs.scenario in traits.weak:
        objections.append(traits.weak[needs.scenario])
    elif needs.scenario is None and len(traits.weak) == 3:
        objections.append(next(iter(traits.weak.values())))
    if traits.needs_task and needs.scenario in ("domain", "class"):
        objections.append("needs the task of each example at test time, which it could only guess")
    if traits.keeps_examples and needs.keep_data is False:
        objections.append("stores examples")
    if traits.grows and needs.grow is False:
        objections.append("grows with the number of tasks")
    if traits.needs_labels and needs.labels is False:
        objections.append("needs labels of the data to remember")
    if traits.without_boundaries is None and needs.boundaries is False:
        objections.append("needs task boundaries")
    if traits.needs_pretrained and needs.pretrained is False:
        objections.append(traits.needs_pretrained)
    if not traits.copies_scale:
        num_copies = None  # not those of the project's model
    if needs.memory_copies is not None and num_copies is not None and num_copies > needs.memory_copies:
        objections.append(
            f"stores about {num_copies:.2g} copies of the model with {num_tasks} tasks, more than "
            f"{needs.memory_copies:.2g}"
        )
    if example_capacity(needs, traits) == 0:
        objections.append("the memory cannot hold a single example")
    if needs.time is not None and step_time is not None and step_time > needs.time:
        objections.append(f"a step takes about {step_time:.1f} baseline steps, more than {needs.time:g}")
    return objections


def _find_unchecked(needs: Needs, traits: Traits) -> list[str]:
    """List what could not be checked: constraints on costs that are not measured, and the features."""
    unchecked = []
    if traits.needs_pretrained and needs.pretrained is None:
        unchecked.append("whether the model's features suit your data: if it is not pretrained, the result may be poor")
    if needs.memory is not None and traits.copies is None:
        unchecked.append(f"whether its state fits into {needs.memory}: its size is not measured")
    elif needs.memory is not None and not traits.copies_scale:
        unchecked.append(f"whether its state fits into {needs.memory}: its size depends on features and classes")
    if needs.time is not None and traits.step is None:
        unchecked.append(f"whether a step takes at most {needs.time:g} baseline steps: its time is not measured")
    return unchecked


def _rank_key(advice: Advice, needs: Needs) -> tuple[float, ...]:
    """Sort key: fitting, with recorded results, baselines last, without forgetting, cheapest step first.

    Methods whose step is not measured come after those whose step is. New classes of a pretrained model are for the
    methods that need one. Those that are equal in all this stay in the order of METHODS.
    """
    traits = advice.traits
    if not advice.fits or traits is None:
        return (1, advice.method_class is Method, len(advice.objections))
    if advice.closed_gap is not None:
        return (0, 0, -advice.closed_gap)
    is_preferred = traits.zero_forgetting and needs.scenario == "task"
    if traits.needs_pretrained and needs.pretrained and needs.scenario == "class":
        is_preferred = True
    step = inf if traits.step is None else traits.step
    return (0, 1, traits.family == "baselines", not is_preferred, step)


def example_capacity(needs: Needs, traits: Traits) -> int | None:
    """Number of examples that fit into the memory beside the method's other state; None if unknown."""
    memory_copies = needs.memory_copies
    state_copies = traits.copies_after(needs.tasks or DEFAULT_TASKS)
    if memory_copies is None or state_copies is None or needs.parameters is None or needs.inputs is None:
        return None
    if not traits.keeps_examples:
        return None
    free_copies = memory_copies - state_copies
    return max(0, int(free_copies * needs.parameters / needs.inputs))


def is_in_bytes(memory: str | None) -> bool:
    """Whether an amount of memory is given in bytes, not in copies of the model.

    >>> is_in_bytes("2x"), is_in_bytes("20 MB")
    (False, True)
    """
    if memory is None:
        return False
    _, unit = _parse_memory(memory)
    return unit != "x"


def _parse_memory(memory: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*(x|kB|MB|GB)\s*", memory, re.IGNORECASE)
    if not match:
        raise ValueError(
            f"memory: got {memory!r}, allowed: copies of the model, as in 2x, or bytes, as in 500kB, 20MB, 1GB"
        )
    return float(match[1]), match[2].lower()
