"""Exams: held-back examples that tell what a model can do, then and now."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor, nn

from everlearn.method import Method
from everlearn.seeds import generator
from everlearn.stream import Task
from everlearn.trainer.evaluation import evaluate, outputs_of

GIVEN = -1  # the number of an exam that comes with an update and is not kept
MARK = 16  # bytes that tell one example from another


@dataclass(eq=False)
class Exam:
    """Some examples that no update learns from.

    Args:
        number: the update whose data they are of; 0 for the skills before the first.
        title: for people.
        x: inputs.
        y: labels, as numbers of outputs.
    """

    number: int
    title: str
    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __str__(self) -> str:
        what = {GIVEN: "brought along", 0: "old skills"}.get(self.number, f"update {self.number}")
        return f"{what} ({self.title})"

    @property
    def task(self) -> Task:
        """As what can be tested."""
        return Task(test=(self.x, self.y), name=str(self))

    def at_most(self, most: int) -> Exam:
        """So many of the examples, drawn at random, or all."""
        if len(self) <= most:
            return self
        some = torch.randperm(len(self), generator=generator(self.number, "exam"))[:most].sort().values
        return Exam(self.number, self.title, self.x[some], self.y[some])

    def packed(self) -> bytes:
        """As a safetensors file."""
        return safetensors.torch.save({"x": self.x.contiguous(), "y": self.y.contiguous()})


def unpacked(number: int, title: str, content: bytes) -> Exam:
    """From such a file."""
    stored = safetensors.torch.load(content)
    return Exam(number, title, stored["x"], stored["y"])


def unexamined(pair: tuple[Tensor, Tensor], exams: Iterable[Exam]) -> tuple[Tensor, Tensor]:
    """The examples whose inputs are in no exam: a file of this month may hold those of last month too."""
    asked = {mark for exam in exams for mark in marks(exam.x)}
    new = torch.tensor([mark not in asked for mark in marks(pair[0])], dtype=torch.bool)
    return pair if new.all() else (pair[0][new], pair[1][new])


def unlearned(exam: Exam, learned: Collection[bytes]) -> Exam:
    """The exam without the examples whose inputs were learned, told by their marks."""
    new = torch.tensor([mark not in learned for mark in marks(exam.x)], dtype=torch.bool)
    return exam if new.all() else Exam(exam.number, exam.title, exam.x[new], exam.y[new])


def marks(x: Tensor) -> list[bytes]:
    """Sixteen bytes for each example, which tell it from all others and not what it is."""
    return [hashlib.blake2b(row, digest_size=MARK).digest() for row in x.contiguous().numpy()]


def packed_marks(some: Iterable[bytes]) -> bytes:
    """As a file.

    >>> unpacked_marks(packed_marks(marks(torch.eye(3)))) == set(marks(torch.eye(3)))
    True
    """
    return b"".join(sorted(some))


def unpacked_marks(content: bytes) -> set[bytes]:
    """From such a file."""
    return {content[i : i + MARK] for i in range(0, len(content), MARK)}


def measure(model: nn.Module, exams: Iterable[Exam]) -> dict[int, float]:
    """The share of right answers in each exam, of the plain model as whoever deploys it asks it; what it has no output for is wrong."""
    return {exam.number: _score(model, exam) for exam in exams}


def _score(model: nn.Module, exam: Exam) -> float:
    known = exam.y < outputs_of(model, exam.x, str(exam))
    if not known.any():
        return 0.0
    [right] = evaluate(
        model, Method(), [Exam(exam.number, exam.title, exam.x[known], exam.y[known]).task], batch_size=256
    )
    return right * float(known.float().mean())
