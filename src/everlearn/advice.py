"""Which method? From what a project needs: the methods that fit, best first, and why the others do not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Annotated, Any, get_type_hints

from everlearn.fields import Range, check_field
from everlearn.method import Method
from everlearn.methods import METHODS
from everlearn.stream import Scenario
from everlearn.traits import Traits, traits_of

TASKS = 5  # where nobody says how many there will be
UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9}
BYTES = 4  # of a number, in a model or an example


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What is known of a project; None is for what does not matter.

    Args:
        scenario: "task" if the model is told at test which task an example is of; otherwise "class" where later tasks bring
            new classes, or "domain" where all tasks have the same answers.
        keep_data: whether examples of old tasks may be kept.
        grow: whether the model may become larger with the tasks.
        labels: whether there are labels for what shall be remembered; if not, a trained model and inputs must do.
        boundaries: whether somebody tells where one task ends and the next begins.
        memory: what a method may keep besides the model, as copies of it ("2x") or in bytes ("20MB").
        time: what a training step may cost, in plain ones.
        tasks: how many there will be.
        parameters: of the model, to compare bytes with.
        inputs: numbers in one example, to tell how many the memory holds.
    """

    scenario: Scenario | None = None
    keep_data: bool | None = None
    grow: bool | None = None
    labels: bool | None = None
    boundaries: bool | None = None
    memory: str | None = None
    time: Annotated[float, Range(0)] | None = None
    tasks: Annotated[int, Range(1)] | None = None
    parameters: Annotated[int, Range(1)] | None = None
    inputs: Annotated[int, Range(1)] | None = None

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for f in fields(self):
            check_field(f.name, getattr(self, f.name), hints[f.name])
        if in_bytes(self.memory) and self.parameters is None:
            raise ValueError(
                f"memory: {self.memory} is compared with the model's size: say how many parameters it has."
            )

    @property
    def copies(self) -> float | None:
        """The memory in copies of the model."""
        if self.memory is None:
            return None
        amount, unit = _split(self.memory)
        return amount if unit == "x" else amount * UNITS[unit] / (BYTES * (self.parameters or 1))


@dataclass(frozen=True)
class Measured:
    """What a method has reached in a table of ours, in per cent, and both ends of the scale there."""

    method: str
    scenario: Scenario
    table: str
    title: str
    cell: str
    accuracies: tuple[float, ...]
    settings: Mapping[str, Any]
    finetune: float | None
    joint: float | None

    @property
    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.accuracies)


@dataclass(frozen=True)
class Advice:
    """A method, and what there is to say of it."""

    name: str
    kind: type[Method]
    traits: Traits | None
    against: list[str]
    settings: Mapping[str, Any]
    measured: list[Measured]

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.against

    @property
    def kept(self) -> float | None:
        """How far it has come from fine-tuning (0) to joint training (1), over all tables; None where none has both ends.

        The points gained are summed before they are compared with those there were to gain, so that a table in which
        fine-tuning loses next to nothing weighs next to nothing.
        """
        ends = [
            (m.mean - m.finetune, m.joint - m.finetune)
            for m in self.measured
            if m.finetune is not None and m.joint is not None
        ]
        gained, possible = (sum(part) for part in zip(*ends, strict=True)) if ends else (0.0, 0.0)
        return gained / possible if possible > 0 else None


def advise(
    needs: Needs, measured: Iterable[Measured] = (), methods: Mapping[str, type[Method]] = METHODS
) -> list[Advice]:
    """All methods: those that fit, best first by what was measured, then the others, those that nearly fit first.

    >>> [a.name for a in advise(Needs(scenario="class", keep_data=False, tasks=5)) if a.fits]
    ['generative']
    """
    measured = list(measured)
    found = []
    for name, kind in methods.items():
        traits, own = traits_of(kind), _best([m for m in measured if m.method == name], needs.scenario)
        against = ["nothing is known of it: its class has no traits"] if traits is None else _against(needs, traits)
        settings = (traits.without_boundaries if traits and needs.boundaries is False else None) or {}
        found.append(Advice(name, kind, traits, against, settings, own))
    return sorted(found, key=lambda advice: _place(advice, needs))


def _best(measured: list[Measured], scenario: Scenario | None) -> list[Measured]:
    """Of every table and scenario that counts the best cell."""
    best: dict[tuple[str, Scenario], Measured] = {}
    for m in sorted(measured, key=lambda m: m.mean):
        if scenario in (None, m.scenario):
            best[m.table, m.scenario] = m
    return [best[key] for key in sorted(best)]


def _against(needs: Needs, t: Traits) -> list[str]:
    """All that keeps a method from being used."""
    tasks, found = needs.tasks or TASKS, []
    if needs.scenario is not None and needs.scenario in t.weak:
        found.append(t.weak[needs.scenario])
    elif needs.scenario is None and len(t.weak) == 3:
        found.append(next(iter(t.weak.values())))
    if t.needs_task and needs.scenario in ("domain", "class"):
        found.append("must be told the task of an example, and could only guess it")
    if t.keeps_examples and needs.keep_data is False:
        found.append("keeps examples")
    if t.grows and needs.grow is False:
        found.append("grows with the tasks")
    if t.needs_labels and needs.labels is False:
        found.append("needs labels for what it shall remember")
    if t.without_boundaries is None and needs.boundaries is False:
        found.append("must be told where a task ends")
    if needs.copies is not None and t.copies_after(tasks) > needs.copies:
        copies = t.copies_after(tasks)
        found.append(f"keeps about {copies:.2g} copies of the model with {tasks} tasks, more than {needs.copies:.2g}")
    if room(needs, t) == 0:
        found.append("has no room for a single example")
    if needs.time is not None and t.step_of(tasks) > needs.time:
        found.append(f"a step costs about {t.step_of(tasks):.1f} plain ones, more than {needs.time:g}")
    return found


def _place(advice: Advice, needs: Needs) -> tuple[float, ...]:
    """What is sorted by: measured before not measured, promises before hopes, reference points last, cheap before dear."""
    t, kept = advice.traits, advice.kept
    if not advice.fits or t is None:
        return (1, advice.kind is Method, len(advice.against))
    if kept is not None:
        return (0, 0, -kept)
    promised = t.zero_forgetting and needs.scenario == "task"
    return (0, 1, t.family == "reference", not promised, t.step)


def room(needs: Needs, traits: Traits) -> int | None:
    """How many examples the memory holds besides what else the method keeps; None where that cannot be told."""
    if needs.copies is None or needs.parameters is None or needs.inputs is None or not traits.keeps_examples:
        return None
    left = needs.copies - traits.copies_after(needs.tasks or TASKS)
    return max(0, int(left * needs.parameters / needs.inputs))


def in_bytes(memory: str | None) -> bool:
    """Whether an amount of memory is one of bytes, not of copies of the model.

    >>> in_bytes("2x"), in_bytes("20 MB")
    (False, True)
    """
    return memory is not None and _split(memory)[1] != "x"


def _split(memory: str) -> tuple[float, str]:
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*(x|kB|MB|GB)\s*", memory, re.IGNORECASE)
    if not found:
        raise ValueError(
            f"memory: got {memory!r}, allowed: copies of the model, as in 2x, or bytes, as in 500kB, 20MB, 1GB"
        )
    return float(found[1]), found[2].lower()
