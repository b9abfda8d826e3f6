"""Read the inputs of a model's output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everlearn.core.forward import forward
from everlearn.core.parameters import unwrap
from everlearn.surgery.hooks import make_hook, remove_hooks


def compute_features(net: nn.Module, output: str, *args: Any, **kwargs: Any) -> Tensor:
    """Return the input of the layer named ``output`` in a forward pass ``net(*args, **kwargs)``.

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


@torch.no_grad()
def computes_outputs(model: nn.Module, output: str, x: Any) -> bool:
    """Whether the layer named ``output`` computes the outputs of the model, as they are.

    Args:
        model: the model, in evaluation mode.
        output: name of the layer.
        x: inputs of a few examples.
    """
    layer_outputs: list[Tensor] = []
    layer = unwrap(model).get_submodule(output)
    handle = layer.register_forward_hook(lambda _layer, _args, outputs: layer_outputs.append(outputs))
    try:
        outputs = forward(unwrap(model), x)
    finally:
        handle.remove()
    return any(torch.equal(outputs, candidate) for candidate in layer_outputs)


class FeatureRecorder:
    """Record the inputs of an output layer in every forward pass, until they are taken.

    Args:
        owner: name of the method, which the hook carries.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.features: Tensor | None = None
        self.is_training = False

    def register(self, net: nn.Module, output: str) -> None:
        """Record the inputs of the layer of this name, and of no other."""
        self.remove(net)
        hook = make_hook(self.owner, self._record)
        net.get_submodule(output).register_forward_pre_hook(hook, with_kwargs=True)

    def remove(self, net: nn.Module) -> None:
        """Stop recording."""
        remove_hooks(net, self.owner, FeatureRecorder)

    def take(self) -> Tensor:
        """Return the features of the last forward pass, and clear them."""
        features = self.features
        self.features = None
        if features is None:
            raise ValueError(
                f"{self.owner} has recorded no features: call begin_task(model, task) before the forward pass, and "
                "observe(batch, outputs) after each."
            )
        if self.is_training:
            raise ValueError(
                f"{self.owner} needs features in evaluation mode, without dropout: call model.eval() before the "
                "forward pass."
            )
        return features

    def _record(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        features = args[0] if args else kwargs["input"]
        self.features = features.detach()
        self.is_training = layer.training
