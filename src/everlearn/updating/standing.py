"""What an update begins with: the deployed model, and what the state folder knows of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everlearn import atomic
from everlearn.method import Chain, Method, label, parts
from everlearn.methods import METHODS
from everlearn.sources.data import first_few
from everlearn.trainer.training import device_of
from everlearn.updating import weights as files
from everlearn.updating.exams import Exam, unpacked, unpacked_marks
from everlearn.updating.labels import Classes, given
from everlearn.updating.learning import unpack
from everlearn.updating.outcome import Scores
from everlearn.updating.reading import Reading
from everlearn.updating.state import State, Version
from everlearn.updating.weights import CLASSES, UPDATE, Weights

MODEL, METHOD = "model.safetensors", "method.pt"
NO_METHOD = (
    "A first update needs a method (--method), later ones take that of the first: er-ace, derpp or er where some examples may be kept, "
    "which new classes need; mas, ewc or lwf where none may. 'everlearn advise' asks a few questions and tells which fit."
)
ACCEPT = "accept_weights=True (--accept-weights on the command line)"


@dataclass(eq=False)
class Standing:
    """The model as it stands, with all that is known of it.

    Args:
        path: of the deployed file, as it was given.
        there: the digest of what lay there.
        weights: the deployed file, as it is or, where it is ``behind``, as it should be.
        model: with these weights.
        method: with what it has learned.
        classes: of the outputs.
        version: the one that is gone on from; None in a first update.
        last: the one that counts: the same, or a later one where somebody went back.
        outputs: how many the state knows, where the file may have fewer.
        exams: kept from earlier updates.
        marks: of all examples that were learned.
        history: what was measured after each update.
        prints: of the data that were learned, and in which update.
        reading: how data files were read.
        columns: the columns that the model's inputs are made of, in its order; empty where no table was read yet.
        notes: what should be known.
    """

    path: Path
    there: str
    weights: Weights
    model: nn.Module
    method: Method
    classes: Classes
    version: Version | None = None
    last: Version | None = None
    outputs: int = 0
    exams: list[Exam] = field(default_factory=list)
    marks: set[bytes] = field(default_factory=set)
    history: dict[int, Scores] = field(default_factory=dict)
    prints: dict[str, int] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)
    columns: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Of the version; 0 before the first update."""
        return 0 if self.version is None else self.version.number

    @property
    def next(self) -> int:
        """The number of this update; no version has it, also where somebody went back."""
        return 1 if self.last is None else self.last.number + 1

    @property
    def behind(self) -> bool:
        """Whether the file is still that of before the last update, which was stopped when it had only to be replaced."""
        return self.there != self.weights.digest

    def check_unchanged(self) -> None:
        """Refuse to replace what somebody has deployed since the file was read."""
        if not self.path.exists() or files.digest(self.path.read_bytes()) != self.there:
            raise ValueError(
                f"{self.path} was changed by somebody else while this update learned, so it stays as it is now and the update is not "
                f"used: look at it, and if it is right, update again from it, {ACCEPT}."
            )

    def clean(self, folder: State) -> None:
        """Take away what an update that was stopped had begun."""
        folder.clean(self.last)
        for part in atomic.parts(self.weights.path):
            part.unlink(missing_ok=True)

    def finish(self, folder: State) -> list[str]:
        """Do what an update that was stopped had left to do, and tell it."""
        self.clean(folder)
        if self.last is None or self.last.replacing is None:
            return []
        told = []
        if self.behind:
            self.check_unchanged()
            replace_file(self.weights)
            told = [f"{self.path.name} is put right: it is that of update {self.number} now."]
        with suppress(OSError):  # the file is right; the next call notes it
            folder.point_to(self.last)
        return told


def replace_file(weights: Weights) -> None:
    """The deployed file anew, whole or not at all, with its permissions."""
    atomic.write(weights.path, weights.content, mode=weights.path.stat().st_mode & 0o777)


