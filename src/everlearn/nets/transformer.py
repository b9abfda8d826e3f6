"""A small transformer over sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Transformer(nn.Module):
    """Transformer encoder, averaged over positions, with a linear output layer; see ``transformer``."""

    def __init__(
        self, length: int, features: int, outputs: int, width: int, depth: int, heads: int, vocab_size: int | None
    ) -> None:
        super().__init__()
        self.features = features
        self.embedding: nn.Module
        if vocab_size is None:
            self.embedding = nn.Linear(features, width)
        else:
            self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Encode a sequence; an image is a sequence of rows."""
        if x.dim() == 4:
            x = x.transpose(1, 2).flatten(2)
        encoded = self.encoder(self.embedding(x) + self.positions)
        outputs: Tensor = self.head(encoded.mean(1))
        return outputs


def transformer(
    inputs: Sequence[int], outputs: int, width: int = 64, depth: int = 2, heads: int = 4, vocab_size: int | None = None
) -> nn.Module:
    """Create a transformer for sequences of shape (length, features), images as sequences of rows, or token ids.

    Args:
        inputs: shape of one input; (length,) for token ids.
        outputs: number of outputs.
        width: size of the representation.
        depth: number of encoder layers.
        heads: number of attention heads.
        vocab_size: size of the vocabulary, for inputs that are token ids.

    >>> transformer((1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> transformer((5,), 3, vocab_size=100)(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 3])
    """
    if len(inputs) == 3:
        inputs = (inputs[1], inputs[0] * inputs[2])
    is_tokens = len(inputs) == 1
    if is_tokens != (vocab_size is not None):
        raise ValueError(
            "transformer needs inputs of shape (length, features) or images, or (length,) with vocab_size=…, "
            f"got {tuple(inputs)}."
        )
    length, *feature_shape = inputs
    return Transformer(length, math.prod(feature_shape), outputs, width, depth, heads, vocab_size)
