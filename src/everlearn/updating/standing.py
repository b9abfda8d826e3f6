"""What an update begins with: the deployed model, and what the state folder knows of it."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everlearn import atomic
from everlearn.method import Method, label, parts
from everlearn.trainer.training import device_of
from everlearn.updating import weights as files
from everlearn.updating.exams import Exam, unpacked
from everlearn.updating.labels import Classes, given
from everlearn.updating.learning import unpack
from everlearn.updating.outcome import Scores
from everlearn.updating.reading import Reading
from everlearn.updating.state import State, Version
from everlearn.updating.weights import CLASSES, UPDATE, Factory, Weights

MODEL, METHOD = "model.safetensors", "method.pt"
ACCEPT = "accept_weights=True (--accept-weights on the command line)"


@dataclass(eq=False)
class Standing:
    """The model as it stands, with all that is known of it.

    Args:
        weights: the deployed file, as it is or, where it is ``behind``, as it should be.
        model: with these weights.
        method: with what it has learned.
        classes: of the outputs.
        version: the one that counts; None in a first update.
        behind: whether the file is still that of before the last update, which was stopped when it had only to be replaced.
        exams: kept from earlier updates.
        history: what was measured after each update.
        prints: of the data that were learned, and in which update.
        reading: how data files were read.
        notes: what should be known.
    """

    weights: Weights
    model: nn.Module
    method: Method
    classes: Classes
    version: Version | None = None
    behind: bool = False
    exams: list[Exam] = field(default_factory=list)
    history: dict[int, Scores] = field(default_factory=dict)
    prints: dict[str, int] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)
    notes: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Of the version; 0 before the first update."""
        return 0 if self.version is None else self.version.number

    def mend(self, folder: State) -> None:
        """Finish what an update that was stopped had left to do, and take away what it had begun."""
        folder.clean(self.version)
        for part in self.weights.path.parent.glob(f".{glob.escape(self.weights.path.name)}.????????"):
            part.unlink(missing_ok=True)
        if self.behind:
            replace_file(self.weights)
            self.notes.append(
                f"{self.weights.path.name} was still that of before update {self.number}, which was stopped; it is put right."
            )


def replace_file(weights: Weights) -> None:
    """The deployed file anew, whole or not at all, with its permissions."""
    atomic.write(weights.path, weights.content, mode=weights.path.stat().st_mode & 0o777)


def standing(
    folder: State, make_model: Factory, path: Path, method: Method, classes: Sequence[str] | None, output: str | None,
    device: str | torch.device | None, accept: bool,
) -> Standing:  # fmt: skip
    """Read what is there, and refuse what does not belong together."""
    version = folder.current()
    if version is None:
        found = _undisturbed(files.read(path), folder, accept)
        names = given(classes or json.loads(found.facts.get(CLASSES, "[]")) or None)
        return Standing(found, files.build(make_model, found, output).to(device), method, names)
    found, behind, notes = _deployed(path, version, accept)
    model = files.build(make_model, found, output).to(device)
    facts = version.facts
    _restore(method, version, device_of(model))
    return Standing(
        found, model, method, _same(facts["classes"], classes), version, behind,
        exams=[unpacked(e["number"], e["title"], version.read(exam_file(e["number"]))) for e in facts["exams"]],
        history={int(v): {int(n): score for n, score in row.items()} for v, row in facts["history"].items()},
        prints=dict(facts["learned"]), reading=Reading.from_json(facts["reading"]), notes=notes,
    )  # fmt: skip


def exam_file(number: int) -> str:
    """The name of a kept exam."""
    return f"exam-{number:04d}.safetensors"


def _undisturbed(found: Weights, folder: State, accept: bool) -> Weights:
    """The file before a first update; one that an update wrote has its state elsewhere."""
    if UPDATE in found.facts and not accept:
        raise ValueError(
            f"{found.path.name} was written by update {found.facts[UPDATE]}, whose state is not in {folder.folder}: give the state folder "
            f"of that update, or go on without what its method had learned, {ACCEPT}."
        )
    return found


def _deployed(path: Path, version: Version, accept: bool) -> tuple[Weights, bool, list[str]]:
    """The weights to go on from, whether the file must be put right, and what to say of it."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is no file {path}; what update {version.number} wrote lies in {version.folder / MODEL}: copy it there."
        )
    there = files.digest(path.read_bytes())
    if there == version.facts["files"][MODEL]:
        return files.read(path), False, []
    if there == version.facts["replaced"]:
        return files.parsed(path.resolve(), version.read(MODEL)), True, []
    if accept:
        note = f"{path.name} is not what update {version.number} wrote; as you said, it is gone on from."
        return files.read(path), False, [note]
    raise ValueError(
        f"{path} is not what update {version.number} wrote, somebody has changed it: put {version.folder / MODEL} in its place, or go on "
        f"from it as it is, {ACCEPT}."
    )


def _same(stored: list[str], asked: Sequence[str] | None) -> Classes:
    """The names that outputs have; they stay."""
    if asked is not None and list(asked) != stored[: len(asked)]:
        raise ValueError(
            f"classes: the outputs have names since the first update, {', '.join(stored) or 'their numbers'}: leave it out."
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
    unpack(method, version.read(METHOD), device)


def kinds(method: Method) -> list[str]:
    """The classes of a method, or of all in a chain."""
    return [type(m).__name__ for m in parts(method)]
