"""An output layer on fixed features: normalization, fixed random features, a linear classifier."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.parameters import unwrap
from everlearn.surgery.heads import output_layer
from everlearn.surgery.hooks import recompile


class Normalize(nn.Module):
    """Scale each feature vector to length 1."""

    def __init__(self) -> None:
        super().__init__()
        # In the state dict, so that ``restore_feature_head`` sees that features are normalized.
        self.epsilon: Tensor
        self.register_buffer("epsilon", torch.tensor(1e-12))

    def forward(self, features: Tensor) -> Tensor:
        """Return φ / ‖φ‖."""
        norm: Tensor = features.norm(dim=-1, keepdim=True)
        # Half precision rounds epsilon to zero, and features that are all zero would become NaN.
        smallest = torch.finfo(norm.dtype).tiny
        return features / norm.clamp_min(self.epsilon.to(norm.dtype)).clamp_min(smallest)


class RandomReLU(nn.Module):
    """Random features h = ReLU(W φ) with fixed weights.

    Args:
        weight: W, of shape (random features, features).
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", weight)

    def forward(self, features: Tensor) -> Tensor:
        """Return h."""
        return F.linear(features, self.weight).relu()


class RandomFourier(nn.Module):
    """Random Fourier features h = √(2/D) cos(W φ + b) with fixed weights (Rahimi & Recht 2007).

    Args:
        weight: W, of shape (D, features).
        bias: b, of shape (D,).
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return h."""
        return math.sqrt(2 / len(self.bias)) * F.linear(features, self.weight, self.bias).cos()


class FeatureHead(nn.Sequential):
    """An output layer that computes fixed functions of the features before its linear classifier.

    It computes in its own dtype, also under autocast: differences of large logits are lost in half precision.

    Args:
        output: the classifier.
        normalize: whether features are scaled to length 1 first.
        random_features: fixed random features; by default the features themselves.
    """

    output: nn.Linear

    def __init__(
        self,
        output: nn.Linear,
        normalize: bool = False,
        random_features: RandomReLU | RandomFourier | None = None,
    ) -> None:
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if normalize:
            parts["normalize"] = Normalize()
        if isinstance(random_features, RandomReLU):
            parts["relu"] = random_features
        elif isinstance(random_features, RandomFourier):
            parts["fourier"] = random_features
        parts["output"] = output
        super().__init__(parts)
        self.in_features = output.in_features
        if random_features is not None:
            self.in_features = random_features.weight.shape[1]

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits."""
        with torch.autocast(features.device.type, enabled=False):
            values = features.to(self.output.weight.dtype)
            for part in self:
                values = part(values)
        return values

    def computes(self, normalize: bool, random_features: RandomReLU | RandomFourier | None) -> bool:
        """Return whether the classifier gets these functions of the features, with the same random weights."""
        expected = FeatureHead(self.output, normalize, random_features)
        weights = dict(self.named_buffers())
        expected_weights = dict(expected.named_buffers())
        return weights.keys() == expected_weights.keys() and all(
            torch.equal(weight, expected_weights[name].to(weight)) for name, weight in weights.items()
        )


def replace_output(model: nn.Module, name: str, head: nn.Module) -> None:
    """Put a head in the place of the output layer of this name, on its device and in its mode."""
    old = unwrap(model).get_submodule(name)
    device = next(old.parameters()).device
    unwrap(model).set_submodule(name, head.to(device).train(old.training))
    recompile(model)


def feature_head(model: nn.Module, name: str | None = None) -> tuple[str, nn.Linear | FeatureHead]:
    """Return the name and module that turns features into outputs: a ``FeatureHead``, or else the output layer.

    >>> feature_head(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    ('2', Linear(in_features=3, out_features=2, bias=True))
    """
    inner = unwrap(model)
    heads = {n: m for n, m in inner.named_modules() if isinstance(m, FeatureHead)}
    if name is None and heads:
        return list(heads.items())[-1]
    if name is not None and name in heads:
        return name, heads[name]
    return output_layer(model, name)


def restore_feature_head(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a model the feature head of a state dict, so that it can load it; the values are not loaded.

    >>> trained = nn.Sequential(nn.Linear(4, 3), FeatureHead(nn.Linear(3, 2), normalize=True))
    >>> plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> restore_feature_head(plain, trained.state_dict())
    >>> plain.load_state_dict(trained.state_dict())
    <All keys matched successfully>

    Args:
        model: a model without the head, or with one already.
        state: a state dict; one without a feature head changes nothing.
    """
    inner = unwrap(model)
    for name, layer in list(inner.named_modules()):
        weight = state.get(f"{name}.output.weight")
        if not isinstance(layer, nn.Linear) or weight is None:
            continue

        random_features: RandomReLU | RandomFourier | None = None
        if f"{name}.relu.weight" in state:
            random_features = RandomReLU(torch.empty(state[f"{name}.relu.weight"].shape))
        elif f"{name}.fourier.weight" in state:
            fourier_weight = torch.empty(state[f"{name}.fourier.weight"].shape)
            random_features = RandomFourier(fourier_weight, torch.empty(state[f"{name}.fourier.bias"].shape))

        # The dtype is the model's: the state may have been saved in another one.
        outputs, inputs = weight.shape
        output = nn.Linear(inputs, outputs, f"{name}.output.bias" in state)
        normalize = f"{name}.normalize.epsilon" in state
        head = FeatureHead(output, normalize, random_features)
        replace_output(model, name, head.to(layer.weight.dtype))
