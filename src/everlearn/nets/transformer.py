"""A small transformer over sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Transformer(nn.Module):
    """An encoder over positions, averaged, with a linear layer on top; see ``transformer``."""

    def __init__(
        self, length: int, features: int, outputs: int, width: int, depth: int, heads: int, words: int | None
    ) -> None:
        super().__init__()
        self.features = features
        self.enter: nn.Module = nn.Linear(features, width) if words is None else nn.Embedding(words, width)
        self.places = nn.Parameter(0.02 * torch.randn(1, length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Images are read row by row."""
        if x.dim() == 4:
            x = x.transpose(1, 2).flatten(2)
        out: Tensor = self.head(self.encoder(self.enter(x) + self.places).mean(1))
        return out


def transformer(
    inputs: Sequence[int], outputs: int, width: int = 64, depth: int = 2, heads: int = 4, words: int | None = None
) -> nn.Module:
    """A transformer for sequences of shape (length, features), images read as rows, or token numbers (length,).

    Args:
        inputs: the shape of one input.
        outputs: how many.
        width: of the representation.
        depth: encoder layers.
        heads: of attention.
        words: size of the vocabulary, for inputs that are token numbers.

    >>> transformer((1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> transformer((5,), 3, words=100)(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 3])
    """
    if len(inputs) == 3:
        inputs = (inputs[1], inputs[0] * inputs[2])
    if (len(inputs) == 1) != (words is not None):
        raise ValueError(
            f"transformer needs inputs of shape (length, features) or images, or (length,) with words=…, got {tuple(inputs)}."
        )
    return Transformer(inputs[0], math.prod(inputs[1:]), outputs, width, depth, heads, words)
