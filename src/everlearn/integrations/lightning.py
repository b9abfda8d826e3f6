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


class Transferred:
    """What the trainer loads, as the module gets it: converted, moved and changed by its hooks of the transfer.

    Args:
        trainer: whose loader is meant.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __len__(self) -> int:
        return len(self.trainer.train_dataloader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.trainer.train_dataloader:
            converted = self.trainer.precision_plugin.convert_input(batch)
            ready = self.trainer.lightning_module._on_before_batch_transfer(converted, dataloader_idx=0)
            yield self.trainer.strategy.batch_to_device(ready, dataloader_idx=0)


class Continual(Callback):  # type: ignore[misc]
    """A Lightning callback that carries a method through ``trainer.fit``: one fit is one task.

    The module's own loss stays what it is; batches are pairs (x, y) or dicts with labels. The method's state lies in Lightning's
    checkpoints. Where Lightning clips gradients by norm, the whole of them is clipped, the method's part too.

    Args:
        method: kept from fit to fit.
        task: the data or a ``Task``; by default what the trainer loads.
        model: name of the submodule whose outputs are meant; by default the module itself, whose ``forward`` gives them.
        likelihood: what the outputs mean.
    """

    def __init__(
        self, method: Method, task: Any = None, *, model: str | None = None, likelihood: Likelihood | None = None
    ) -> None:
        self.method, self.task, self.model, self.likelihood = method, task, model, likelihood
        self._attached: Attachment | None = None
        self._loaded = False
        self._put_back: Callable[[], None] = lambda: None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin, or go on, where a checkpoint is restored and optimizers are not made yet, so that they get what the task adds."""
        if stage != "fit":
            return
        own = vars(pl_module).get("configure_optimizers")
        configure = pl_module.configure_optimizers

        def put_back() -> None:
            vars(pl_module).pop("configure_optimizers", None)
            if own is not None:
                pl_module.configure_optimizers = own

        def begun() -> Any:
            put_back()
            (self.method.resume if self._loaded else self.method.begin_task)(self._net(pl_module), self._task(trainer))
            self._loaded = False
            pl_module.everlearn = nn.ParameterList(self.method.parameters())  # for self.parameters(), while it is asked
            try:
                return configure()
            finally:
                del pl_module.everlearn

        pl_module.configure_optimizers, self._put_back = begun, put_back

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Into the optimizer's steps."""
        if len(trainer.optimizers) != 1:
            raise ValueError(f"A method goes with one optimizer, this module has {len(trainer.optimizers)}.")
        likelihood = self._task(trainer).likelihood
        self._attached = self.method.attach(self._net(pl_module), trainer.optimizers[0], likelihood)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Labels and all, for methods that look at examples."""
        if self._attached is not None and not self.method.of_parameters:
            x, y, _ = as_rows(batch)
            self._attached.see(x, y)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Consolidate."""
        self._off()
        self.method.end_task(self._net(pl_module), self._task(trainer))

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Leave the optimizer and the module as they were."""
        self._off()
        self._put_back()

    def state_dict(self) -> dict[str, Any]:
        """The method's."""
        return self.method.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the method as it was."""
        self.method.load_state_dict(state_dict)
        self._loaded = True

    def _net(self, module: nn.Module) -> nn.Module:
        return module if self.model is None else module.get_submodule(self.model)

    def _task(self, trainer: Any) -> Task:
        """The task, with the steps that Lightning plans."""
        steps = trainer.estimated_stepping_batches  # which loads the data
        task = as_task(Transferred(trainer) if self.task is None else self.task, self.likelihood)
        task.steps = int(steps) if task.steps is None and math.isfinite(steps) else task.steps
        return task

    def _off(self) -> None:
        if self._attached is not None:
            self._attached.remove()
            self._attached = None
