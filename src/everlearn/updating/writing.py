"""What an update leaves: a version that counts and the deployed file, or the report of why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from everlearn import atomic
from everlearn.cost import state_bytes
from everlearn.method import count_parameters, label
from everlearn.report.html import html
from everlearn.results import Result, provenance
from everlearn.stream import Stream, Task
from everlearn.trainer.configuration import configuration
from everlearn.updating import weights as files
from everlearn.updating.exams import GIVEN, Exam, packed_marks
from everlearn.updating.labels import Classes
from everlearn.updating.learning import How, packed
from everlearn.updating.outcome import History, Update, matrix, with_this
from everlearn.updating.standing import (
    METHOD,
    MODEL,
    Standing,
    exam_file,
    field_values,
    kinds,
    marks_file,
    marks_files,
    replace_file,
)
from everlearn.updating.state import REFUSED, State
from everlearn.updating.weights import CLASSES, UPDATE

Files = dict[str, bytes | Path]


@dataclass(eq=False)
class Learned:
    """What was learned and measured, before anything is written.

    Args:
        update: the outcome.
        start: the method's state before these data, as bytes.
        classes: of the new model's outputs.
        pair: what was learned.
        print: of the data.
        marks: of the examples that had not been learned before.
        told: the marks of old examples that the method was told of.
        seconds: by purpose.
    """

    update: Update
    start: bytes
    classes: Classes
    pair: tuple[Tensor, Tensor]
    print: str
    marks: set[bytes]
    told: set[bytes]
    seconds: dict[str, float]


def accept(folder: State, now: Standing, done: Learned, how: How) -> None:
    """Write the new version, let it count, and only then replace the deployed file."""
    update, made = done.update, provenance()
    history = with_this(now.history, update, now.number)
    now.clean(folder)
    if now.version is None:
        _write_first(folder, now, done, made)
    facts = {UPDATE: str(update.number), CLASSES: json.dumps(done.classes.names)}
    new = files.packed(now.model, now.weights, facts)
    update.place = folder.place(update.number)
    update.notes.append(
        f"{now.weights.path.name} is that of update {update.number} now; {update.place} holds it, what the method knows, and report.html."
    )
    update.result = _result(now, done, history, how, made)
    version = folder.write(
        update.number,
        {MODEL: new, METHOD: packed(now.method), **_kept_files(now, done), **_report(update, now.weights.path.name)},
        {
            **_facts(now, done.classes, [e for e in update.exams if _kept(e, update)], history, made),
            "from": now.number,
            "learned": {**now.prints, done.print: update.number},
            "data": {"title": update.exams[-1].title, "print": done.print, "examples": len(done.pair[1])},
            "accuracy": {
                "before": update.before,
                "after": update.after,
                "fall": update.fall,
                "interval": update.interval,
                "classes": [asdict(score) for score in update.classes],
                **asdict(update.rules),
            },
            "training": update.result.config["training"],
        },
    )
    try:
        now.check_unchanged()
    except ValueError:
        now.clean(folder)
        raise
    folder.point_to(version, replacing=now.there)
    replace_file(files.parsed(now.weights.path, new))
    with suppress(OSError):  # the update stands; what fails from here on the next one does
        folder.point_to(version)
        folder.forget(update.rules.versions, now.number)


def refuse(folder: State, now: Standing, done: Learned, how: How) -> None:
    """Write the report, and finish what an earlier update, which was accepted and stopped, had left to do."""
    update = done.update
    update.place = folder.folder / REFUSED
    update.notes.append(f"The report is in {update.place}.")
    update.result = _result(now, done, with_this(now.history, update, now.number), how, provenance())
    for name, content in _report(update, now.weights.path.name).items():
        atomic.write(atomic.writable_folder(update.place) / name, content)
    update.notes += now.finish(folder)  # last: what fails before it replaces nothing


def _write_first(folder: State, now: Standing, done: Learned, made: Mapping[str, Any]) -> None:
    """The model as it was deployed before the first update, so that it is not lost."""
    old = [e for e in done.update.exams if e.number == 0 and _kept(e, done.update)]
    folder.write(
        0,
        {MODEL: now.weights.content, METHOD: done.start, **{exam_file(0): e.packed() for e in old}, **_told(done)},
        {
            **_facts(now, now.classes, old, {0: {e.number: done.update.before[0] for e in old}}, made),
            "learned": {},
        },
    )


def _facts(
    now: Standing, classes: Classes, exams: list[Exam], history: History, made: Mapping[str, Any]
) -> dict[str, Any]:
    """What every version says of itself."""
    return {
        "method": {
            "name": label(now.method),
            "kinds": kinds(now.method),
            "fields": repr(now.method),
            "values": field_values(now.method),
        },
        "classes": list(classes.names),
        "reading": asdict(now.reading),
        "columns": list(now.columns),
        "exams": [{"number": e.number, "title": e.title, "examples": len(e)} for e in exams],
        "history": history,
        "made": made,
    }


def _kept(exam: Exam, update: Update) -> bool:
    """Whether an exam stays: those that were kept do, those of today unless none shall be."""
    today = exam.number == update.number or (exam.number == 0 and update.number == 1)
    return exam.number != GIVEN and (update.rules.keep > 0 or not today)


def _kept_files(now: Standing, done: Learned) -> Files:
    """Exams, and what tells which examples were learned: new ones as bytes, earlier ones as the files they are."""
    update, version = done.update, now.version
    new: Files = {exam_file(e.number): e.packed() for e in update.exams if e not in now.exams and _kept(e, update)}
    if done.marks and update.rules.keep:  # who keeps no example keeps no trace of one either
        new[marks_file(update.number)] = packed_marks(done.marks)
    if version is None:
        return {**new, **_told(done)}
    earlier = [*(exam_file(e.number) for e in now.exams), *marks_files(version)]
    return {**new, **{name: version.folder / name for name in earlier}}


def _told(done: Learned) -> Files:
    """What tells the old examples that the method knows: part of the first version too, which one may go back to."""
    return {marks_file(0): packed_marks(done.told)} if done.told and done.update.rules.keep else {}


def _report(update: Update, name: str) -> dict[str, bytes]:
    result = update.result
    pages = (
        {}
        if result is None
        else {"result.json": result.packed(), "report.html": html([result], f"Updates of {name}").encode()}
    )
    return {"report.txt": f"{update}\n".encode(), **pages}


def _result(now: Standing, done: Learned, history: History, how: How, made: dict[str, Any]) -> Result:
    """All updates so far as one result."""
    update, model = done.update, now.model
    same = len({frozenset(e.y.unique().tolist()) for e in update.exams}) == 1
    stream = Stream(
        [Task(done.pair, id=update.number)],
        "domain" if same else "class",
        f"updates of {now.weights.path.name}",
        [e.task for e in update.exams],
        settings={"update": update.number},
    )
    cost = {
        "seconds": done.seconds,
        "parameters": [count_parameters(model, now.method)],
        "state_bytes": [state_bytes(now.method.state_dict())],
    }
    config = configuration(stream, now.method, model, how.training, how.optimizer, False, "test")
    return Result(matrix(history, update), config, [], cost, made)
