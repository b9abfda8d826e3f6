"""An update from beginning to end: what stands, what is learned, what is measured, what is written."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from everlearn.cost import Clock
from everlearn.method import Method, label
from everlearn.trainer.training import OptimizerFactory, Training, adam
from everlearn.updating.exams import measure
from everlearn.updating.learning import How, check_device, check_method, learn, packed, remember
from everlearn.updating.material import Material, gather
from everlearn.updating.outcome import Rules, Update
from everlearn.updating.reading import Reading
from everlearn.updating.standing import Standing, standing
from everlearn.updating.state import State
from everlearn.updating.weights import Factory, build, round_as
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
        accept_weights: go on from the weights file as it is, although the last update did not write it. Where it is that of a version
            which is kept, all goes on from there: what the method knew, classes, exams, what counts as learned.
        again: learn data that were learned before once more.
        dry_run: learn and measure, but write nothing.
    """
    check_method(method)
    check_device(device)
    rules, how, folder = Rules(tolerance, each, exam, keep, versions), How(training, optimizer, output), State(state)
    with nullcontext() if dry_run else folder.alone():
        now = standing(
            folder,
            Path(weights),
            lambda found: build(make_model, found, output).to(device),
            copy.deepcopy(method),
            classes,
            accept_weights,
            output,
        )
        now.reading = read.over(now.reading)
        task = gather(now, data, old, rules)
        if (before := now.prints.get(task.print)) is not None and not again:
            told = [] if dry_run else now.finish(folder)
            return Update(before, label(method), new=False, notes=[*now.notes, *told, task.known_already(before)])
        done = _learned(now, task, rules, how)
        if dry_run:
            done.update.notes.append("A dry run: nothing is written.")
        else:
            (accept if done.update.accepted else refuse)(folder, now, done, how)
        return done.update


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
    trained = learn(now.model, method, task.pair, now.next, grown, how)
    clock.add(trained.seconds)
    notes += task.news(now.classes)
    if lossy := round_as(now.model, now.weights):
        notes.append(
            f"The new weights are rounded to {' and '.join(lossy)}, as {now.path.name} has them, and measured so."
        )
    with clock("evaluate"):
        after = measure(now.model, exams)
    done = Update(now.next, label(method), exams=exams, before=before, after=after, rules=rules, notes=notes)
    done.learned = {n: row[n] for n, row in now.history.items() if n in row}
    done.fall = rules.fall(before, after, done.old)
    done.accepted = done.fall is None or done.fall <= rules.tolerance
    notes += done.doubts()
    new, told = task.learned - now.marks - task.told, task.told
    return Learned(done, start, task.classes, task.pair, task.print, new, told, dict(clock.seconds))


def _blind(method: Method) -> str:
    return (
        f"This is the first update: the skills that the model has are unknown to {label(method)}, which cannot protect them, and nobody "
        "can measure them. Data of these skills, old=… (--old on the command line), change both; without, both begin with the next update."
    )
