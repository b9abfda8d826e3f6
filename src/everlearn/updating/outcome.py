"""What came of an update: the verdict, the numbers behind it, as text and as a result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, get_type_hints

import numpy as np
import torch
from torch import Tensor

from everlearn.escaping import printable_lines
from everlearn.fields import NonNegative, Range, check_field
from everlearn.metrics import Matrix
from everlearn.report.table import columns
from everlearn.results import Result
from everlearn.updating.exams import GIVEN, Exam
from everlearn.updating.intervals import LEVEL, PairedCounts, mean_fall_interval

Scores = dict[int, float]  # the share of right answers, by the number of the exam
History = Mapping[int, Scores]  # after each update, by its number
SHOWN = 10  # classes in a report


@dataclass(frozen=True)
class Rules:
    """When an update is accepted, and what is kept of it; ``update`` documents the fields."""

    tolerance: NonNegative = 2.0
    each: bool = False
    exam: float = 0.2
    keep: Annotated[int, Range(0)] = 1000
    versions: Annotated[int, Range(1)] = 5

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            check_field(name, getattr(self, name), hint)
        if not 0 < self.exam < 1:
            raise ValueError(f"exam: got {self.exam!r}, allowed: a share between 0 and 1; keep=0 keeps no examples.")

    def fall(self, before: Scores, after: Scores, old: Sequence[int]) -> float | None:
        """By how many points old accuracy has fallen: the mean over the old exams, or the worst; None where there are none.

        >>> Rules().fall({0: 0.9, 1: 0.8}, {0: 0.9, 1: 0.7}, [0, 1])
        5.0
        """
        falls = [100 * (before[n] - after[n]) for n in old]
        if not falls:
            return None
        return round(max(falls) if self.each else fmean(falls), 9) + 0.0

    def interval(self, counts: Sequence[PairedCounts]) -> tuple[float, float] | None:
        """The confidence interval, in points, of what ``fall`` estimates; None where there are no old exams.

        With ``each`` it is that of the exam that lost most, wide enough to hold for all exams together (Bonferroni).
        """
        if not counts:
            return None
        if self.each:
            low, high = max(counts, key=lambda pair: pair.fall).interval(1 - (1 - LEVEL) / len(counts))
        else:
            low, high = mean_fall_interval(counts)
        return 100 * low, 100 * high


@dataclass(frozen=True)
class ClassScore:
    """The accuracy on one class of the old exams.

    Args:
        name: of the class, or the number of its output.
        examples: how many there are, in all old exams.
        before: the share of correct answers before the update.
        after: the share of correct answers after it.
    """

    name: str
    examples: int
    before: float
    after: float

    @property
    def fall(self) -> float:
        """By how many points its accuracy has fallen."""
        return 100 * (self.before - self.after)


def class_scores(
    exams: Sequence[Exam], before: Mapping[int, Tensor], after: Mapping[int, Tensor], names: Sequence[str]
) -> list[ClassScore]:
    """The accuracies of all classes of some exams, counted together.

    Args:
        exams: whose examples count.
        before: which examples were answered correctly before, by the number of the exam.
        after: the same after.
        names: of the classes; empty where they have none.
    """
    if not exams:
        return []
    y = torch.cat([exam.y for exam in exams])
    correct_before = torch.cat([before[exam.number] for exam in exams]).double()
    correct_after = torch.cat([after[exam.number] for exam in exams]).double()
    found = []
    for label in y.unique().tolist():
        own = y == label
        name = names[label] if label < len(names) else str(label)
        found.append(
            ClassScore(name, int(own.sum()), float(correct_before[own].mean()), float(correct_after[own].mean()))
        )
    return found


@dataclass(eq=False, repr=False)
class Update:
    """What came of an update; printed, it is the report.

    Args:
        number: of the update.
        method: what protected the old skills.
        accepted: whether the new model stands; False where old accuracy has fallen too far, and nothing was replaced.
        new: False where these data had been learned before, so that there was nothing to do.
        exams: what was measured on.
        learned: the share of right answers just after each exam's own data were learned, by the number of the exam; 0 is
            that of the skills before the first update.
        before: the same of the model before this update.
        after: the same of the new model.
        fall: by how many points old accuracy has fallen; None where there was no old exam.
        interval: the 95 % confidence interval of that fall, in points.
        classes: the accuracy on every class of the old exams, before and after.
        rules: by which it was judged.
        notes: what else should be known.
        suggestions: what to try where it was refused.
        place: the folder of the report; None where nothing was written.
        result: all updates as one result, with the accuracy matrix.
    """

    number: int
    method: str
    accepted: bool = True
    new: bool = True
    exams: list[Exam] = field(default_factory=list)
    learned: Scores = field(default_factory=dict)
    before: Scores = field(default_factory=dict)
    after: Scores = field(default_factory=dict)
    fall: float | None = None
    interval: tuple[float, float] | None = None
    classes: list[ClassScore] = field(default_factory=list)
    rules: Rules = field(default_factory=Rules)
    notes: list[str] = field(default_factory=list)
    suggestions: list[str] = field(default_factory=list)
    place: Path | None = None
    result: Result | None = None

    @property
    def old(self) -> list[int]:
        """The numbers of the exams of old skills."""
        return [exam.number for exam in self.exams if exam.number != self.number]

    @property
    def is_certain(self) -> bool:
        """Whether the whole confidence interval is on the side of the tolerance that the verdict is on."""
        if self.interval is None:
            return False
        low, high = self.interval
        return high <= self.rules.tolerance if self.accepted else low > self.rules.tolerance

    def doubts(self) -> list[str]:
        """Words of warning where nothing new was learned, and where the old exams are too small to tell."""
        doubts = []
        if (now := self.after.get(self.number)) is not None and now <= self.before.get(self.number, -1.0) < 1:
            doubts.append(
                "It is no better on the new data than before: learn for longer, or with less protection; --again learns them once more."
            )
        sizes = [len(exam) for exam in self.exams if exam.number != self.number]
        step = 100 / min(sizes) / (1 if self.rules.each else len(sizes)) if sizes else 0.0
        if step > self.rules.tolerance:
            doubts.append(
                f"The old exams are small: one answer alone may be {step:.1f} points, more than what is allowed; give more examples."
            )
        return doubts

    def __str__(self) -> str:
        if not self.new:
            return printable_lines("\n".join(self.notes))
        verdict = "accepted" if self.accepted else "refused, nothing is replaced"
        head = f"Update {self.number} with {self.method}: {verdict}."
        lines = [head, "", self._table(), "", self._verdict(), *self._certainty(), *self._class_table(), *self.notes]
        if self.suggestions:
            lines += ["", "What to try:", *(f"- {suggestion}" for suggestion in self.suggestions)]
        return printable_lines("\n".join(lines))  # names of classes and files are somebody else's

    __repr__ = __str__

    def _table(self) -> str:
        rows = [["accuracy in %", "examples", "learned", "before", "after"]]
        for exam in self.exams:
            known = [scores.get(exam.number) for scores in (self.learned, self.before, self.after)]
            rows.append([str(exam), f"{len(exam):,}", *("–" if v is None else f"{100 * v:.1f}" for v in known)])
        return columns(rows)

    def _verdict(self) -> str:
        if self.fall is None:
            return "Old accuracy was not measured: there is no exam of old skills yet."
        then, now = (100 * fmean(scores[n] for n in self.old) for scores in (self.before, self.after))
        moved = f"{abs(self.fall):.1f} points {'less' if self.fall > 0 else 'more'}" if self.fall else "no change"
        what = "; in the exam that lost most" if self.rules.each else ":"
        return f"Old accuracy {then:.1f} → {now:.1f}{what} {moved}, at most {self.rules.tolerance:g} less are allowed."

    def _certainty(self) -> list[str]:
        """The interval of the fall in words."""
        if self.interval is None:
            return []
        sizes = [len(exam) for exam in self.exams if exam.number != self.number]
        low, high = self.interval
        text = (
            f"With 95 % confidence the loss is between {low:.1f} and {high:.1f} points ({sum(sizes):,} old examples)."
        )
        if not self.is_certain:
            side = "more than what is allowed" if self.accepted else "no more than what is allowed"
            text += f" So it may be {side}: only more old examples can tell."
        return [text]

    def _class_table(self) -> list[str]:
        """The classes that lost more than the tolerance and more than one example, the worst first."""
        lost = [c for c in self.classes if c.fall > self.rules.tolerance and c.fall * c.examples > 150]
        lost.sort(key=lambda c: -c.fall * c.examples)
        if not lost:
            return []
        rows = [["old classes that lost most, in %", "examples", "before", "after"]]
        rows += [[c.name, f"{c.examples:,}", f"{100 * c.before:.1f}", f"{100 * c.after:.1f}"] for c in lost[:SHOWN]]
        more = [f"… and {len(lost) - SHOWN} more classes."] if len(lost) > SHOWN else []
        return ["", columns(rows), *more, ""]


def with_this(history: History, update: Update, start: int) -> dict[int, Scores]:
    """The history with this update; what was measured before it belongs to the one that it goes on from."""
    own = {n: v for n, v in update.before.items() if n != GIVEN}
    after = {n: v for n, v in update.after.items() if n != GIVEN}
    return {**history, start: {**history.get(start, {}), **own}, update.number: after}


def matrix(history: History, update: Update) -> Matrix:
    """A row after each update, a column for each exam, as far as there is one; nan where nobody measured."""
    numbers = [exam.number for exam in update.exams if exam.number != GIVEN]
    rows = [history.get(n, {}) for n in numbers]
    if len(numbers) == 1 and GIVEN in update.before:  # of old skills there is only what was brought along today
        numbers, rows = [GIVEN, *numbers], [update.before, update.after]
    return np.array([[row.get(n, math.nan) for n in numbers] for row in rows], dtype=np.float64)
