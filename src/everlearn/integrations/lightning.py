"""Methods in Lightning's Trainer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from everlearn.core.attachment import Attachment
from everlearn.core.check import refuse_problems
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

    @property
    def sampler(self) -> Any:
        """The sampler, which shows that the examples are divided among processes."""
        return getattr(self.trainer.train_dataloader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler, likewise."""
        return getattr(self.trainer.train_dataloader, "batch_sampler", None)

    def __len__(self) -> int:
        return len(self.trainer.train_dataloader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.trainer.train_dataloader:
            converted = self.trainer.precision_plugin.convert_input(batch)
            prepared = self.trainer.lightning_module._on_before_batch_transfer(converted, dataloader_idx=0)
            yield self.trainer.strategy.batch_to_device(prepared, dataloader_idx=0)


class Continual(Callback):  # type: ignore[misc]
    """Lightning callback that applies a method in ``trainer.fit``; each call is one task.

    The loss that ``training_step`` returns gets the method's terms. Batches are pairs (x, y) or dicts with labels. The
    method's state is saved in Lightning's checkpoints. Lightning scales, accumulates and clips the total loss.

    Args:
        method: the method; use the same object for every fit.
        task: the data or a ``Task``; by default the trainer's data.
        model: name of the submodule that computes the outputs; by default the module itself, by its ``forward``.
        likelihood: distribution of the outputs.
        weight: factor of a mean over the batch's labels in the module's loss, if it is not a mean; see
            ``Attachment.loss``. A function gets the batch.
    """

    def __init__(
        self,
        method: Method,
        task: Any = None,
        *,
        model: str | None = None,
        likelihood: Likelihood | None = None,
        weight: float | Callable[[Any], float] = 1.0,
    ) -> None:
        self.method = method
        self.task = task
        self.model = model
        self.likelihood = likelihood
        self.weight = weight
        self._attached: Attachment | None = None
        self._training_passes: list[tuple[Any, Any]] | None = None  # inputs and outputs, within a training step
        self._restore_configure: Callable[[], None] = lambda: None
        self._restore_step: Callable[[], None] = lambda: None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin or resume the task when the optimizers are configured.

        At that point a checkpoint is restored and the optimizers do not exist yet, so that they get the parameters that
        the task adds.
        """
        if stage != "fit":
            return
        configure = pl_module.configure_optimizers

        def begin_and_configure() -> Any:
            self._restore_configure()
            model = self._select_model(pl_module)
            self.method.begin_task(model, self._create_task(trainer))

            # While optimizers are configured, self.parameters() includes the method's parameters.
            pl_module.everlearn = nn.ParameterList(self.method.parameters())
            try:
                return configure()
            finally:
                del pl_module.everlearn

        self._restore_configure = _override(pl_module, "configure_optimizers", begin_and_configure)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Attach the method to the optimizer."""
        if len(trainer.optimizers) != 1:
            raise ValueError(f"A method needs exactly one optimizer, this module has {len(trainer.optimizers)}.")
        likelihood = self._create_task(trainer).likelihood
        model = self._select_model(pl_module)
        refuse_problems(self.method.check(model))
        self._attached = self.method.attach(model, trainer.optimizers[0], likelihood)

        # A method may copy the model: a bound method would be copied with it, and with it the callback.
        pass_hook = model.register_forward_hook(lambda *call: self._record_pass(*call), with_kwargs=True)
        training_step: Callable[..., Any] = pl_module.training_step  # type: ignore[assignment]

        @functools.wraps(training_step)
        def step_and_add_terms(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._training_passes = []
            try:
                result = training_step(batch, *args, **kwargs)
                return self._add_terms(result, batch, self._training_passes)
            finally:
                self._training_passes = None

        remove_override = _override(pl_module, "training_step", step_and_add_terms)

        def restore_step() -> None:
            pass_hook.remove()
            remove_override()

        self._restore_step = restore_step

    def _record_pass(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Record inputs and outputs of the model within a training step."""
        is_own_pass = self._attached is not None and self._attached.is_computing
        if self._training_passes is None or is_own_pass or not torch.is_grad_enabled():
            return
        inputs: Any = args or kwargs
        if len(args) == 1 and not kwargs:
            inputs = args[0]
        self._training_passes.append((inputs, outputs))

    def _add_terms(self, result: Any, batch: Any, passes: list[tuple[Any, Any]]) -> Any:
        """Add the method's terms to the loss that ``training_step`` has returned."""
        loss = result["loss"] if isinstance(result, Mapping) else result
        if self._attached is None or loss is None:
            return result
        weight = self.weight(batch) if callable(self.weight) else self.weight

        if self.method.needs_batch:
            name = type(self.method).__name__
            if len(passes) != 1:
                raise ValueError(
                    f"{name} needs one call of the model per training step, with all examples of the batch; this step "
                    f"called it {len(passes)} times. Name the submodule that computes the outputs, "
                    "Continual(method, model=…), and call it as a whole."
                )
            x, outputs = passes[0]
            _, y, _ = as_rows(batch)
            total = self._attached.loss(loss, x, y, outputs, weight=weight)
        elif len(passes) == 1:
            x, outputs = passes[0]
            _, y, _ = as_rows(batch)
            total = self._attached.loss(loss, x, y, outputs, weight=weight)
        else:
            total = self._attached.loss(loss, weight=weight)
        return {**result, "loss": total} if isinstance(result, Mapping) else total

    def on_before_optimizer_step(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        """Let the method edit the gradients before Lightning clips them."""
        if self._attached is not None:
            self._attached.before_step()

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
            self._restore_step()
            self._attached.remove()
            self._attached = None


def _override(module: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Override a method of one module; return a function that restores it."""
    previous_override = vars(module).get(name)
    setattr(module, name, function)

    def restore() -> None:
        vars(module).pop(name, None)
        if previous_override is not None:
            setattr(module, name, previous_override)

    return restore
