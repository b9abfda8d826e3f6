"""An update from beginning to end: what stands, what is learned, what is measured, what is written."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from everlearn.cost import Clock
from everlearn.fingerprint import fingerprint
from everlearn.method import Method, label
from everlearn.sources.data import Data
from everlearn.trainer.evaluation import outputs_of
from everlearn.trainer.training import OptimizerFactory, Training, adam
from everlearn.updating import reading
from everlearn.updating.exams import GIVEN, Exam, measure, unexamined
from everlearn.updating.labels import Classes
from everlearn.updating.learning import How, check_method, learn, packed, remember
from everlearn.updating.outcome import Rules, Update
from everlearn.updating.reading import Reading
from everlearn.updating.standing import Standing, standing
from everlearn.updating.state import State
from everlearn.updating.weights import Factory
from everlearn.updating.writing import Learned, accept, refuse


def update(
    make_model: Factory,
    weights: str | os.PathLike[str],
    state: str | os.PathLike[str],
    data: Any,
    method: Method,
    *,
    old: Any = None,
    classes: Sequence[str] | None = None,
    read: Reading = Reading(),  # noqa: B008 - frozen
    tolerance: float = 2.0,
    each: bool = False,
    exam: float = 0.2,
    keep: int = 1000,
    versions: int = 5,
    training: Training = Training(epochs=10, batch_size=32),  # noqa: B008
    optimizer: OptimizerFactory = adam,
    output: str | None = None,
    device: str | torch.device | None = None,
    accept_weights: bool = False,
    again: bool = False,
    dry_run: bool = False,
) -> Update:
    """Teach a deployed model new data, and replace it only if it has not forgotten too much of the old.

    The state folder holds a version per accepted update: weights, what the method has learned, held-back examples that are the
    exam of this update in all later ones. A process that is killed leaves the model and the state of before or of after, never
    a mixture; the same call again goes on. Your method and your random state stay as they were.

    Args:
        make_model: a function without arguments that makes the model.
        weights: its deployed weights, a safetensors file: read in the first update, replaced when an update is accepted.
        state: the state folder; for a first update a new or empty one.
        data: what to learn: a CSV, Parquet or npz file, a folder of images, ``sources.Data`` or a pair (x, y) of arrays.
        method: what protects the old skills; the same kind in all updates.
        old: data of the old skills, of the same kinds. In a first update the method is told of them, and a share becomes an exam;
            later they are an exam only. Of these too the share ``exam`` alone is measured on.
        classes: in a first update, the names of the model's outputs in their order; not needed where labels are their numbers.
        read: which columns are inputs and labels, to what size images are brought.
        tolerance: by how many points old accuracy, the mean over the old exams, may fall.
        each: let no old exam fall by more, instead of their mean.
        exam: the share of the data that is held back as an exam, where they bring no test set of their own.
        keep: how many examples of an exam are kept at most; 0 keeps none, and then old accuracy is measured by ``old`` alone.
        versions: how many versions are kept at most.
        training: epochs, batch size, seed and the like.
        optimizer: a function of the parameters that makes one.
        output: name of the output layer, which grows with new classes; by default the last ``nn.Linear``.
        device: where to train.
        accept_weights: go on from the weights file although it is not what the last update wrote.
        again: learn data that were learned before once more.
        dry_run: learn and measure, but write nothing.
    """
    check_method(method)
    rules, how, folder = Rules(tolerance, each, exam, keep, versions), How(training, optimizer, output), State(state)
    with nullcontext() if dry_run else folder.alone():
        now = standing(
            folder, make_model, Path(weights), copy.deepcopy(method), classes, output, device, accept_weights
        )
        if not dry_run:
            now.mend(folder)
        now.reading = read.over(now.reading)
        task = Material(now, data, old, rules)
        if task.learned_as is not None and not again:
            return Update(task.learned_as, label(method), new=False, notes=[*now.notes, task.known_already])
        done = _learned(now, task, rules, how)
        if dry_run:
            done.update.notes.append("A dry run: nothing is written.")
        else:
            (accept if done.update.accepted else refuse)(folder, now, done, how)
        return done.update


class Material:
    """What an update learns and is examined on, read and numbered as the model's outputs.

    Args:
        now: what stands.
        data: what to learn.
        old: what is brought along of old skills.
        rules: how much is held back, how much kept.
    """

    def __init__(self, now: Standing, data: Any, old: Any, rules: Rules) -> None:
        self.title, known = _title(data, "the new data"), now.classes
        raw = self._read(now, data, self.title, rules)
        self.classes = known.with_those_of(raw, self.title)
        (x, y), held = self.classes.numbered(raw, self.title)
        self.pair = (x, y)
        self.exam = Exam(now.number + 1, self.title, *held).at_most(rules.keep or len(held[1]))
        self.outputs = outputs_of(now.model, x, self.title)
        if len(known.names) > self.outputs:
            raise ValueError(
                f"classes: {len(known.names)} are named, but the model has {self.outputs} outputs; name these."
            )
        self.needed = self.classes.needed(torch.cat([y, held[1]]), self.outputs, self.title)
        self.print = fingerprint([self.pair, held])
        self.learned_as = now.prints.get(str(self.print))
        self.old_pair, self.old_exam = None, None
        if old is not None:
            number, name = (0 if now.version is None else GIVEN), _title(old, "the old data")
            self.old_pair, held = known.numbered(self._read(now, old, name, rules), name)
            self.old_exam = Exam(number, name, *held).at_most(rules.keep or len(held[1]))
        self._leave_out(now)

    def _leave_out(self, now: Standing) -> None:
        """Nobody learns from an exam, be it of before."""
        old, every = [e for e in (*now.exams, self.old_exam) if e is not None], len(self.pair[1])
        self.pair = unexamined(self.pair, old)
        if self.old_pair is not None:
            self.old_pair = unexamined(self.old_pair, [*old, self.exam])
        self.left_out = every - len(self.pair[1])
        if not len(self.pair[1]):
            raise ValueError(
                f"All {every} examples of {self.title} are in exams of old skills: there is nothing to learn."
            )

    @property
    def known_already(self) -> str:
        """Why there is nothing to do."""
        return (
            f"{self.title} was learned in update {self.learned_as}: there is nothing to do. To learn it once more, say so: again=True "
            "(--again on the command line)."
        )

    def news(self, known: Classes) -> list[str]:
        """What is to be said of the data."""
        grew = self.needed > self.outputs
        names = list(self.classes.names[len(known.names) :])
        if grew and not names:
            names = list(map(str, range(self.outputs, self.needed)))
        wide = (
            f" The output layer grew from {self.outputs} to {self.needed} outputs: load the weights with everlearn.updating.load, or "
            "make the model as wide."
        )
        told = [f"New classes: {', '.join(names)}.{wide if grew else ''}"] if names else []
        if self.left_out:
            told.append(f"{self.left_out} examples of {self.title} are in exams of old skills, and were not learned.")
        return told

    def _read(self, now: Standing, data: Any, title: str, rules: Rules) -> Data:
        found = reading.read(data, now.reading, rules.exam)
        reading.check(found, title)
        if found.features:
            now.reading = replace(now.reading, x=tuple(found.features))  # the next file may have them in another order
        return found


def _learned(now: Standing, task: Material, rules: Rules, how: How) -> Learned:
    """Learn, and measure before and after."""
    clock, method, notes = Clock(), now.method, list(now.notes)
    exams = [*([task.old_exam] if task.old_exam else []), *now.exams, task.exam]
    with clock("evaluate"):
        before = measure(now.model, exams)
    if now.version is None and task.old_pair is None:
        notes.append(_blind(method))
    elif now.version is None and task.old_pair is not None:
        with clock("consolidate"):
            remember(now.model, method, task.old_pair, how)
    start = packed(method)
    grown = task.needed if task.needed > task.outputs else None
    trained = learn(now.model, method, task.pair, now.number + 1, grown, how)
    clock.add(trained.seconds)
    notes += task.news(now.classes)
    with clock("evaluate"):
        after = measure(now.model, exams)
    done = Update(now.number + 1, label(method), exams=exams, before=before, after=after, rules=rules, notes=notes)
    done.learned = {n: row[n] for n, row in now.history.items() if n in row}
    done.fall = rules.fall(before, after, done.old)
    done.accepted = done.fall is None or done.fall <= rules.tolerance
    notes += done.doubts()
    return Learned(done, start, task.classes, task.pair, str(task.print), dict(clock.seconds))


def _blind(method: Method) -> str:
    return (
        f"This is the first update: the skills that the model has are unknown to {label(method)}, which cannot protect them, and nobody "
        "can measure them. Data of these skills, old=… (--old on the command line), change both; without, both begin with the next update."
    )


def _title(data: Any, otherwise: str) -> str:
    return Path(data).name if isinstance(data, (str, os.PathLike)) else otherwise
