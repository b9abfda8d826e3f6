"""Methods in Lightning's Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from everlearn.core.attachment import Attachment
from everlearn.core.data_source import as_rows
from everlearn.core.likelihood import Likelihood
from everlearn.core.method import Method
from everlearn.core.task import Task, as_task
from everlearn.runtime.optional_imports import import_optional

Callback: Any = import_optional("lightning.pytorch", "lightning", "The Lightning callback").Callback


class TransferredBatches:
    """Training batches as the module receives them: converted, moved to the device and changed by transfer hooks.

    Args:
        trainer: the trainer whose training data is loaded.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __len__(self) -> int:
        return len(self.trainer.train_dataloader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.trainer.train_dataloader:
            converted = self.trainer.precision_plugin.convert_input(batch)
            prepared = self.trainer.lightning_module._on_before_batch_transfer(converted, dataloader_idx=0)
            yield self.trainer.strategy.batch_to_device(prepared, dataloader_idx=0)


class Continual(Callback):  # type: ignore[misc]
    """Lightning callback that applies a method in ``trainer.fit``; each call is one task.

    The module's loss is unchanged. Batches are pairs (x, y) or dicts with labels. The method's state is saved in
    Lightning's checkpoints. If Lightning clips gradients by norm, it clips all of them, including the method's part.

    Args:
        method: the method; use the same object for every fit.
        task: the data or a ``Task``; by default the trainer's data.
        model: name of the submodule that computes the outputs; by default the module itself, by its ``forward``.
        likelihood: distribution of the outputs.
    """

    def __init__(
        self, method: Method, task: Any = None, *, model: str | None = None, likelihood: Likelihood | None = None
    ) -> None:
        self.method = method
        self.task = task
        self.model = model
        self.likelihood = likelihood
        self._attached: Attachment | None = None
        self._is_resumed = False
        self._restore_configure: Callable[[], None] = lambda: None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin or resume the task when the optimizers are configured.

        At that point a checkpoint is restored and the optimizers do not exist yet, so that they get the parameters that
        the task adds.
        """
        if stage != "fit":
            return
        instance_override = vars(pl_module).get("configure_optimizers")
        configure = pl_module.configure_optimizers

        def restore_configure() -> None:
            vars(pl_module).pop("configure_optimizers", None)
            if instance_override is not None:
                pl_module.configure_optimizers = instance_override

        def begin_and_configure() -> Any:
            restore_configure()
            model = self._select_model(pl_module)
            if self._is_resumed:
                self.method.resume(model, self._create_task(trainer))
            else:
                self.method.begin_task(model, self._create_task(trainer))
            self._is_resumed = False

            # While optimizers are configured, self.parameters() includes the method's parameters.
            pl_module.everlearn = nn.ParameterList(self.method.parameters())
            try:
                return configure()
            finally:
                del pl_module.everlearn

        pl_module.configure_optimizers = begin_and_configure
        self._restore_configure = restore_configure

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Attach the method to the optimizer."""
        if len(trainer.optimizers) != 1:
            raise ValueError(f"A method needs exactly one optimizer, this module has {len(trainer.optimizers)}.")
        likelihood = self._create_task(trainer).likelihood
        self._attached = self.method.attach(self._select_model(pl_module), trainer.optimizers[0], likelihood)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Announce the batch with its labels, for methods that depend on examples."""
        if self._attached is not None and not self.method.of_parameters:
            x, y, _ = as_rows(batch)
            self._attached.see(x, y)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """End the task."""
        self._detach()
        self.method.end_task(self._select_model(pl_module), self._create_task(trainer))

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Remove all hooks from the optimizer and the module."""
        self._detach()
        self._restore_configure()

    def state_dict(self) -> dict[str, Any]:
        """Return the method's state."""
        return self.method.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the method's state, to resume the task."""
        self.method.load_state_dict(state_dict)
        self._is_resumed = True

    def _select_model(self, module: nn.Module) -> nn.Module:
        if self.model is None:
            return module
        return module.get_submodule(self.model)

    def _create_task(self, trainer: Any) -> Task:
        """Create the task, with the number of steps that Lightning plans."""
        steps = trainer.estimated_stepping_batches  # also loads the data
        data = self.task
        if data is None:
            data = TransferredBatches(trainer)
        task = as_task(data, self.likelihood)
        if task.steps is None and math.isfinite(steps):
            task.steps = int(steps)
        return task

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.remove()
            self._attached = None
