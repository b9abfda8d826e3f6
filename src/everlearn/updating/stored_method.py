"""Store a method in the state folder, and restore it in the next update."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import fields
from typing import Any

import torch

from everlearn.core.chain import Chain, label, methods_of
from everlearn.core.method import Method
from everlearn.methods import METHODS
from everlearn.updating.learning import BALANCED_BY, balance_memory
from everlearn.updating.state_folder import StateFolder, Version

METHOD = "method.pt"
NO_METHOD = (
    "A first update needs a method (--method), later ones use that of the first: er-ace, derpp or er if some "
    "examples may be stored, which new classes need; ranpac for new classes on a pretrained model, which stores "
    "none; mas, ewc or lwf for the same classes. 'everlearn advise' asks a few questions and suggests one."
)
ACCEPT = "accept_weights=True (--accept-weights on the command line)"


def serialize_method(method: Method) -> bytes:
    """Serialize a method's state as a file for ``torch.load(weights_only=True)``."""
    file = io.BytesIO()
    torch.save(copy.deepcopy(method.state_dict()), file)
    return file.getvalue()


def describe_method(method: Method) -> dict[str, Any]:
    """Describe a method in JSON, so that ``latest_method`` can create it again."""
    return {
        "name": label(method),
        "kinds": _class_names(method),
        "fields": repr(method),
        "values": _field_values(method),
    }


def restore_method(method: Method, version: Version, device: torch.device) -> None:
    """Load the state that a version has stored into a method of the same kind.

    Args:
        method: changed in place.
        version: the version to read.
        device: of the model.
    """
    stored: dict[str, Any] = version.facts["method"]
    if stored["kinds"] != _class_names(method):
        raise ValueError(
            f"The state in {version.folder.parent} is of {stored['name']}, got {label(method)}: give the same kind "
            f"of method, or start over with an empty state folder, {ACCEPT}."
        )

    # Some fields, such as the capacity of a memory, cannot change with a stored state.
    content = version.read(METHOD)
    try:
        _load_state(method, content, device)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".:")
        raise ValueError(
            f"The state in {version.folder.parent} is of {stored['name']}, and {label(method)} cannot load it "
            f"({reason}): leave the fields that determine its state (capacity, policy, structure, hidden, latent, "
            f"normalize, recursive) as they were, or start over with an empty state folder, {ACCEPT}."
        ) from None


def latest_method(folder: StateFolder) -> Method:
    """Create a method of the kind and with the fields of the latest update, without its state."""
    latest = folder.current()
    if latest is None:
        raise ValueError(NO_METHOD)

    stored: dict[str, Any] = latest.facts["method"]
    classes = {method_class.__name__: method_class for method_class in METHODS.values()}
    values = stored.get("values")
    if values is None or not set(stored["kinds"]) <= set(classes):
        raise ValueError(
            f"The state in {folder.folder} is of {stored['name']}, which cannot be created from its name: give the "
            "method."
        )

    methods = []
    for name, field_values in zip(stored["kinds"], values, strict=True):
        # JSON has lists for tuples.
        arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in field_values.items()}
        methods.append(classes[name](**arguments))
    if len(methods) == 1:
        return methods[0]
    return Chain(*methods)


def _load_state(method: Method, content: bytes, device: torch.device) -> None:
    # Without a GPU, tensors that were saved on one are loaded to the CPU.
    map_location = "cpu" if device.type == "cpu" else None
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location, weights_only=True)

    states = [state]
    if isinstance(method, Chain):
        states = [state[str(i)] for i in range(len(method.methods))]

    # A memory that the first update has balanced must be balanced before its state is loaded.
    for m, method_state in zip(methods_of(method), states, strict=True):
        if method_state.get("memory", {}).get("group_by") == list(BALANCED_BY):
            balance_memory(m)
    method.load_state_dict(state)


def _class_names(method: Method) -> list[str]:
    """List the class names of a method, or of all methods in a chain."""
    return [type(m).__name__ for m in methods_of(method)]


def _field_values(method: Method) -> list[dict[str, Any]] | None:
    """List the fields of a method, or of all methods in a chain; None if JSON cannot represent them."""
    values = [{f.name: getattr(m, f.name) for f in fields(m)} for m in methods_of(method)]
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return values
