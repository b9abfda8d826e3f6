"""Hashed bag of words: fixed text features without a learned vocabulary."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

WORD_PATTERN = re.compile(r"\w+(?:'\w+)?")


def bag(texts: Sequence[str], width: int = 2048) -> Tensor:
    """Convert texts to hashed unigram and bigram counts with random signs, one row of unit norm per text.

    Each word and each pair of adjacent words adds ±1 at index crc32 // 2 mod width; the sign is the lowest bit of the
    crc32, so that collisions cancel on average. Features depend on no other text, so nothing of later tasks leaks into
    earlier ones, and they are equal in all processes, unlike Python's ``hash``.

    >>> a, b, c = bag(["Turn on the light!", "turn on the light", "my bank account"], width=64)
    >>> bool((a == b).all()), abs(float(a @ c)) < 0.5
    (True, True)
    """
    if width < 1:
        raise ValueError(f"A bag is at least 1 wide, got {width}.")

    indices = []
    signs = []
    for row, text in enumerate(texts):
        tokens = WORD_PATTERN.findall(text.lower())
        bigrams = [f"{first} {second}" for first, second in pairwise(tokens)]
        for ngram in (*tokens, *bigrams):
            code = zlib.crc32(ngram.encode())
            indices.append((row, (code >> 1) % width))
            signs.append(1.0 if code & 1 else -1.0)

    features = torch.zeros(len(texts), width)
    if indices:
        features.index_put_(tuple(torch.tensor(indices).T), torch.tensor(signs), accumulate=True)
    return torch.nn.functional.normalize(features, dim=1)
