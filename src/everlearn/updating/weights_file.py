"""The deployed weights: a safetensors file, never a pickled model."""

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

from everlearn.methods.heads.base import UNSEEN_LOGIT
from everlearn.surgery.feature_head import restore_feature_head
from everlearn.surgery.heads import grow_output, output_layer

Factory = Callable[[], nn.Module]

# Keys of the metadata that an update writes into the file.
UPDATE = "everlearn.update"
CLASSES = "everlearn.classes"


@dataclass(frozen=True, eq=False)
class Weights:
    """The content of a safetensors file.

    Args:
        path: the file.
        content: its bytes.
        tensors: the tensors by name.
        metadata: the metadata of its header.
    """

    path: Path
    content: bytes
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes."""
        return compute_digest(self.content)

    @property
    def class_names(self) -> list[str]:
        """Names of the outputs in their order; empty if the file has none."""
        names: list[str] = json.loads(self.metadata.get(CLASSES, "[]"))
        return names


def compute_digest(content: bytes) -> str:
    """Return the SHA-256 of some bytes in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Read a weights file. A symbolic link is resolved, so that writing the file later keeps the link."""
    resolved_path = Path(path).resolve()
    if not resolved_path.is_file():
        raise FileNotFoundError(
            f"There is no file {path}: give the weights as safetensors.torch.save_file writes them."
        )

    return parse_weights(resolved_path, resolved_path.read_bytes())


def parse_weights(path: Path, content: bytes) -> Weights:
    """Parse the bytes of a safetensors file.

    Args:
        path: where the file is or will be.
        content: its bytes.
    """
    try:
        tensors = safetensors.torch.load(content)

        # The first 8 bytes are the length of the JSON header that follows them.
        header_length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + header_length])
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is not a safetensors file, or is damaged ({error}): write it with "
            "safetensors.torch.save_file(model.state_dict(), path). Pickled models are not read: they could run code."
        ) from None

    return Weights(path, content, tensors, header.get("__metadata__", {}))


def serialize_weights(model: nn.Module, previous: Weights, metadata: Mapping[str, str]) -> bytes:
    """Serialize a model's weights with the tensor names, dtypes and metadata of the previous file.

    Args:
        model: the model to save.
        previous: the file that is to be replaced.
        metadata: entries that are added to those of the previous file.
    """
    parameters = model.state_dict()

    # A method may have replaced the output layer, whose old names are then gone.
    old_names = [name for name in previous.tensors if name in parameters]

    # A tensor that has several names is stored once, under the name that the previous file uses.
    stored_pointers = {parameters[name].data_ptr() for name in old_names}
    new_names = [
        name
        for name, tensor in parameters.items()
        if name not in previous.tensors and tensor.data_ptr() not in stored_pointers
    ]

    tensors = {}
    for name in [*old_names, *new_names]:
        dtype = _stored_dtype(previous, name, parameters[name])
        tensors[name] = parameters[name].detach().to("cpu", dtype).clone().contiguous()
    return safetensors.torch.save(tensors, {"format": "pt", **previous.metadata, **metadata})


@torch.no_grad()
def round_to_file_dtypes(model: nn.Module, previous: Weights) -> list[str]:
    """Round a model in place to the dtypes of the previous file, so that the evaluated model is the deployed one.

    Returns:
        The dtypes that changed a value.
    """
    lossy_dtypes = set()
    for name, tensor in model.state_dict().items():
        dtype = _stored_dtype(previous, name, tensor)
        if dtype == tensor.dtype:
            continue

        rounded = tensor.to(dtype).to(tensor.dtype)
        if dtype.is_floating_point:
            # Classes without examples: below all others in any dtype.
            rounded[tensor == UNSEEN_LOGIT] = max(UNSEEN_LOGIT, torch.finfo(dtype).min)
        if torch.equal(rounded, tensor):
            continue

        # float16 overflows at 65,504, where float32 does not.
        if tensor.isfinite().all() and not rounded.isfinite().all():
            raise ValueError(
                f"{name} has become too large for {dtype}, the dtype in {previous.path.name}: save that file in "
                "float32, or train with a smaller learning rate."
            )
        tensor.copy_(rounded)
        lossy_dtypes.add(str(dtype).removeprefix("torch."))

    return sorted(lossy_dtypes)


def build_model(make_model: Factory, weights: Weights, output: str | None = None) -> nn.Module:
    """Build the model with these weights; its output layer grows if they have more outputs.

    Args:
        make_model: a function without arguments that returns the model.
        weights: the weights to load.
        output: name of the output layer; by default the last ``nn.Linear``.
    """
    if not callable(make_model) or isinstance(make_model, nn.Module):
        raise TypeError(
            f"The model must be given as a function that makes it, lambda: Net(…); got a {type(make_model).__name__}."
        )
    model = make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"The factory must return a torch.nn.Module, it returned a {type(model).__name__}.")

    # Earlier updates may have added a feature head or outputs that the factory does not know of.
    restore_feature_head(model, weights.tensors)
    _grow_to_stored_outputs(model, weights, output)
    differences = _list_differences(model.state_dict(), weights.tensors)
    if differences:
        raise ValueError(
            f"{weights.path.name} does not fit the model that the factory makes: {'; '.join(differences)}. "
            "Give the factory of these weights."
        )

    # Not strict: of a tensor with two names the file has only one.
    model.load_state_dict(weights.tensors, strict=False)
    return model


def load(make_model: Factory, weights: str | os.PathLike[str], *, output: str | None = None) -> nn.Module:
    """Load the deployed model in evaluation mode, with as many outputs as it has grown to.

    Args:
        make_model: a function without arguments that returns the model.
        weights: the file that ``update`` writes.
        output: name of the output layer; by default the last ``nn.Linear``.
    """
    return build_model(make_model, read_weights(weights), output).eval()


def class_names(weights: str | os.PathLike[str]) -> list[str]:
    """Read the names of a deployed model's outputs, in their order.

    Returns:
        The names; empty if labels are numbers, or if the model was never updated.
    """
    return read_weights(weights).class_names


def count_outputs(weights: Weights, model: nn.Module, output: str | None) -> int:
    """Count the outputs of the stored output layer; 0 if it cannot be identified, so that it cannot grow either."""
    if output is None and not any(isinstance(module, nn.Linear) for module in model.modules()):
        return 0

    name, _ = output_layer(model, output)
    key = f"{name}.weight" if name else "weight"

    # The model or the file may have a feature head in place of the layer.
    names = [key, f"{name}.output.weight", f"{name.removesuffix('.output')}.weight"]
    stored_weight = next((weights.tensors[n] for n in names if n in weights.tensors), None)
    if stored_weight is None or stored_weight.dim() != 2:
        return 0
    return len(stored_weight)


def _stored_dtype(previous: Weights, name: str, tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor in the previous file; one that is not in the file keeps its dtype."""
    return previous.tensors.get(name, tensor).dtype


