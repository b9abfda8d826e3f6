"""Result of a run: a JSON file with the accuracy matrix, the configuration, the cost and the provenance."""

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
from everlearn.results.format import FORMAT, json_measurements, json_settings
from everlearn.runtime import files
from everlearn.runtime.escaping import printable


@dataclass(eq=False, repr=False)
class Result:
    """Result of a run: accuracies, costs, and everything needed to repeat it.

    Args:
        accuracy: the matrix R, where R[i, j] is the accuracy on task j after learning task i, including future tasks;
            NaN if not measured.
        config: stream, scenario, method, model, training and seed.
        initial_accuracy: accuracy of the untrained model on each task.
        cost: seconds by purpose, peak memory, and after each task the number of parameters that prediction needs (the
            model's and those that the method has added), the bytes of the method's state, and its diagnostics.
        provenance: versions, commit and time.
        examples: number of test examples of each task; empty if not recorded.

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
        """Mean over tasks after the last task; see ``metrics.average_accuracy``."""
        return metrics.average_accuracy(self.accuracy)

    @property
    def overall_accuracy(self) -> float:
        """Accuracy over all test examples; see ``metrics.overall_accuracy``. NaN if their numbers were not recorded."""
        if not self.examples:
            return float("nan")
        return metrics.overall_accuracy(self.accuracy, self.examples)

    @property
    def average_incremental_accuracy(self) -> float:
        """Mean over time of the accuracy on tasks so far; see ``metrics.average_incremental_accuracy``."""
        return metrics.average_incremental_accuracy(self.accuracy)

    @property
    def learning_accuracy(self) -> float:
        """Mean accuracy on each task just after learning it; see ``metrics.learning_accuracy``."""
        return metrics.learning_accuracy(self.accuracy)

    @property
    def forgetting(self) -> float:
        """Mean drop from the best accuracy to the last; see ``metrics.forgetting``."""
        return metrics.forgetting(self.accuracy)

    @property
    def backward_transfer(self) -> float:
        """Effect of later tasks on earlier ones; see ``metrics.backward_transfer``."""
        return metrics.backward_transfer(self.accuracy)

    @property
    def forward_transfer(self) -> float:
        """Effect of earlier tasks on later ones; see ``metrics.forward_transfer``.

        NaN if the untrained model was not measured, or if classes could not be predicted before their task.
        """
        stream = self.config.get("stream", {})
        is_class_incremental = self.config.get("scenario") == "class"
        knows_future_classes = stream.get("all_classes") or stream.get("labels") == "shared"
        if not self.initial_accuracy or (is_class_incremental and not knows_future_classes):
            return float("nan")
        return metrics.forward_transfer(self.accuracy, self.initial_accuracy)

    def intransigence(self, joint: Result) -> float:
        """Cost of sequential learning, compared with joint training; see ``metrics.intransigence``.

        Args:
            joint: the result of joint training on the same stream.
        """
        return metrics.intransigence(self.accuracy, joint.accuracy[-1])

    @property
    def seconds(self) -> float:
        """Total time of the run in seconds."""
        return float(sum(self.cost.get("seconds", {}).values()))

    @property
    def diagnostics(self) -> list[dict[str, float]]:
        """Diagnostics of the method after each task, with the number of parameters if it changed."""
        diagnostics: list[dict[str, float]] = self.cost.get("diagnostics") or []
        sizes = self.cost.get("parameters") or []
        if len(set(sizes)) < 2 or len(sizes) != len(diagnostics):
            return diagnostics
        return [{**values, "parameters": size} for values, size in zip(diagnostics, sizes, strict=True)]

    def __str__(self) -> str:
        config = self.config
        stream_name = config.get("stream", {}).get("name", "")
        setting = f"{stream_name}, {config.get('scenario', '')}-incremental, seed {config.get('seed')}"
        score = config.get("score", "accuracy")

        average = format_score(self.average_accuracy, score)
        # The two averages differ if tasks differ in size.
        if abs(self.overall_accuracy - self.average_accuracy) >= 0.01 and score == "accuracy":
            average += f" over tasks ({format_score(self.overall_accuracy, score)} over all test examples)"
        forgetting = ""
        if not np.isnan(self.forgetting):
            forgetting = f", forgetting {format_score(self.forgetting, score)}"
        return printable(f"{config['method']} ({setting}): average {score} {average}{forgetting}, {self.seconds:.1f} s")

    __repr__ = __str__

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the result into a folder, under a name that follows from its configuration."""
        path = files.writable_folder(folder) / file_name(self.config)
        files.write(path, self.to_json())
        return path

    def to_json(self) -> bytes:
        """Return the content of the result file."""
        content = {
            "format": FORMAT,
            "config": json_settings(self.config),
            "accuracy": json_measurements(self.accuracy),
            "initial_accuracy": json_measurements(self.initial_accuracy),
            "examples": json_measurements(self.examples),
            "cost": json_measurements(self.cost),
            "provenance": json_settings(self.provenance),
        }
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Read a result file; a ValueError names a file that is not a valid result."""
        try:
            content = result_format.read(Path(path))
        except ValueError as error:
            raise ValueError(
                f"{path} is not a valid Everlearn result ({error}): move it away, and the run is repeated."
            ) from None
        accuracy = np.array(content["accuracy"], dtype=np.float64)
        initial_accuracy = [float("nan") if value is None else value for value in content["initial_accuracy"]]
        return cls(
            accuracy,
            content["config"],
            initial_accuracy,
            content["cost"],
            content["provenance"],
            content.get("examples", []),
        )


def load(folder: str | os.PathLike[str]) -> list[Result]:
    """Load all results of a folder, in the order of their file names."""
    return [Result.load(path) for path in result_files(folder)]


def result_files(folder: str | os.PathLike[str]) -> list[Path]:
    """List the result files of a folder; raises an error if there are none."""
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: run 'everlearn run --out {folder}' first.")
    paths = sorted(path for path in Path(folder).glob("*.json") if path.is_file())
    if not paths:
        subfolders = sorted({path.parent.name for path in Path(folder).glob("*/*.json")})
        advice = f"run 'everlearn run --out {folder}' first"
        if subfolders:
            advice = f"its folders {', '.join(subfolders[:5])} have JSON files; name one of them"
        raise FileNotFoundError(f"The folder {folder} holds no results: {advice}.")
    return paths


def format_score(score: float, name: str) -> str:
    """Format an accuracy in percent, and any other score as a plain number.

    >>> format_score(0.5, "accuracy"), format_score(-1.5, "minus squared error")
    ('50.0 %', '-1.5')
    """
    if name == "accuracy":
        return f"{100 * score:.1f} %"
    return f"{score:.4g}"


def file_name(config: dict[str, Any]) -> str:
    """Return a readable file name that is unique for every configuration."""
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=5).hexdigest()
    name = slugify(config.get("stream", {}).get("name", "stream"), config.get("scenario", ""), config["method"])
    return f"{name}-seed{config.get('seed', 0)}-{digest}.json"


def slugify(*parts: Any) -> str:
    """Join parts to a lower-case name that is safe in file names.

    >>> slugify("digits", "class", "EWC(strength=10.0)")
    'digits-class-ewc-strength-10.0'
    """
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", str(part)).strip("-").lower()[:40] for part in parts)