def standing(
    folder: State,
    path: Path,
    build: Callable[[Weights], nn.Module],
    method: Method,
    classes: Sequence[str] | None,
    accept: bool,
    output: str | None,
) -> Standing:
    """Read what is there, and refuse what does not belong together.

    Args:
        folder: the state.
        path: of the deployed file.
        build: makes the model with such weights.
        method: which is given what it has learned.
        classes: names of the outputs, where somebody gave them.
        accept: go on from the file whatever it is.
        output: name of the output layer.
    """
    last = folder.current()
    if last is None:
        found = _undisturbed(files.read(path), folder, accept)
        names = given(classes or json.loads(found.facts.get(CLASSES, "[]")) or None)
        return Standing(path, found.digest, found, build(found), method, names)
    start = _start(folder, path, last, accept)
    model, version, facts = build(start.weights), start.version, start.version.facts
    _restore(method, version, device_of(model))
    names, outputs = _same(facts["classes"], classes), 0
    if start.own is not None:
        names, outputs = _agreed(names, start.weights, folder), files.outputs_in(start.own, model, output)
    return Standing(
        path, start.there, start.weights, model, method, names, version, last, outputs,
        exams=[unpacked(e["number"], e["title"], version.read(exam_file(e["number"]))) for e in facts["exams"]],
        marks=set().union(*(unpacked_marks(version.read(name)) for name in marks_files(version))),
        history={int(v): {int(n): score for n, score in row.items()} for v, row in facts["history"].items()},
        prints=dict(facts["learned"]), reading=Reading.from_json(facts["reading"]), columns=tuple(facts.get("columns", ())),
        notes=start.notes,
    )  # fmt: skip


def exam_file(number: int) -> str:
    """The name of a kept exam."""
    return f"exam-{number:04d}.safetensors"


def marks_file(number: int) -> str:
    """The name of what tells which examples an update learned."""
    return f"learned-{number:04d}.bin"


def marks_files(version: Version) -> list[str]:
    """Those of all updates so far that left one."""
    return [name for name in version.facts["files"] if re.fullmatch(r"learned-\d+\.bin", name)]


def _undisturbed(found: Weights, folder: State, accept: bool) -> Weights:
    """The file before a first update; one that an update wrote has its state elsewhere."""
    if UPDATE in found.facts and not accept:
        raise ValueError(
            f"{found.path.name} was written by update {found.facts[UPDATE]}, whose state is not in {folder.folder}: give the state folder "
            f"of that update, or go on without what its method had learned, {ACCEPT}."
        )
    return found


@dataclass(frozen=True)
class Start:
    """Where an update goes on from.

    Args:
        weights: the deployed file, as it is or as it should be.
        there: the digest of what lies there.
        version: what is known of these weights.
        own: what that version wrote, where the weights are of somebody else.
        notes: what to say of it.
    """

    weights: Weights
    there: str
    version: Version
    own: Weights | None = None
    notes: list[str] = field(default_factory=list)


