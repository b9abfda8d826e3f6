"""CLINC150: requests to an assistant, 22,500 sentences of 150 intents in ten domains (Larson et al., 2019)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from everlearn.sources.checksums import File, Layout, PublishedDataset
from everlearn.sources.labeled_data import Data, Pair

URL = "https://raw.githubusercontent.com/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data/"


def _read(folder: Path) -> Data:
    """Read sentences and intents, numbered by domain, without the validation and out-of-scope sentences."""
    sentences = _read_json(folder / "data_full.json")
    domains = _read_json(folder / "domains.json")
    try:
        names = [intent for intents in domains.values() for intent in intents]
        label_by_intent = {intent: i for i, intent in enumerate(names)}
        groups = {domain: [label_by_intent[intent] for intent in intents] for domain, intents in domains.items()}
        train = _as_pair(sentences["train"], label_by_intent)
        test = _as_pair(sentences["test"], label_by_intent)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} does not have CLINC150 as it was published: {error!r}; get it again.") from None
    return Data(train, test, names=names, groups=groups)


def _as_pair(rows: list[tuple[str, str]], label_by_intent: dict[str, int]) -> Pair:
    texts = [text for text, _ in rows]
    labels = torch.tensor([label_by_intent[intent] for _, intent in rows])
    return texts, labels


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, or is damaged: {error}.") from None


CLINC150 = PublishedDataset(
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
