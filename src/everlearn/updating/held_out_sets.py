"""Held-out sets: examples that are never trained on and measure the accuracy before and after an update."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor, nn

from everlearn.core.forward import forward
from everlearn.core.parameters import evaluating
from everlearn.core.task import Task
from everlearn.runtime.randomness import generator
from everlearn.trainer.evaluate import outputs_of
from everlearn.trainer.settings import device_of
from everlearn.trainer.validation import check_outputs

NOT_STORED = -1  # the number of a held-out set that is given with an update and not stored
DIGEST_BYTES = 16
EVALUATION_BATCH_SIZE = 256


@dataclass(eq=False)
class HeldOutSet:
    """Examples that no update trains on.

    Args:
        number: the update whose data they are from; 0 for the data of before the first update.
        title: a name for reports.
        x: inputs.
        y: labels, as indices of outputs.
    """

    number: int
    title: str
    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __str__(self) -> str:
        origins = {NOT_STORED: "old data", 0: "old skills"}
        origin = origins.get(self.number, f"update {self.number}")
        return f"{origin} ({self.title})"

    @property
    def task(self) -> Task:
        """A task with these examples as its test set."""
        return Task(test=(self.x, self.y), name=str(self))

    def select(self, rows: Tensor) -> HeldOutSet:
        """Return a held-out set with some of the rows, given by index or mask."""
        return HeldOutSet(self.number, self.title, self.x[rows], self.y[rows])

    def sample(self, max_examples: int) -> HeldOutSet:
        """Draw at most ``max_examples`` examples at random, in their order."""
        if len(self) <= max_examples:
            return self
        order = torch.randperm(len(self), generator=generator(self.number, "exam"))
        return self.select(order[:max_examples].sort().values)

    def serialize(self) -> bytes:
        """Return the content of a safetensors file with the examples."""
        return safetensors.torch.save({"x": self.x.contiguous(), "y": self.y.contiguous()})


def deserialize_held_out_set(number: int, title: str, content: bytes) -> HeldOutSet:
    """Read what ``HeldOutSet.serialize`` returned."""
    tensors = safetensors.torch.load(content)
    return HeldOutSet(number, title, tensors["x"], tensors["y"])


def exclude_held_out(pair: tuple[Tensor, Tensor], held_out_sets: Iterable[HeldOutSet]) -> tuple[Tensor, Tensor]:
    """Drop the examples whose inputs are in a held-out set: a new file may contain earlier data too."""
    held_out_digests = {digest for held_out in held_out_sets for digest in example_digests(held_out.x)}
    x, y = pair
    is_kept = torch.tensor([digest not in held_out_digests for digest in example_digests(x)], dtype=torch.bool)
    if is_kept.all():
        return pair
    return x[is_kept], y[is_kept]


def exclude_examples(held_out: HeldOutSet, digests: Collection[bytes]) -> HeldOutSet:
    """Drop the held-out examples whose inputs have one of these digests."""
    is_kept = torch.tensor([digest not in digests for digest in example_digests(held_out.x)], dtype=torch.bool)
    if is_kept.all():
        return held_out
    return held_out.select(is_kept)


def exclude_duplicates(held_out: HeldOutSet, earlier: Iterable[HeldOutSet]) -> HeldOutSet | None:
    """Drop the examples of earlier held-out sets; None if these are more than half of all.

    Each held-out set has the same weight in the mean accuracy, so a small remainder would weigh too much.
    """
    earlier_digests = {digest for held_out_set in earlier for digest in example_digests(held_out_set.x)}
    remaining = exclude_examples(held_out, earlier_digests)
    if 2 * len(remaining) < len(held_out):
        return None
    return remaining


def make_disjoint(held_out_sets: Iterable[HeldOutSet]) -> list[HeldOutSet]:
    """Drop from each held-out set the examples of those before it, so that no example is counted twice."""
    disjoint: list[HeldOutSet] = []
    for held_out in held_out_sets:
        remaining = exclude_duplicates(held_out, disjoint)
        if remaining is not None:
            disjoint.append(remaining)
    return disjoint


def example_digests(x: Tensor) -> list[bytes]:
    """Hash each input to 16 bytes, which identify it and do not reveal it."""
    return [hashlib.blake2b(row, digest_size=DIGEST_BYTES).digest() for row in x.contiguous().numpy()]


def serialize_digests(digests: Iterable[bytes]) -> bytes:
    """Return the content of a file with these digests.

    >>> digests = example_digests(torch.eye(3))
    >>> deserialize_digests(serialize_digests(digests)) == set(digests)
    True
    """
    return b"".join(sorted(digests))


def deserialize_digests(content: bytes) -> set[bytes]:
    """Read what ``serialize_digests`` returned."""
    return {content[i : i + DIGEST_BYTES] for i in range(0, len(content), DIGEST_BYTES)}


@torch.no_grad()
def evaluate_held_out(model: nn.Module, held_out_sets: Iterable[HeldOutSet]) -> dict[int, Tensor]:
    """Evaluate a model without its method, as it is deployed, on some held-out sets.

    Returns:
        For the number of each set, a mask of its correctly classified examples. Labels beyond the outputs are wrong.
    """
    return {held_out.number: _correct_mask(model, held_out) for held_out in held_out_sets}


def compute_accuracies(correct: Mapping[int, Tensor]) -> dict[int, float]:
    """Compute the accuracy on each held-out set from its mask of correct examples."""
    return {number: float(mask.double().mean()) for number, mask in correct.items()}


def skill_above_chance(held_out: HeldOutSet, correct: Tensor) -> float:
    """Normalize balanced accuracy so that 0 is chance and 1 is perfect.

        (b - 1 / C) / (1 - 1 / C)

    b is the mean of the accuracies of the C classes. A constant prediction gives b = 1 / C, however unequal the classes
    are.

    Args:
        held_out: the examples.
        correct: the mask of those that were classified correctly.

    >>> held_out = HeldOutSet(0, "old", torch.zeros(4, 1), torch.tensor([0, 0, 0, 1]))
    >>> skill_above_chance(held_out, torch.tensor([True, True, True, False]))  # always the larger class
    0.0
    """
    recalls = torch.stack([correct[held_out.y == label].double().mean() for label in held_out.y.unique()])
    if len(recalls) == 1:
        return float(recalls[0])
    chance = 1 / len(recalls)
    return (float(recalls.mean()) - chance) / (1 - chance)


def _correct_mask(model: nn.Module, held_out: HeldOutSet) -> Tensor:
    correct = torch.zeros(len(held_out), dtype=torch.bool)
    device = device_of(model)

    # Classes that the model has no output for yet stay wrong.
    has_output = held_out.y < outputs_of(model, held_out.x, str(held_out))
    evaluated_rows = has_output.nonzero().flatten()
    if not len(evaluated_rows):
        return correct

    with evaluating(model):
        for rows in evaluated_rows.split(EVALUATION_BATCH_SIZE):
            task = held_out.select(rows).task
            (batch,) = task.examples(len(rows), "test")
            batch = batch.to(device)
            outputs = forward(model, batch.x)
            check_outputs(task, batch, outputs)
            correct[rows] = batch.score(outputs).bool().cpu()
    return correct
