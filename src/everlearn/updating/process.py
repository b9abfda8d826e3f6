"""An update from beginning to end: what stands, what is learned, what is measured, what is written."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.cost import Clock
from everlearn.method import Method, label
from everlearn.seeds import derive, seeded
from everlearn.trainer.training import OptimizerFactory, Training, adam, device_of
from everlearn.updating import weights as files
from everlearn.updating.exams import GIVEN, Exam, correct_answers, scores, skill_above_chance
from everlearn.updating.intervals import count_pairs
from everlearn.updating.learning import (
    How,
    balance_memory,
    check_deployed,
    check_device,
    check_method,
    learn,
    packed,
    remember,
)
from everlearn.updating.material import Material, gather
from everlearn.updating.outcome import Rules, Update, class_scores
from everlearn.updating.reading import Reading, check_known_columns, is_table
from everlearn.updating.standing import Standing, last_method, standing
from everlearn.updating.state import State
from everlearn.updating.suggestions import suggest
from everlearn.updating.weights import Factory, Weights, build, round_as
from everlearn.updating.writing import Learned, accept, refuse

NEAR_CHANCE = 0.2  # of the way from guessing to perfect


def update(
    make_model: Factory,
    weights: str | os.PathLike[str],
    state: str | os.PathLike[str],
    data: Any,
    method: Method | None = None,
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
    balance: bool = True,
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
        method: what protects the old skills; the same kind in all updates. Later ones may leave it out.
        old: data of the old skills, of the same kinds. In a first update the method is told of them, and a share becomes an exam;
            later they are an exam only. Of these too the share ``exam`` alone is measured on.
        classes: in a first update, the names of the model's outputs in their order; not needed where labels are their numbers.
        read: which columns are inputs and labels, to what size images are brought. The order of a table's columns is that of
            the first update; later tables may have another, as columns are found by their names.
        tolerance: by how many points old accuracy, the mean over the old exams, may fall.
        each: let no old exam fall by more, instead of their mean.
        exam: the share of the data that is held back as an exam, where they bring no test set of their own.
        keep: how many examples of an exam are kept at most; 0 keeps none, and then old accuracy is measured by ``old`` alone.
        versions: how many versions are kept at most.
        training: epochs, batch size, seed and the like.
        optimizer: a function of the parameters that makes one.
        output: name of the output layer, which grows with new classes; by default the last ``nn.Linear``.
        balance: in a first update, let a replay method share its memory equally among updates and their classes, where its policy
            is the default; a reservoir would give most places to the update with the most rows.
        device: where to train.
        accept_weights: go on from the weights file as it is, although the last update did not write it. Where it is that of a version
            which is kept, all goes on from there: what the method knew, classes, exams, what counts as learned.
        again: learn data that were learned before once more.
        dry_run: learn and measure, but write nothing.
    """
    if method is not None:
        check_method(method)
    check_device(device)
    rules, how, folder = Rules(tolerance, each, exam, keep, versions), How(training, optimizer, output), State(state)

    def build_from(found: Weights) -> nn.Module:
        return build(make_model, found, output).to(device)

    with nullcontext() if dry_run else folder.alone():
        method = last_method(folder) if method is None else copy.deepcopy(method)
        check_method(method)
        now = standing(folder, Path(weights), build_from, method, classes, accept_weights, output)
        if now.version is None and balance:
            balance_memory(method)
        check_known_columns(now.columns, read.x if is_table(data) else ())
        now.reading = read.over(now.reading)
        task = gather(now, data, old, rules)
        if (before := now.prints.get(task.print)) is not None and not again:
            told = [] if dry_run else now.finish(folder)
            return Update(before, label(method), new=False, notes=[*now.notes, *told, task.known_already(before)])
        done = _learned(now, task, rules, how, build_from)
        if dry_run:
            done.update.notes.append("A dry run: nothing is written.")
        else:
            (accept if done.update.accepted else refuse)(folder, now, done, how)
        return done.update


def _learned(
    now: Standing, task: Material, rules: Rules, how: How, build_from: Callable[[Weights], nn.Module]
) -> Learned:
    """Learn, and measure before and after."""
    clock, method, notes = Clock(), now.method, list(now.notes)
    exams = [*([task.old_exam] if task.old_exam else []), *now.exams, task.exam]
    with clock("evaluate"):
        correct_before = correct_answers(now.model, exams)
    for warning in _near_chance(now, exams, correct_before):
        warnings.warn(warning, stacklevel=3)
        notes.append(f"Warning: {warning}")
    if now.version is None and task.old_pair is None:
        notes.append(_blind(method))
    elif now.version is None and task.old_pair is not None:
        with clock("consolidate"):
            remember(now.model, method, task.old_pair, how)
    start = packed(method)
    grown = task.needed if task.needed > task.outputs else None
    trained = learn(now.model, method, task.pair, now.next, grown, how)
    clock.add(trained.seconds)
    notes += task.news(now.classes)
    if lossy := round_as(now.model, now.weights):
        notes.append(
            f"The new weights are rounded to {' and '.join(lossy)}, as {now.path.name} has them, and measured so."
        )
    with clock("evaluate"):
        # What is measured is what will be deployed: a plain model with these weights, without whatever learned them.
        with seeded(derive(how.training.seed, "deployed", now.next), device_of(now.model)):
            deployed = build_from(files.parsed(now.weights.path, files.packed(now.model, now.weights, {})))
        check_deployed(now.model, method, deployed, task.exam.x)
        correct_after = correct_answers(deployed, exams)
    before, after = scores(correct_before), scores(correct_after)
    done = Update(now.next, label(method), exams=exams, before=before, after=after, rules=rules, notes=notes)
    done.learned = {n: row[n] for n, row in now.history.items() if n in row}
    done.fall = rules.fall(before, after, done.old)
    done.accepted = done.fall is None or done.fall <= rules.tolerance
    done.interval = rules.interval([count_pairs(correct_before[n], correct_after[n]) for n in done.old])
    old_exams = [exam for exam in exams if exam.number in done.old]
    done.classes = class_scores(old_exams, correct_before, correct_after, task.classes.names)
    if not done.accepted:
        done.suggestions = suggest(
            method,
            is_first=now.version is None,
            has_new_classes=task.needed > task.known,
            is_certain=done.is_certain,
        )
    notes += done.doubts()
    new, told = task.learned - now.marks - task.told, task.told
    return Learned(done, start, task.classes, task.pair, task.print, new, told, dict(clock.seconds))


def _near_chance(now: Standing, exams: list[Exam], correct: dict[int, Tensor]) -> list[str]:
    """A warning for every exam of old skills, brought along by the user, on which the deployed model is hardly above guessing.

    Exams that were kept have the columns and labels that the model was trained on, and new data may well be answered wrongly.
    """
    found = []
    for exam in exams:
        is_brought_along = exam.number in (0, GIVEN) and exam not in now.exams
        if is_brought_along and skill_above_chance(exam, correct[exam.number]) < NEAR_CHANCE:
            accuracy = 100 * float(correct[exam.number].double().mean())
            found.append(
                f"Before this update the model answers only {accuracy:.1f} % of {exam} correctly, hardly more than guessing would: the "
                "columns (their order, --x; their scale) or the labels (--classes) are probably not those that it was trained on."
            )
    return found


def _blind(method: Method) -> str:
    return (
        f"This is the first update: the skills that the model has are unknown to {label(method)}, which cannot protect them, and nobody "
        "can measure them. Data of these skills, old=… (--old on the command line), change both; without, both begin with the next update."
    )
