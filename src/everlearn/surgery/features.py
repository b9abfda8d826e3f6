"""Read the inputs of a model's output layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def compute_features(net: nn.Module, output: str, *args: Any, **kwargs: Any) -> Tensor:
    """Return the input of the layer named ``output`` in a forward pass ``net(*args, **kwargs)``.

    >>> import torch
    >>> compute_features(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "1", torch.ones(1, 2, 2))
    tensor([[1., 1., 1., 1.]])
    """
    layer_inputs: list[Tensor] = []

    def record_input(layer: nn.Module, args: Any, kwargs: Any) -> None:
        layer_inputs.append(args[0] if args else kwargs["input"])

    handle = net.get_submodule(output).register_forward_pre_hook(record_input, with_kwargs=True)
    try:
        net(*args, **kwargs)
    finally:
        handle.remove()

    if len(layer_inputs) != 1:
        raise ValueError(
            f"The output layer {output!r} is called {len(layer_inputs)} times in a forward pass. It must be called "
            "once: its input is the feature vector. Name the right layer with output=…."
        )
    return layer_inputs[0]
