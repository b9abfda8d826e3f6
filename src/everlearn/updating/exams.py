"""Exams: held-back examples that tell what a model can do, then and now."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor, nn

from everlearn.method import Method
from everlearn.seeds import generator
from everlearn.stream import Task
from everlearn.trainer.evaluation import evaluate, outputs_of

GIVEN = -1  # the number of an exam that comes with an update and is not kept


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
    asked = {row for exam in exams for row in _rows(exam.x)}
    new = torch.tensor([row not in asked for row in _rows(pair[0])], dtype=torch.bool)
    return pair if new.all() else (pair[0][new], pair[1][new])


def _rows(x: Tensor) -> list[bytes]:
    return [hashlib.blake2b(row, digest_size=16).digest() for row in x.contiguous().numpy()]


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