def _start(folder: State, path: Path, last: Version, accept: bool) -> Start:
    """The weights to go on from, and the version they belong to."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is no file {path}; what update {last.number} wrote lies in {last.folder / MODEL}: copy it there."
        )
    content, real = path.read_bytes(), path.resolve()
    there = files.digest(content)
    if there == last.facts["files"][MODEL]:
        return Start(files.parsed(real, content), there, last)
    if accept:  # before all else: it may be an older version, put back because the last one was bad
        return _as_said(folder, path.name, last, files.parsed(real, content))
    if there == last.replacing:
        note = f"{path.name} was still that of before update {last.number}, which was stopped: what it wrote is gone on from."
        return Start(files.parsed(real, last.read(MODEL)), there, last, notes=[note])
    raise ValueError(
        f"{path} is not what update {last.number} wrote, somebody has changed it: put {last.folder / MODEL} in its place, or go on "
        f"from it as it is, {ACCEPT}."
    )


def _as_said(folder: State, name: str, last: Version, found: Weights) -> Start:
    """From a file that the last update did not write: with all of the version whose file it is, or of the last one where it is nobody's.

    An old model and what a method has learned since do not fit together: the output may have grown, and data that only the
    newer model had learned would count as learned.
    """
    said = f"{name} is not what update {last.number} wrote"
    version = folder.holding(MODEL, found.digest, last)
    if version is None:
        own = files.parsed(last.folder / MODEL, last.read(MODEL))
        return Start(found, found.digest, last, own, [f"{said}; as you said, it is gone on from."])
    version.read(MODEL)  # what its facts do not know was never written by an update
    first = "" if version.number else ", the model as it was deployed first"
    note = (
        f"{said}, but that of update {version.number}{first}: as you said, this goes on from update {version.number}, with what its method knew, "
        "its classes and its exams; what was learned since does not count as learned."
    )
    return Start(found, found.digest, version, notes=[note])


def _agreed(names: Classes, found: Weights, folder: State) -> Classes:
    """The names of the outputs where the file is of somebody else: it may name fewer or more, but no output otherwise."""
    theirs = tuple(json.loads(found.facts.get(CLASSES, "[]"))) if names.names else ()
    if any(ours != other for ours, other in zip(names.names, theirs, strict=False)):
        raise ValueError(
            f"{found.path.name} names its outputs {first_few(theirs)}, but in {folder.folder} they are {first_few(names.names)}: give the "
            f"state folder of this file, or start anew with an empty one, {ACCEPT}."
        )
    return Classes(max(names.names, theirs, key=len))


def _same(stored: list[str], asked: Sequence[str] | None) -> Classes:
    """The names that outputs have; they stay."""
    if asked is not None and list(asked) != stored[: len(asked)]:
        raise ValueError(
            f"classes: the outputs have names since the first update, {first_few(stored) or 'their numbers'}: leave it out."
        )
    return Classes(tuple(stored))


def _restore(method: Method, version: Version, device: torch.device) -> None:
    """What the method had learned; of another kind it cannot be."""
    stored: dict[str, Any] = version.facts["method"]
    if stored["kinds"] != kinds(method):
        raise ValueError(
            f"The state in {version.folder.parent} is of {stored['name']}, got {label(method)}: give the same kind of method, or start anew with "
            f"an empty state folder, {ACCEPT}."
        )
    content = version.read(METHOD)
    try:
        unpack(method, content, device)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".:")
        raise ValueError(
            f"The state in {version.folder.parent} is of {stored['name']}, and {label(method)} cannot take it over ({reason}): give what "
            f"its state is made of (capacity, policy, structure, hidden, latent) as it was, or start anew with an empty state folder, {ACCEPT}."
        ) from None


def kinds(method: Method) -> list[str]:
    """The classes of a method, or of all in a chain."""
    return [type(m).__name__ for m in parts(method)]


def field_values(method: Method) -> list[dict[str, Any]] | None:
    """The fields of a method, or of all in a chain, as JSON has them; None where they do not all fit into it."""
    values = [{f.name: getattr(m, f.name) for f in fields(m)} for m in parts(method)]
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return values


def last_method(folder: State) -> Method:
    """A fresh method of the kind and with the fields that the last update had."""
    last = folder.current()
    if last is None:
        raise ValueError(NO_METHOD)
    stored: dict[str, Any] = last.facts["method"]
    known = {kind.__name__: kind for kind in METHODS.values()}
    values = stored.get("values")
    if values is None or not set(stored["kinds"]) <= set(known):
        raise ValueError(
            f"The state in {folder.folder} is of {stored['name']}, which cannot be made from its name: give the method."
        )
    made = [
        known[kind](**{name: tuple(value) if isinstance(value, list) else value for name, value in own.items()})
        for kind, own in zip(stored["kinds"], values, strict=True)
    ]
    return made[0] if len(made) == 1 else Chain(*made)
