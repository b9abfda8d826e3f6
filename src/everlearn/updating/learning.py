"""Learning new data with what is known of the old: the part of an update that changes a model."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.heads import grow_output
from everlearn.method import Method, parts
from everlearn.params import evaluating
from everlearn.seeds import derive, seeded
from everlearn.stream import Task
from everlearn.trainer.lesson import Trained, train
from everlearn.trainer.training import OptimizerFactory, Training, device_of
from everlearn.traits import traits_of

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class How:
    """How a model is trained.

    Args:
        training: epochs, batch size, seed and the like.
        optimizer: a function of the parameters that makes one.
        output: name of the output layer, which grows with new classes; by default the last ``nn.Linear``.
    """

    training: Training
    optimizer: OptimizerFactory
    output: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.training, Training):
            raise TypeError(
                f"training must be a Training, as in everlearn.trainer.Training(epochs=5, batch_size=32); got {self.training!r}."
            )


def check_method(method: Method) -> None:
    """Refuse what cannot be deployed as weights alone."""
    if not isinstance(method, Method):
        raise TypeError(f"method must be a method such as EWC() or ER(), got {method!r}.")
    if own := [type(m).__name__ for m in parts(method) if m.changes("predict")]:
        raise ValueError(
            f"{' and '.join(own)} answers with more than the model's weights (a sub-network per task, columns, gates), so the deployed "
            "file alone would be another model: choose one whose knowledge is in the weights, such as EWC, MAS, LwF, ER or DERpp."
        )


def check_device(device: str | torch.device | None) -> None:
    """Refuse one that is not there."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"device {device!r} cannot be used here ({reason}): give one that torch finds on this machine, such as 'cpu'."
        ) from None


def remember(model: nn.Module, method: Method, pair: Pair, how: How) -> None:
    """Let a method know skills that the model had before it: what it would have kept, had it been there when they were learned."""
    for m in parts(method):
        traits = traits_of(type(m))
        if traits is not None and traits.needs_labels and not traits.keeps_examples:
            raise ValueError(
                f"{type(m).__name__} gathers what matters while it learns, and cannot be told afterwards from old data: choose another "
                "method, such as EWC, MAS or ER, or leave the old data out."
            )
    task = Task(pair, id=0, name="the old data")
    method.begin_task(model, task)
    device = device_of(model)
    training = how.training
    with torch.no_grad(), evaluating(model):
        # As often as the new data will be shown, or a memory would hold these for fewer than they are.
        for batch in task.batches(training.batch_size, training.epochs, training.iterations, training.seed):
            here = batch.to(device)
            method.observe(here, model(here.x))
    method.end_task(model, task)


def learn(model: nn.Module, method: Method, pair: Pair, number: int, outputs: int | None, how: How) -> Trained:
    """Learn the data of an update in place; random numbers are its own, and the caller's stay as they were.

    Args:
        model: trained in place.
        method: what protects the old skills; it learns too.
        pair: inputs and labels.
        number: of the update, which is the number of its task.
        outputs: how many are needed, where the output layer must grow.
        how: to train.
    """
    with seeded(derive(how.training.seed, "update", number), device_of(model)):
        if outputs is not None:
            grow_output(model, outputs, how.output)
        t = how.training
        return train(
            model, method, Task(pair, id=number, name=f"update {number}"), optimizer=how.optimizer, epochs=t.epochs,
            iterations=t.iterations, batch_size=t.batch_size, seed=t.seed, scheduler=t.scheduler, clip=t.clip,
            accumulate=t.accumulate, precision=t.precision, progress=t.progress,
        )  # fmt: skip


def packed(method: Method) -> bytes:
    """A method's state as a file that ``torch.load(weights_only=True)`` reads."""
    torch.save(copy.deepcopy(method.state_dict()), file := io.BytesIO())
    return file.getvalue()


def unpack(method: Method, content: bytes, device: torch.device) -> None:
    """Give a method the state of such a file, for a model on this device."""
    where = "cpu" if device.type == "cpu" else None  # what was saved on a GPU is needed there, or here
    state: dict[str, Any] = torch.load(io.BytesIO(content), where, weights_only=True)
    method.load_state_dict(state)
