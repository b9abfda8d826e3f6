"""What an update learns and is examined on, the one apart from the other."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from everlearn.fingerprint import fingerprint
from everlearn.sources.data import Data, first_few
from everlearn.trainer.evaluation import outputs_of
from everlearn.updating import reading
from everlearn.updating.exams import GIVEN, Exam, marks, unexamined, unlearned
from everlearn.updating.labels import Classes
from everlearn.updating.learning import Pair
from everlearn.updating.outcome import Rules
from everlearn.updating.standing import Standing


@dataclass(eq=False)
class Material:
    """New data, and what is brought along of old skills, with the numbers of the model's outputs as labels.

    Args:
        title: of the new data, for people.
        classes: of the outputs, with the new ones.
        pair: what is learned.
        exam: what is held back of it.
        outputs: how many the model has.
        known: how many the state knows, where these are more.
        needed: how many it must have.
        print: of the new data as they came.
        old_pair: what the method is told of old skills in a first update.
        old_exam: what is measured of them.
        learned: the marks of all that is learned.
        told: the marks of what the method is told.
        notes: what should be known of the exams.
    """

    title: str
    classes: Classes
    pair: Pair
    exam: Exam
    outputs: int
    known: int
    needed: int
    print: str
    old_pair: Pair | None = None
    old_exam: Exam | None = None
    learned: set[bytes] = field(default_factory=set)
    told: set[bytes] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def divide(self, now: Standing, keep: int) -> None:
        """Let nobody learn from an exam, be it of before, nor be examined on what was learned."""
        if self.old_exam is not None:
            self.old_exam = self._unlearned(self.old_exam, now.marks, keep)
        old, every = [e for e in (*now.exams, self.old_exam) if e is not None], len(self.pair[1])
        self.pair = unexamined(self.pair, old)
        if not len(self.pair[1]):
            raise ValueError(
                f"All {every} examples of {self.title} are in exams of old skills: there is nothing to learn."
            )
        if left_out := every - len(self.pair[1]):
            self.notes.append(f"{left_out} examples of {self.title} are in exams of old skills, and were not learned.")
        self.learned = set(marks(self.pair[0]))
        self.exam = self._unlearned(self.exam, now.marks | self.learned, keep)
        if self.old_pair is not None and now.version is None:
            self.old_pair = unexamined(self.old_pair, [*old, self.exam])
            self.told = set(marks(self.old_pair[0]))

    def known_already(self, number: int) -> str:
        """Why there is nothing to do."""
        return (
            f"{self.title} was learned in update {number}: there is nothing to do. To learn it once more, say so: again=True "
            "(--again on the command line)."
        )

    def news(self, known: Classes) -> list[str]:
        """What is to be said of the data."""
        names, told = self.classes.names[len(known.names) :] or tuple(map(str, range(self.known, self.needed))), []
        if self.known > self.outputs:
            told.append(
                f"The weights have {self.outputs} outputs, those of the last update had {self.known}: the others begin anew."
            )
        if names:
            told.append(f"New classes: {first_few(names, limit=20)}.")
        if self.needed > self.outputs:
            told.append(
                f"The output layer grew from {self.outputs} to {self.needed} outputs: load the weights with everlearn.updating.load, or "
                "make the model as wide."
            )
        return [*([" ".join(told)] if told else []), *self.notes]

    def _unlearned(self, exam: Exam, learned: set[bytes], keep: int) -> Exam:
        """At most so many of its examples that nobody learned; where there are none, of all, for want of better ones."""
        left = unlearned(exam, learned)
        if not len(left):
            self.notes.append(
                f"All {len(exam)} examples of the exam of {exam.title} were learned, now or before: it tells what is known by heart."
            )
            left = exam
        elif gone := len(exam) - len(left):
            self.notes.append(f"{gone} examples of {exam.title} were learned, now or before, and left out of its exam.")
        return left.at_most(keep or len(left))


def gather(now: Standing, data: Any, old: Any, rules: Rules) -> Material:
    """Read what is to be learned and what is brought along of old skills."""
    title, known = _title(data, "the new data"), now.classes
    old_title = _title(old, "the old data")
    raw = _read(now, data, title, rules)
    old_raw = None if old is None else _read(now, old, old_title, rules)
    if old_raw is not None:
        reading.check_same_columns(raw, title, old_raw, old_title)
    # Whatever order the next file has, its columns are found by these names.
    now.columns = now.columns or tuple(raw.features) or tuple(old_raw.features if old_raw is not None else ())
    classes = known.with_those_of(raw, title)
    pair, held = classes.numbered(raw, title)
    outputs = outputs_of(now.model, pair[0], title)
    wide = max(outputs, now.outputs)
    if len(known.names) > wide:
        raise ValueError(f"classes: {len(known.names)} are named, but the model has {outputs} outputs; name these.")
    needed = classes.needed(torch.cat([pair[1], held[1]]), wide, title)
    exam, own = Exam(now.next, title, *held), str(fingerprint([pair, held]))
    task = Material(title, classes, pair, exam, outputs, wide, needed, own)
    if old_raw is not None:
        task.old_pair, old_held = known.numbered(old_raw, old_title)
        task.old_exam = Exam(0 if now.version is None else GIVEN, old_title, *old_held)
    task.divide(now, rules.keep)
    return task


def _read(now: Standing, data: Any, title: str, rules: Rules) -> Data:
    found = reading.read(data, now.reading, rules.exam, now.columns)
    reading.check(found, title)
    return found


def _title(data: Any, otherwise: str) -> str:
    return Path(data).name if isinstance(data, (str, os.PathLike)) else otherwise
