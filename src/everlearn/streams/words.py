"""Texts as numbers, without anything learned: words and pairs of words, hashed into a bag."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

WORD = re.compile(r"\w+(?:'\w+)?")


def bag(texts: Sequence[str], width: int = 2048) -> Tensor:
    """A row of unit length per text: each word and each pair of neighbours adds ±1 at a place its checksum says.

    The places do not depend on other texts, so that nothing of later tasks is known before they come, nor on the
    process, as Python's own hash does. Which of the two signs is the checksum's too: collisions cancel on average.

    >>> a, b, c = bag(["Turn on the light!", "turn on the light", "my bank account"], width=64)
    >>> bool((a == b).all()), abs(float(a @ c)) < 0.5
    (True, True)
    """
    if width < 1:
        raise ValueError(f"A bag is at least 1 wide, got {width}.")
    places, signs = [], []
    for row, text in enumerate(texts):
        words = WORD.findall(text.lower())
        for gram in (*words, *(f"{a} {b}" for a, b in pairwise(words))):
            code = zlib.crc32(gram.encode())
            places.append((row, (code >> 1) % width))
            signs.append(1.0 if code & 1 else -1.0)
    rows = torch.zeros(len(texts), width)
    if places:
        rows.index_put_(tuple(torch.tensor(places).T), torch.tensor(signs), accumulate=True)
    return torch.nn.functional.normalize(rows, dim=1)
