"""Runs in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everlearn.results.result import Result, file_name
from everlearn.runtime.optional_imports import import_optional


class TensorBoard:
    """A tracker that writes one TensorBoard run per Everlearn run: ``tensorboard --logdir FOLDER`` shows them.

    Args:
        folder: where to write.
    """

    def __init__(self, folder: str | Path = "runs/tensorboard") -> None:
        import_optional("tensorboard", "tensorboard", "The TensorBoard tracker")
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self._open = Path(folder), SummaryWriter
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """A folder of the result's own name."""
        self._writer = self._open(str(self.folder / Path(file_name(dict(config))).stem))
        self._writer.add_text("configuration", "\n".join(f"    {k}: {v}" for k, v in config.items()))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """A point of each curve."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, result: Result | None) -> None:
        """Write it out."""
        self._writer.close()
