"""The outcome of an update: the verdict and the accuracies behind it, as text and as a result."""

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

from everlearn.core.hyperparameters import NonNegative, Range, check_field
from everlearn.results.metrics import Matrix
from everlearn.results.report.table import align_columns
from everlearn.results.result import Result
from everlearn.runtime.escaping import printable_lines
from everlearn.updating.held_out_sets import NOT_STORED, HeldOutSet
from everlearn.updating.intervals import LEVEL, PairedCounts, mean_fall_interval

Scores = dict[int, float]  # accuracy by the number of the held-out set
History = Mapping[int, Scores]  # scores by the number of the update they were measured after
MAX_CLASSES_SHOWN = 10


@dataclass(frozen=True)
class Rules:
    """When an update is accepted, and how much of it is stored; ``update`` documents the fields."""

    tolerance: NonNegative = 2.0
    per_set: bool = False
    holdout: float = 0.2
    keep: Annotated[int, Range(0)] = 1000
    versions: Annotated[int, Range(1)] = 5

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            check_field(name, getattr(self, name), hint)
        if not 0 < self.holdout < 1:
            raise ValueError(
                f"holdout: got {self.holdout!r}, allowed: a share between 0 and 1; keep=0 stores no examples."
            )

    def fall(self, before: Scores, after: Scores, old: Sequence[int]) -> float | None:
        """Compute by how many points old accuracy has fallen: the mean over held-out sets, or the worst with ``each``.

        Args:
            before: accuracies before the update.
            after: accuracies after the update.
            old: numbers of the old held-out sets.

        Returns:
            The fall in points; None if there is no old held-out set.

        >>> Rules().fall({0: 0.9, 1: 0.8}, {0: 0.9, 1: 0.7}, [0, 1])
        5.0
        """
        falls = [100 * (before[number] - after[number]) for number in old]
        if not falls:
            return None

        # Rounding makes 2.0000000001 points equal to 2; adding 0.0 turns -0.0 into 0.0.
        total = max(falls) if self.per_set else fmean(falls)
        return round(total, 9) + 0.0

    def interval(self, counts: Sequence[PairedCounts]) -> tuple[float, float] | None:
        """Compute the confidence interval of the fall in points; None if there is no old held-out set.

        With ``each`` it is that of the set that lost most, at a level that holds for all sets together (Bonferroni).
        """
        if not counts:
            return None

        # The worst of several sets is a multiple comparison, so its interval must be wider.
        if self.per_set:
            worst = max(counts, key=lambda pair: pair.fall)
            low, high = worst.interval(1 - (1 - LEVEL) / len(counts))
        else:
            low, high = mean_fall_interval(counts)
        return 100 * low, 100 * high


@dataclass(frozen=True)
class ClassScore:
    """The accuracy on one class of the old held-out sets.

    Args:
        name: the class, or the index of its output.
        examples: how many it has in all old held-out sets.
        before: its accuracy before the update.
        after: its accuracy after the update.
    """

    name: str
    examples: int
    before: float
    after: float

    @property
    def fall(self) -> float:
        """The fall of its accuracy in points."""
        return 100 * (self.before - self.after)


def score_classes(
    held_out_sets: Sequence[HeldOutSet],
    correct_before: Mapping[int, Tensor],
    correct_after: Mapping[int, Tensor],
    names: Sequence[str],
) -> list[ClassScore]:
    """Compute the accuracy on each class over several held-out sets.

    Args:
        held_out_sets: the examples.
        correct_before: for the number of each set, the mask of the examples that were correct before the update.
        correct_after: the same after the update.
        names: of the classes; empty if labels are numbers.
    """
    if not held_out_sets:
        return []

    numbers = [held_out.number for held_out in held_out_sets]
    y = torch.cat([held_out.y for held_out in held_out_sets])
    all_correct_before = torch.cat([correct_before[number] for number in numbers]).double()
    all_correct_after = torch.cat([correct_after[number] for number in numbers]).double()

    class_scores = []
    for label in y.unique().tolist():
        name = names[label] if label < len(names) else str(label)
        has_label = y == label
        accuracy_before = float(all_correct_before[has_label].mean())
        accuracy_after = float(all_correct_after[has_label].mean())
        class_scores.append(ClassScore(name, int(has_label.sum()), accuracy_before, accuracy_after))
    return class_scores