def _grow_to_stored_outputs(model: nn.Module, weights: Weights, output: str | None) -> None:
    outputs = count_outputs(weights, model, output)
    if outputs and outputs > output_layer(model, output)[1].out_features:
        grow_output(model, outputs, output)


def _list_differences(parameters: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[str]:
    """Describe missing and unexpected tensors, and those with another shape or kind of number."""
    # Of a tensor with two names one is enough in the file.
    stored_pointers = {parameters[name].data_ptr() for name in stored if name in parameters}
    missing = [
        name for name, tensor in parameters.items() if name not in stored and tensor.data_ptr() not in stored_pointers
    ]
    unexpected = sorted(name for name in stored if name not in parameters)

    other_shape = []
    other_kind = []
    for name, tensor in parameters.items():
        if name not in stored:
            continue
        if stored[name].shape != tensor.shape:
            other_shape.append(name)
        if stored[name].is_floating_point() != tensor.is_floating_point():
            other_kind.append(name)

    descriptions = []
    for prefix, names in (
        ("it lacks", missing),
        ("the model has no", unexpected),
        ("shapes differ in", other_shape),
        ("one has integers and the other floating-point numbers in", other_kind),
    ):
        if names:
            ellipsis = ", …" * (len(names) > 3)
            descriptions.append(f"{prefix} {', '.join(names[:3])}{ellipsis}")
    return descriptions
