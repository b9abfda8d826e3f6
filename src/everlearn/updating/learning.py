"""Train the deployed model on new data with a continual-learning method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everlearn.core.chain import label, methods_of
from everlearn.core.forward import forward
from everlearn.core.method import Method
from everlearn.core.parameters import evaluating
from everlearn.core.task import Task
from everlearn.core.traits import traits_of
from everlearn.memory import Memory
from everlearn.methods.heads.base import FrozenHead
from everlearn.methods.replay.base import Replay
from everlearn.runtime.randomness import derive, seeded
from everlearn.surgery.heads import grow_output
from everlearn.trainer.settings import OptimizerFactory, Training, device_of
from everlearn.trainer.train import TrainResult, train

Pair = tuple[Tensor, Tensor]
BALANCED_BY = ("t", "y")  # the update and the class of a row
MAX_COMPARED_EXAMPLES = 256


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training.

    Args:
        training: epochs, batch size, seed and the like.
        optimizer: a function that takes the parameters and returns an optimizer.
        output: name of the output layer, which grows with new classes; by default the last ``nn.Linear``.
    """

    training: Training
    optimizer: OptimizerFactory
    output: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.training, Training):
            raise TypeError(
                "training must be a Training, as in everlearn.trainer.Training(epochs=5, batch_size=32); "
                f"got {self.training!r}."
            )


def check_method(method: Method) -> None:
    """Raise unless the weights alone are the model that the method predicts with."""
    if not isinstance(method, Method):
        raise TypeError(f"method must be a method such as EWC() or ER(), got {method!r}.")

    not_deployable = [type(m).__name__ for m in methods_of(method) if not m.deployable]
    if not_deployable:
        raise ValueError(
            f"{' and '.join(not_deployable)} predicts with more than the model's weights (a sub-network per task, "
            "columns, gates), so the deployed file alone would be a different model: choose a method whose "
            "knowledge is in the weights, such as EWC, MAS, LwF, ER, DERpp or RanPAC."
        )

    for m in methods_of(method):
        if isinstance(m, FrozenHead) and (m.online or m.adapt_first):
            raise ValueError(
                f"{type(m).__name__} has {'online' if m.online else 'adapt_first'}=True, but an update gives it all "
                "rows at once, and never trains the deployed model: leave it out."
            )


@torch.no_grad()
def check_deployed(model: nn.Module, method: Method, deployed: nn.Module, x: Tensor) -> None:
    """Raise if the deployed model predicts differently from the trained model with its method.

    Args:
        model: the trained model.
        method: the method it was trained with, whose class says that it is deployable.
        deployed: a new model of the factory with the same weights.
        x: inputs to compare the outputs on.
    """
    inputs = x[:MAX_COMPARED_EXAMPLES].to(device_of(model))
    with evaluating(deployed):
        deployed_outputs = deployed(inputs)
    outputs = method.predict(model, inputs)

    has_same_shape = outputs.shape == deployed_outputs.shape
    if has_same_shape and torch.allclose(outputs, deployed_outputs, rtol=1e-3, atol=1e-4):
        return
    raise ValueError(
        f"{label(method)} with the trained model predicts differently from a model that the factory makes with the "
        "same weights, so the deployed file alone would be a different model. If the method uses hooks or overrides "
        "predict, set deployable = False in its class, and choose another method. If the factory makes a different "
        "model at every call, let it always make the same."
    )


def check_device(device: str | torch.device | None) -> None:
    """Raise if a device is not available."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"device {device!r} cannot be used ({reason}): give one that torch finds on this machine, such as 'cpu'."
        ) from None


def balance_memory(method: Method) -> None:
    """Balance the memories of replay methods over updates and their classes.

    A reservoir keeps old and new rows in proportion to their numbers, and an update brings many rows of few classes.
    A policy other than the default is kept.
    """
    for m in methods_of(method):
        if isinstance(m, Replay) and m.policy == "reservoir":
            m.memory = Memory(m.memory.capacity, "balanced", group_by=BALANCED_BY, seed=m.memory.seed)


def use_output(method: Method, output: str | None) -> None:
    """Tell heads on frozen features the name of the output layer; None changes nothing."""
    for m in methods_of(method):
        if isinstance(m, FrozenHead):
            m.use_output(output)


def consolidate_old_data(model: nn.Module, method: Method, pair: Pair, options: TrainingOptions) -> None:
    """Give a method the data that the model was trained on before, as if they had been the method's first task.

    The model is not trained: importances are estimated, memories are filled, and a head on frozen features takes the
    place of the output layer.

    Args:
        model: the deployed model.
        method: changed in place.
        pair: inputs and labels of the old data.
        options: batch size, epochs and seed.
    """
    # Such methods integrate over the training steps, as SI does, or train a generator.
    for m in methods_of(method):
        traits = traits_of(type(m))
        if m.trains and traits is not None and traits.needs_labels and not traits.keeps_examples:
            raise ValueError(
                f"{type(m).__name__} collects what it needs during training, and cannot use old data afterwards: "
                "choose another method, such as EWC, MAS or ER, or leave the old data out."
            )

    task = Task(pair, id=0, name="the old data")
    method.begin_task(model, task)
    device = device_of(model)
    training = options.training
    if method.changes("observe"):
        with torch.no_grad(), evaluating(model):
            # As many epochs as new data get: a reservoir counts presentations, and would else keep too few old rows.
            for batch in task.batches(training.batch_size, training.epochs, training.iterations, training.seed):
                device_batch = batch.to(device)
                method.observe(device_batch, forward(model, device_batch.x))
    method.end_task(model, task)


def train_update(
    model: nn.Module, method: Method, pair: Pair, number: int, outputs: int | None, options: TrainingOptions
) -> TrainResult:
    """Train a model in place on the data of an update; the caller's random state does not change.

    Args:
        model: trained in place.
        method: changed in place.
        pair: inputs and labels.
        number: of the update, which is the id of its task.
        outputs: the number of outputs to grow to; None if there are enough.
        options: how to train.
    """
    training = options.training
    with seeded(derive(training.seed, "update", number), device_of(model)):
        if outputs is not None:
            grow_output(model, outputs, options.output)
        return train(
            model,
            method,
            Task(pair, id=number, name=f"update {number}"),
            optimizer=options.optimizer,
            epochs=training.epochs,
            iterations=training.iterations,
            batch_size=training.batch_size,
            seed=training.seed,
            scheduler=training.scheduler,
            clip=training.clip,
            accumulate=training.accumulate,
            precision=training.precision,
            progress=training.progress,
        )
