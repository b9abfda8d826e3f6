"""The deployed file: weights by name, never a pickled model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from everlearn.heads import grow_output, output_layer

Factory = Callable[[], nn.Module]
UPDATE, CLASSES = "everlearn.update", "everlearn.classes"  # what the file says of itself


@dataclass(frozen=True, eq=False)
class Weights:
    """A safetensors file as it lies there.

    Args:
        path: the file.
        content: its bytes.
        tensors: by name.
        facts: what it says of itself.
    """

    path: Path
    content: bytes
    tensors: dict[str, Tensor]
    facts: dict[str, str]

    @property
    def digest(self) -> str:
        """Of the bytes."""
        return digest(self.content)


def digest(content: bytes) -> str:
    """A word that tells these bytes from all others."""
    return hashlib.sha256(content).hexdigest()


def read(path: str | os.PathLike[str]) -> Weights:
    """Read a file of weights; a link is followed, so that it stays a link."""
    real = Path(path).resolve()
    if not real.is_file():
        raise FileNotFoundError(
            f"There is no file {path}: give the weights as safetensors.torch.save_file writes them."
        )
    return parsed(real, real.read_bytes())


def parsed(path: Path, content: bytes) -> Weights:
    """The bytes of such a file, which lies there or shall."""
    try:
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is not a safetensors file, or is damaged ({error}): write it with "
            "safetensors.torch.save_file(model.state_dict(), path); a pickled model, which could run code, is not read."
        ) from None
    return Weights(path, content, tensors, header.get("__metadata__", {}))


def packed(model: nn.Module, before: Weights, facts: Mapping[str, str]) -> bytes:
    """The model's weights as the bytes of such a file, with the names, dtypes and metadata of the one before."""
    own = model.state_dict()
    there = {own[name].data_ptr() for name in before.tensors}
    names = [*before.tensors, *(n for n, v in own.items() if n not in before.tensors and v.data_ptr() not in there)]
    tensors = {n: own[n].detach().to("cpu", _dtype(before, n, own[n])).clone().contiguous() for n in names}
    return safetensors.torch.save(tensors, {"format": "pt", **before.facts, **facts})


@torch.no_grad()
def round_as(model: nn.Module, before: Weights) -> list[str]:
    """Round a model in place to what a file with the dtypes of the one before can hold, so that what is measured is what is deployed.

    Returns:
        The dtypes that lost something by it.
    """
    lossy = set()
    for name, value in model.state_dict().items():
        dtype = _dtype(before, name, value)
        held = value.to(dtype).to(value.dtype)
        if dtype == value.dtype or torch.equal(held, value):
            continue
        if value.isfinite().all() and not held.isfinite().all():
            raise ValueError(
                f"{name} has become too large for {dtype}, which {before.path.name} holds: save that file in float32, or train "
                "with a smaller learning rate."
            )
        value.copy_(held)
        lossy.add(str(dtype).removeprefix("torch."))
    return sorted(lossy)


def build(make_model: Factory, weights: Weights, output: str | None = None) -> nn.Module:
    """The model with these weights; its output layer grows where they have more outputs."""
    if not callable(make_model) or isinstance(make_model, nn.Module):
        raise TypeError(
            f"A model comes from a function that makes it, lambda: Net(…); got a {type(make_model).__name__}."
        )
    model = make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"The factory must make a torch.nn.Module, it made a {type(model).__name__}.")
    _widen(model, weights, output)
    own = model.state_dict()
    if wrong := _differences(own, weights.tensors):
        raise ValueError(
            f"{weights.path.name} does not fit the model that the factory makes: {'; '.join(wrong)}. Give the factory of these weights."
        )
    model.load_state_dict(weights.tensors, strict=False)
    return model


def load(make_model: Factory, weights: str | os.PathLike[str], *, output: str | None = None) -> nn.Module:
    """The deployed model, in evaluation mode, whatever number of outputs it has grown to.

    Args:
        make_model: a function without arguments that makes the model.
        weights: the file that ``update`` keeps.
        output: name of the output layer; by default the last ``nn.Linear``.
    """
    return build(make_model, read(weights), output).eval()


def class_names(weights: str | os.PathLike[str]) -> list[str]:
    """What the outputs of a deployed model are called, in their order; empty where they are numbers, or nobody updated it yet."""
    names: list[str] = json.loads(read(weights).facts.get(CLASSES, "[]"))
    return names


def _dtype(before: Weights, name: str, value: Tensor) -> torch.dtype:
    """Of a tensor in the file; one that the file does not name keeps its own."""
    return before.tensors[name].dtype if name in before.tensors else value.dtype


def outputs_in(weights: Weights, model: nn.Module, output: str | None) -> int:
    """How many outputs such a model has with these weights; 0 where that cannot be told, and cannot change either."""
    if output is None and not any(isinstance(m, nn.Linear) for m in model.modules()):
        return 0
    name, _ = output_layer(model, output)
    stored = weights.tensors.get(f"{name}.weight" if name else "weight")
    return len(stored) if stored is not None and stored.dim() == 2 else 0


def _widen(model: nn.Module, weights: Weights, output: str | None) -> None:
    outputs = outputs_in(weights, model, output)
    if outputs and outputs > output_layer(model, output)[1].out_features:
        grow_output(model, outputs, output)


def _differences(own: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[str]:
    """Names that one has and the other has not, and shapes; a tensor under two names need be stored under one."""
    there = {own[name].data_ptr() for name in stored if name in own}
    found = [
        ("it lacks {}", [n for n, v in own.items() if n not in stored and v.data_ptr() not in there]),
        ("the model has no {}", sorted(n for n in stored if n not in own)),
        ("shapes differ in {}", [n for n, v in own.items() if n in stored and stored[n].shape != v.shape]),
        (
            "whole numbers stand for fractions, or the reverse, in {}",
            [n for n, v in own.items() if n in stored and stored[n].is_floating_point() != v.is_floating_point()],
        ),
    ]
    return [text.format(", ".join(names[:3]) + ", …" * (len(names) > 3)) for text, names in found if names]
