"""Results: one run is one JSON file, with the accuracy matrix and the facts that made it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everlearn.results import format as result_format
from everlearn.results import metrics
from everlearn.results.format import FORMAT, measured, storable
from everlearn.runtime import files
from everlearn.runtime.escaping import printable


@dataclass(eq=False, repr=False)
class Result:
    """One run: what was measured, what it cost, and everything needed to do it again.

    Args:
        accuracy: [i, j], on task j after learning task i; the future tasks too; nan where nobody measured.
        config: stream, scenario, method, model, training and seed.
        initial_accuracy: accuracy of the untrained model on each task.
        cost: seconds by purpose, peak memory, and per learned task the parameters that prediction needs (the model's and what
            the method has added), bytes of method state, and what the method tells of itself.
        provenance: versions, commit and time.
        examples: how many test examples each task has; empty where that was not recorded.

    >>> r = Result(np.array([[1.0, 0.5], [0.4, 0.8]]), {"method": "L2"})
    >>> r.average_accuracy, r.forgetting
    (0.6, 0.6)
    """

    accuracy: metrics.Matrix
    config: dict[str, Any]
    initial_accuracy: list[float] = field(default_factory=list)
    cost: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    examples: list[int] = field(default_factory=list)

    @property
    def average_accuracy(self) -> float:
        """Every task counts once; see ``metrics.average_accuracy``."""
        return metrics.average_accuracy(self.accuracy)

    @property
    def overall_accuracy(self) -> float:
        """Every test example counts once; see ``metrics.overall_accuracy``; nan where their numbers were not recorded."""
        return metrics.overall_accuracy(self.accuracy, self.examples) if self.examples else float("nan")

    @property
    def average_incremental_accuracy(self) -> float:
        """See ``metrics.average_incremental_accuracy``."""
        return metrics.average_incremental_accuracy(self.accuracy)

    @property
    def learning_accuracy(self) -> float:
        """See ``metrics.learning_accuracy``."""
        return metrics.learning_accuracy(self.accuracy)

    @property
    def forgetting(self) -> float:
        """See ``metrics.forgetting``."""
        return metrics.forgetting(self.accuracy)

    @property
    def backward_transfer(self) -> float:
        """See ``metrics.backward_transfer``."""
        return metrics.backward_transfer(self.accuracy)

    @property
    def forward_transfer(self) -> float:
        """See ``metrics.forward_transfer``; nan where the untrained model was not measured, or no answer was allowed yet."""
        stream = self.config.get("stream", {})
        named_later = (
            self.config.get("scenario") == "class"
            and not stream.get("all_classes")
            and stream.get("labels") != "shared"
        )
        if named_later or not self.initial_accuracy:
            return float("nan")
        return metrics.forward_transfer(self.accuracy, self.initial_accuracy)

    def intransigence(self, joint: Result) -> float:
        """Against the result of joint training on the same stream; see ``metrics.intransigence``."""
        return metrics.intransigence(self.accuracy, joint.accuracy[-1])

    @property
    def seconds(self) -> float:
        """All seconds together."""
        return float(sum(self.cost.get("seconds", {}).values()))

    @property
    def diagnostics(self) -> list[dict[str, float]]:
        """What the method told of itself after each task, and the number of parameters where it grew."""
        facts: list[dict[str, float]] = self.cost.get("facts") or []
        sizes = self.cost.get("parameters") or []
        if len(set(sizes)) < 2 or len(sizes) != len(facts):
            return facts
        return [{**told, "parameters": size} for told, size in zip(facts, sizes, strict=True)]

    def __str__(self) -> str:
        c = self.config
        where = f"{c.get('stream', {}).get('name', '')}, {c.get('scenario', '')}-incremental, seed {c.get('seed')}"
        name = c.get("score", "accuracy")
        forgot = "" if np.isnan(self.forgetting) else f", forgetting {amount(self.forgetting, name)}"
        average = amount(self.average_accuracy, name)
        if abs(self.overall_accuracy - self.average_accuracy) >= 0.01 and name == "accuracy":  # tasks differ in size
            average += f" over tasks ({amount(self.overall_accuracy, name)} over all test examples)"
        return printable(f"{c['method']} ({where}): average {name} {average}{forgot}, {self.seconds:.1f} s")

    __repr__ = __str__

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the result into a folder, under the name its configuration gives it."""
        path = files.writable_folder(folder) / file_name(self.config)
        files.write(path, self.packed())
        return path

    def packed(self) -> bytes:
        """The file's bytes."""
        content = {
            "format": FORMAT,
            "config": storable(self.config),
            "accuracy": measured(self.accuracy),
            "initial": measured(self.initial_accuracy),
            "examples": measured(self.examples),
            "cost": measured(self.cost),
            "made": storable(self.provenance),
        }
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Read one result; a file that is not a whole one is refused by name."""
        try:
            content = result_format.read(Path(path))
        except ValueError as error:
            raise ValueError(
                f"{path} is not a whole Everlearn result ({error}): move it away; a run is done again."
            ) from None
        accuracy = np.array(content["accuracy"], dtype=np.float64)
        initial = [float("nan") if value is None else value for value in content["initial"]]
        return cls(accuracy, content["config"], initial, content["cost"], content["made"], content.get("examples", []))


def load(folder: str | os.PathLike[str]) -> list[Result]:
    """All results of a folder, in the order of their file names."""
    return [Result.load(path) for path in result_files(folder)]


def result_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The result files of a folder; an error says so where there are none."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: make results with 'everlearn run --out {folder}' first.")
    if not (found := sorted(p for p in Path(folder).glob("*.json") if p.is_file())):
        raise FileNotFoundError(f"The folder {folder} holds no results: make some with 'everlearn run --out {folder}'.")
    return found


def amount(score: float, name: str) -> str:
    """An accuracy in per cent, another score as it is.

    >>> amount(0.5, "accuracy"), amount(-1.5, "minus squared error")
    ('50.0 %', '-1.5')
    """
    return f"{100 * score:.1f} %" if name == "accuracy" else f"{score:.4g}"


def file_name(config: dict[str, Any]) -> str:
    """A readable name that is different for every configuration."""
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=5).hexdigest()
    name = readable(config.get("stream", {}).get("name", "stream"), config.get("scenario", ""), config["method"])
    return f"{name}-seed{config.get('seed', 0)}-{digest}.json"


def readable(*words: Any) -> str:
    """Words as a part of a file's name.

    >>> readable("digits", "class", "EWC(strength=10.0)")
    'digits-class-ewc-strength-10.0'
    """
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", str(word)).strip("-").lower()[:40] for word in words)
