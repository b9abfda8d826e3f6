"""Exams: held-back examples that tell what a model can do, then and now."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor, nn

from everlearn.checks import check_outputs
from everlearn.forward import ask
from everlearn.params import evaluating
from everlearn.seeds import generator
from everlearn.stream import Task
from everlearn.trainer.evaluation import outputs_of
from everlearn.trainer.training import device_of

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


@torch.no_grad()
def correct_answers(model: nn.Module, exams: Iterable[Exam]) -> dict[int, Tensor]:
    """Which examples of each exam the plain model answers correctly, as whoever deploys it would ask it.

    What it has no output for is wrong.
    """
    return {exam.number: _correct(model, exam) for exam in exams}


def scores(correct: Mapping[int, Tensor]) -> dict[int, float]:
    """The share of correct answers in each exam."""
    return {number: float(answers.double().mean()) for number, answers in correct.items()}


def skill_above_chance(exam: Exam, correct: Tensor) -> float:
    """How far a model is above guessing: 0 is a guess that does not look at its inputs, 1 is perfect.

    The mean of the accuracies of all classes is taken: however unequal the classes are, guessing gives 1 / classes.

    >>> exam = Exam(0, "old", torch.zeros(4, 1), torch.tensor([0, 0, 0, 1]))
    >>> skill_above_chance(exam, torch.tensor([True, True, True, False]))  # always the larger class
    0.0
    """
    recalls = torch.stack([correct[exam.y == label].double().mean() for label in exam.y.unique()])
    if len(recalls) == 1:
        return float(recalls[0])
    chance = 1 / len(recalls)
    return (float(recalls.mean()) - chance) / (1 - chance)


def _correct(model: nn.Module, exam: Exam) -> Tensor:
    correct = torch.zeros(len(exam), dtype=torch.bool)
    known = (exam.y < outputs_of(model, exam.x, str(exam))).nonzero().flatten()
    device = device_of(model)
    with evaluating(model):
        for rows in known.split(256) if len(known) else ():
            task = Exam(exam.number, exam.title, exam.x[rows], exam.y[rows]).task
            (batch,) = task.examples(len(rows), "test")
            current = batch.to(device)
            outputs = ask(model, current.x)
            check_outputs(task, current, outputs)
            correct[rows] = current.score(outputs).bool().cpu()
    return correct
