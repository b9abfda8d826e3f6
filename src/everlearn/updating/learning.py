"""Learning new data with what is known of the old: the part of an update that changes a model."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everlearn.forward import ask
from everlearn.heads import grow_output
from everlearn.memory import Memory
from everlearn.method import Chain, Method, label, parts
from everlearn.params import evaluating
from everlearn.replay import Replay
from everlearn.seeds import derive, seeded
from everlearn.stream import Task
from everlearn.trainer.lesson import Trained, train
from everlearn.trainer.training import OptimizerFactory, Training, device_of
from everlearn.traits import traits_of

Pair = tuple[Tensor, Tensor]
BALANCED_BY = ("t", "y")  # the update and the class of a row


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
    if own := [type(m).__name__ for m in parts(method) if not m.deployable]:
        raise ValueError(
            f"{' and '.join(own)} answers with more than the model's weights (a sub-network per task, columns, gates), so the deployed "
            "file alone would be another model: choose one whose knowledge is in the weights, such as EWC, MAS, LwF, ER or DERpp."
        )


@torch.no_grad()
def check_deployed(model: nn.Module, method: Method, deployed: nn.Module, x: Tensor) -> None:
    """Refuse a method that says that it is deployable and answers otherwise than the plain weights."""
    inputs = x[:256].to(device_of(model))
    with evaluating(deployed):
        plain = deployed(inputs)
    outputs = method.predict(model, inputs)
    if outputs.shape == plain.shape and torch.allclose(outputs, plain, rtol=1e-3, atol=1e-4):
        return
    raise ValueError(
        f"{label(method)} and the model answer otherwise than a model that the factory makes with the same weights, so the deployed "
        "file alone would be another model. If the method uses hooks or a predict of its own, it is not deployable: let its class say "
        "deployable = False, and choose another. If the factory makes a different model at every call, let it make the same."
    )


def balance_memory(method: Method) -> None:
    """Let replay methods share their memory equally among updates and their classes, instead of among all rows seen.

    A reservoir keeps old and new rows in proportion to their numbers, and an update brings many rows of few classes. A policy
    other than the default was chosen by somebody and stays.
    """
    for m in parts(method):
        if isinstance(m, Replay) and m.policy == "reservoir":
            m.memory = Memory(m.memory.capacity, "balanced", by=BALANCED_BY, seed=m.memory.seed)


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
            method.observe(here, ask(model, here.x))
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
    states = [state[str(i)] for i in range(len(method.methods))] if isinstance(method, Chain) else [state]
    for m, own in zip(parts(method), states, strict=True):
        if own.get("memory", {}).get("by") == list(BALANCED_BY):
            balance_memory(m)  # as the first update had it
    method.load_state_dict(state)