@dataclass(eq=False, repr=False)
class Update:
    """The outcome of an update; ``str`` is the report.

    Args:
        number: of the update.
        method: the method that protected the old skills.
        accepted: whether the new model is deployed; False if old accuracy has fallen too far and nothing was replaced.
        new: False if these data had been learned before, so that there was nothing to do.
        held_out_sets: the examples that accuracy was measured on.
        learned: for the number of each held-out set, the accuracy right after its own update; 0 is that of the model
            before the first update.
        before: the accuracies of the model before this update.
        after: the accuracies of the new model.
        fall: by how many points old accuracy has fallen; None if there was no old held-out set.
        interval: the 95 % confidence interval of that fall, in points.
        classes: the accuracy on every class of the old held-out sets, before and after.
        rules: when an update is accepted.
        notes: further sentences of the report.
        suggestions: what to try if the update was refused.
        forgotten: the number of rows that were forgotten; None in an update that learns.
        folder: where the report is; None if nothing was written.
        result: all updates as one result, with the accuracy matrix.
    """

    number: int
    method: str
    accepted: bool = True
    new: bool = True
    held_out_sets: list[HeldOutSet] = field(default_factory=list)
    learned: Scores = field(default_factory=dict)
    before: Scores = field(default_factory=dict)
    after: Scores = field(default_factory=dict)
    fall: float | None = None
    interval: tuple[float, float] | None = None
    classes: list[ClassScore] = field(default_factory=list)
    rules: Rules = field(default_factory=Rules)
    notes: list[str] = field(default_factory=list)
    suggestions: list[str] = field(default_factory=list)
    forgotten: int | None = None
    folder: Path | None = None
    result: Result | None = None

    @property
    def old_held_out_sets(self) -> list[HeldOutSet]:
        """The held-out sets of old skills: all but that of this update."""
        return [held_out for held_out in self.held_out_sets if held_out.number != self.number]

    @property
    def old(self) -> list[int]:
        """The numbers of the old held-out sets."""
        return [held_out.number for held_out in self.old_held_out_sets]

    @property
    def is_certain(self) -> bool:
        """Whether the whole confidence interval is on the verdict's side of the tolerance."""
        if self.interval is None:
            return False
        low, high = self.interval
        if self.accepted:
            return high <= self.rules.tolerance
        return low > self.rules.tolerance

    def caveats(self) -> list[str]:
        """Warn if nothing new was learned, and if the old held-out sets are too small for the tolerance."""
        caveats = []

        # A model that was perfect on the new data before had nothing to learn.
        new_accuracy = self.after.get(self.number)
        if new_accuracy is not None and new_accuracy <= self.before.get(self.number, -1.0) < 1:
            caveats.append(
                "Accuracy on the new data has not improved: train for longer, or with less protection. --repeat "
                "trains on data that were learned before."
            )

        sizes = [len(held_out) for held_out in self.old_held_out_sets]
        if sizes:
            # The mean over the sets moves by less than the accuracy of a single set.
            example_weight = 100 / min(sizes)
            if not self.rules.per_set:
                example_weight /= len(sizes)
            if example_weight > self.rules.tolerance:
                caveats.append(
                    f"Held-out set too small: one example is worth {example_weight:.1f} points, more than the "
                    "tolerance. Give more old examples."
                )
        return caveats

    def __str__(self) -> str:
        # Nothing was trained or measured: the notes say why.
        if not self.new:
            return printable_lines("\n".join(self.notes))

        verdict = "accepted" if self.accepted else "refused, nothing is replaced"
        if self.forgotten is not None:
            verdict = f"forgot {self.forgotten:,} rows"
        lines = [
            f"Update {self.number} with {self.method}: {verdict}.",
            "",
            self._format_accuracies(),
            "",
            self._format_fall(),
            *self._format_interval(),
            *self._format_classes(),
            *self.notes,
        ]
        if self.suggestions:
            lines += ["", "What to try:", *(f"- {suggestion}" for suggestion in self.suggestions)]

        # Names of classes and files may contain control characters of the terminal.
        return printable_lines("\n".join(lines))

    __repr__ = __str__

    def _format_accuracies(self) -> str:
        rows = [["accuracy in %", "examples", "learned", "before", "after"]]
        for held_out in self.held_out_sets:
            cells = []
            for scores in (self.learned, self.before, self.after):
                accuracy = scores.get(held_out.number)
                cells.append("–" if accuracy is None else f"{100 * accuracy:.1f}")
            rows.append([str(held_out), f"{len(held_out):,}", *cells])
        return align_columns(rows)

    def _format_fall(self) -> str:
        if self.fall is None and self.forgotten is not None:
            return "Accuracy was not measured: there is no held-out set."
        if self.fall is None:
            return "Old accuracy was not measured: there is no held-out set of old skills yet."

        before = 100 * fmean(self.before[number] for number in self.old)
        after = 100 * fmean(self.after[number] for number in self.old)
        scope = "; in the held-out set that lost most" if self.rules.per_set else ":"
        if self.fall > 0:
            change = f"{self.fall:.1f} points less"
        elif self.fall < 0:
            change = f"{-self.fall:.1f} points more"
        else:
            change = "no change"
        if self.forgotten is not None:
            return f"Accuracy {before:.1f} → {after:.1f}: {change}."
        limit = f"at most {self.rules.tolerance:g} less are allowed"
        return f"Old accuracy {before:.1f} → {after:.1f}{scope} {change}, {limit}."

    def _format_interval(self) -> list[str]:
        if self.interval is None:
            return []

        low, high = self.interval
        examples = sum(len(held_out) for held_out in self.old_held_out_sets)
        text = f"With 95 % confidence the loss is between {low:.1f} and {high:.1f} points ({examples:,} old examples)."
        if not self.is_certain:
            alternative = "more" if self.accepted else "no more"
            text += f" It may be {alternative} than the tolerance: to be certain, give more old examples."
        return [text]

    def _format_classes(self) -> list[str]:
        """Format the classes that lost more than the tolerance and more than one example, the worst first."""
        # 150 is one and a half examples times 100 points: rounding must not count one example as two.
        lost = [c for c in self.classes if c.fall > self.rules.tolerance and c.fall * c.examples > 150]
        lost.sort(key=lambda c: -c.fall * c.examples)
        if not lost:
            return []

        rows = [["old classes that lost most, in %", "examples", "before", "after"]]
        for c in lost[:MAX_CLASSES_SHOWN]:
            rows.append([c.name, f"{c.examples:,}", f"{100 * c.before:.1f}", f"{100 * c.after:.1f}"])

        lines = ["", align_columns(rows)]
        if len(lost) > MAX_CLASSES_SHOWN:
            lines.append(f"… and {len(lost) - MAX_CLASSES_SHOWN} more classes.")
        return [*lines, ""]


def extend_history(history: History, update: Update, parent: int) -> dict[int, Scores]:
    """Add the accuracies of an update to the history; those before it belong to the version it was trained from."""
    # Data that are given and not stored have no number that a later update could refer to.
    before = {number: score for number, score in update.before.items() if number != NOT_STORED}
    after = {number: score for number, score in update.after.items() if number != NOT_STORED}
    return {**history, parent: {**history.get(parent, {}), **before}, update.number: after}


def accuracy_matrix(history: History, update: Update) -> Matrix:
    """Arrange the history as a matrix: a row after each update, a column per held-out set, nan if not measured."""
    numbers = [held_out.number for held_out in update.held_out_sets if held_out.number != NOT_STORED]
    rows = [history.get(number, {}) for number in numbers]

    # If nothing is stored of old skills, the data that were given with this update stand for them.
    if len(numbers) == 1 and NOT_STORED in update.before:
        numbers = [NOT_STORED, *numbers]
        rows = [update.before, update.after]
    return np.array([[row.get(number, math.nan) for number in numbers] for row in rows], dtype=np.float64)
