"""CLINC150: what people ask an assistant, 22,500 sentences of 150 intents in ten domains (Larson et al., 2019)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from everlearn.sources.data import Data, Pair
from everlearn.sources.files import File, Layout, Published

URL = "https://raw.githubusercontent.com/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data/"


def _read(folder: Path) -> Data:
    """Sentences and intents, numbered domain by domain; the sentences for validation and those of no intent are left out."""
    content, domains = _json(folder / "data_full.json"), _json(folder / "domains.json")
    try:
        names = [intent for intents in domains.values() for intent in intents]
        number = {intent: i for i, intent in enumerate(names)}
        groups = {domain: [number[intent] for intent in intents] for domain, intents in domains.items()}
        train, test = (_pair(content[part], number) for part in ("train", "test"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} does not have CLINC150 as it was published: {error!r}; get it anew.") from None
    return Data(train, test, names=names, groups=groups)


def _pair(rows: list[tuple[str, str]], number: dict[str, int]) -> Pair:
    return [text for text, _ in rows], torch.tensor([number[intent] for _, intent in rows])


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, or is damaged: {error}.") from None


CLINC150 = Published(
    "clinc150",
    (
        Layout(
            (
                File("data_full.json", "30c29dc6ab78edf3b5dfa640be204cde", url=URL + "data_full.json"),
                File("domains.json", "9beee9d0f36e07e914c1e3a626bdcb4a", url=URL + "domains.json"),
            ),
            _read,
        ),
    ),
    "github.com/clinc/oos-eval, folder data",
)
