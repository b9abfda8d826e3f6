"""Track runs in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everlearn.results.result import Result, file_name
from everlearn.runtime.optional_imports import import_optional


class TensorBoard:
    """Tracker that writes one TensorBoard run per Everlearn run; view them with ``tensorboard --logdir FOLDER``.

    Args:
        folder: folder of the logs.
    """

    def __init__(self, folder: str | Path = "runs/tensorboard") -> None:
        import_optional("tensorboard", "tensorboard", "The TensorBoard tracker")
        from torch.utils.tensorboard import SummaryWriter

        self.folder = Path(folder)
        self._create_writer = SummaryWriter
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Create a folder with the name of the result file, and log the configuration."""
        self._writer = self._create_writer(str(self.folder / Path(file_name(dict(config))).stem))
        self._writer.add_text("configuration", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers at a step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, result: Result | None) -> None:
        """Close the log."""
        self._writer.close()
