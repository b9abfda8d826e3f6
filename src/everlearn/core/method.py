"""The base class of continual-learning methods: eight optional hooks that a training loop calls."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_type_hints

from torch import Tensor, nn
from torch.optim import Optimizer

from everlearn.core.attachment import Attachment
from everlearn.core.attachment_checks import refuse_gradient
from everlearn.core.batch import Batch
from everlearn.core.check import Report, check_method, refuse_misspelled_hooks
from everlearn.core.data_source import unlisted
from everlearn.core.forward import check_next_tokens, forward
from everlearn.core.hyperparameters import check_field
from everlearn.core.likelihood import Likelihood
from everlearn.core.parameters import evaluating
from everlearn.core.running_statistics import warn_if_statistics_move
from everlearn.core.scenario import SCENARIOS
from everlearn.core.traits import Traits

if TYPE_CHECKING:
    from everlearn.core.chain import Chain


@dataclass(eq=False)
class Method:
    """Fine-tuning: train on each task without protecting earlier ones; base class of all methods.

        L = L_task

    Fine-tuning is the lower bound of every comparison. A method overrides some of the hooks. The trainer, or your own
    training loop, calls them as follows::

        for task in stream:
            method.begin_task(model, task)
            optimizer = SGD([*model.parameters(), *method.parameters()], lr=0.1)
            for batch in task.batches(64):
                loss = method.loss(model, batch)
                optimizer.zero_grad(); loss.backward()
                method.before_step(model)          # where clip_grad_norm_ would stand
                optimizer.step()
                method.after_step(model)
            method.end_task(model, task)

    Hyper-parameters are the dataclass fields, stored unchanged, so ``repr(method)`` is the configuration. Every other
    attribute is state: tensors, numbers and dicts of them, set in ``__post_init__``. Attributes with a leading
    underscore are temporary and not saved. A method has no access to the trainer, the optimizer or the scenario.

    To resume within a task, load the state of model and method and call ``begin_task`` again.
    """

    traits: ClassVar[Traits] = Traits(
        family="baselines",
        pro="costs nothing",
        con="does nothing against forgetting: the lower bound of every comparison",
        step=1.0,
        copies=(0.0,),
        needs_labels=False,
        without_boundaries={},
        weak=dict.fromkeys(SCENARIOS, "does nothing against forgetting: the lower bound of every comparison"),
    )

    # False for methods that only collect statistics: the trainer takes no gradient steps.
    trains: ClassVar[bool] = True

    # Whether a plain model with the same weights gives the outputs of ``predict``. ``update`` deploys weights and
    # refuses methods that need more, such as hooks on the model, a sub-network per task or added units.
    deployable: ClassVar[bool] = True

    # Whether each task trains a newly initialized network in place of the model's, as with a network per task.
    reinitializes: ClassVar[bool] = False

    # Whether ``task_loss`` ignores the loss that a training loop has computed itself.
    replaces_loss: ClassVar[bool] = False

    # Whether ``penalty`` uses the batch, or depends on the parameters only.
    penalty_uses_batch: ClassVar[bool] = True

    _checked_outputs = False
    _checked_statistics = False

    # Calls the hooks in a training loop that does not call them itself.
    _attached = cast("Attachment | None", None)

    # The task that has begun and not ended, of methods whose ``end_task`` consolidates: its id, or that of the object.
    _open_task = cast("int | None", None)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        refuse_misspelled_hooks(cls, Method)

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for f in fields(self):
            check_field(f"{type(self).__name__}.{f.name}", getattr(self, f.name), hints[f.name])

    # Hooks. In brackets: how a chain of methods composes them.

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Grow, wrap or snapshot the model before the optimizer is created. [in order]

        Called again when training resumes within a task, once model and state are loaded: a method that changes the
        model or its own state here must see from its state that the task has begun, and restore hooks and caches only.
        """

    def task_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss of the batch, and the model's outputs for its examples. [at most one override]"""
        outputs = batch.forward(model)
        return batch.loss(outputs), outputs

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Term that is added to the task loss. [summed]"""
        return 0.0

    def observe(self, batch: Batch, outputs: Tensor) -> None:
        """Record a micro-batch and its detached outputs after the forward pass. [in order]"""

    def before_step(self, model: nn.Module) -> None:
        """Edit the gradients in ``p.grad``. [in order]"""

    def after_step(self, model: nn.Module) -> None:
        """Repair parameters or collect statistics after the optimizer step. [in order]"""

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Consolidate the task; ``task`` is a Task or any data that a Task accepts. [in order]"""

    def predict(self, model: nn.Module, x: Any, task: Tensor | None = None) -> Tensor:
        """Outputs at test time, in evaluation mode. [at most one override]

        Args:
            model: the trained model.
            x: inputs.
            task: task index of each example, or None if unknown.
        """
        with evaluating(model):
            return forward(model, unlisted(x))

    # Called by training loops, not overridden by methods.

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the task loss plus the penalty of a training step.

        Args:
            model: the model in training mode.
            batch: examples of the current task.
        """
        if not isinstance(batch, Batch):
            raise TypeError(f"loss() needs a Batch, got a {type(batch).__name__}: {_batch_hint(batch)}.")

        # Inputs and outputs are checked for the first batch only: the checks synchronize with the device.
        if not self._checked_outputs:
            check_next_tokens(model, batch.x, batch.y)

        task_loss, outputs = self.task_loss(model, batch)

        if not self._checked_outputs:
            self._checked_outputs = True
            batch.likelihood.check_outputs(outputs)

        penalty = self.penalty(model, batch, outputs)
        self.observe(batch, outputs.detach())

        loss = task_loss
        if not isinstance(penalty, float) or penalty != 0.0:
            loss = task_loss + penalty
        return self._note_loss(loss)

    def _note_loss(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged; a loop that the method is attached to may not differentiate it."""
        if self._attached is not None and not self._attached.is_computing:
            refuse_gradient(loss, self, self._attached.method)
        return loss

    def attach(self, model: nn.Module, optimizer: Optimizer, likelihood: Likelihood | None = None) -> Attachment:
        """Use the method in an external training loop; see ``Attachment``.

        Call ``begin_task`` before the optimizer is created, and ``end_task`` after the loop.
        """
        return Attachment(self, model, optimizer, likelihood)

    def check(self, model: nn.Module, optimizer: Optimizer | None = None, batch: Batch | None = None) -> Report:
        """Report what the method will do with a model, and known misuse, without a training step.

        >>> print(Method().check(nn.Linear(2, 3)))
        finetune
        parameters          9 trainable, 0 frozen
        running statistics  none
        hooks               none
        state               about 0.0 KB after 1, 0.0 KB after 10 tasks, without examples
        problems            none found

        Args:
            model: the model, after ``begin_task``.
            optimizer: the optimizer, to find out whether it has all parameters.
            batch: some examples, to find out whether the outputs fit them.
        """
        return check_method(self, model, optimizer, batch)

    def describe(self, model: nn.Module, batch: Batch | None = None) -> dict[str, str]:
        """Facts for ``check``, by topic, such as which parameters the method protects. [merged]"""
        return {}

    def changes(self, hook: str) -> bool:
        """Whether the class overrides the hook of this name."""
        return getattr(type(self), hook) is not getattr(Method, hook)

    def conflict_with(self, other: Method) -> str:
        """Why the method cannot be chained with another one, as a sentence; empty if it can."""
        return ""

    @property
    def needs_batch(self) -> bool:
        """Whether anything beyond the task loss depends on the batch, not only on the parameters."""
        has_batch_penalty = self.changes("penalty") and self.penalty_uses_batch
        return has_batch_penalty or self.changes("task_loss") or self.changes("observe")

    def _open(self, task: Any) -> None:
        """Warn if another task has begun and not ended; ``end_task`` sets ``_open_task`` to None."""
        task_id = getattr(task, "id", None)
        if task_id is None:
            task_id = id(task)
        if self._open_task not in (None, task_id):
            warnings.warn(
                f"{type(self).__name__} does not protect what was learned since the last begin_task: end_task(model, "
                "task) was not called before the next task.",
                UserWarning,
                stacklevel=3,
            )
        self._open_task = task_id

    def _check_statistics(self, model: nn.Module) -> None:
        """Warn once, in a later task, of running statistics that the method does not protect."""
        if not self._checked_statistics:
            self._checked_statistics = warn_if_statistics_move(model, type(self).__name__)

    def parameters(self) -> Iterable[nn.Parameter]:
        """Trainable tensors of the method itself; most methods have none."""
        return ()

    def extra_parameters(self, model: nn.Module) -> int:
        """Number of parameters that prediction needs beyond the model's; by default all of ``parameters()``.

        Added units, columns, extractors and task-specific parameters count. What only training needs, such as a
        memory, a teacher or a generator, does not count: it is state.
        """
        return sum(p.numel() for p in self.parameters())

    def diagnostics(self) -> dict[str, float]:
        """Numbers to record in the result after every task, such as the used share of the capacity."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State of the method: tensors, numbers and dicts, as ``torch.load(weights_only=True)`` reads them."""
        hyperparameters = {f.name for f in fields(self)}
        state = {}
        for name, value in vars(self).items():
            if name in hyperparameters or name.startswith("_"):
                continue
            if hasattr(value, "state_dict"):
                value = value.state_dict()
            state[name] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a method of the same class."""
        mismatched_keys = set(state) ^ set(self.state_dict())
        if mismatched_keys:
            raise ValueError(
                f"State does not match {type(self).__name__}: unexpected or missing keys "
                f"{', '.join(sorted(mismatched_keys))}. Load it into the method class and the version of Everlearn "
                "that saved it."
            )

        # Copies, so that two methods that load the same state do not share tensors.
        for name, value in state.items():
            attribute = getattr(self, name)
            if hasattr(attribute, "load_state_dict"):
                attribute.load_state_dict(copy.deepcopy(value))
            else:
                setattr(self, name, copy.deepcopy(value))
        self._open_task = None

    def detach(self, model: nn.Module) -> None:
        """Remove everything that the method has added to the model, such as hooks and frozen flags."""

    def __add__(self, other: Method) -> Chain:
        # Imported here because Chain is itself a Method.
        from everlearn.core.chain import Chain

        return Chain(self, other)


def _batch_hint(value: Any) -> str:
    """Explain how to build a Batch from a value that is not one."""
    if not isinstance(value, Mapping):
        return "write Batch(x, y)"
    return (
        'write Batch({k: v for k, v in batch.items() if k != "labels"}, batch["labels"]), '
        "the inputs by name and the labels separately"
    )


def count_parameters(model: nn.Module, method: Method) -> int:
    """Count the parameters that prediction needs: the model's and those that the method has added.

    >>> from everlearn import L2
    >>> count_parameters(nn.Linear(3, 2), L2())
    8
    """
    return sum(p.numel() for p in model.parameters()) + method.extra_parameters(model)
