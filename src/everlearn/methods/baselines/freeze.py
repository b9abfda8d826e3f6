"""Freeze: after the first task train only the output layer, or freeze running statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from everlearn.core.method import Method
from everlearn.core.parameters import unwrap
from everlearn.core.running_statistics import HoldStatistics, tracking_layers
from everlearn.core.traits import Traits
from everlearn.surgery.freezing import remove_entry_hooks, seen_by_compiler
from everlearn.surgery.heads import output_layer

HELD_BY_FREEZE = HoldStatistics("Freeze")


@dataclass(eq=False)
class Freeze(Method):
    """Freeze: after the first task, train the output layer only (or freeze running statistics).

        features:    θ_features = θ*_features of task 1,   L = L_task in θ_output alone
        statistics:  (μ, σ²) of every BatchNorm = those of task 1,   L = L_task in all of θ

    The features are preserved, and no new ones are learned: the opposite extreme of fine-tuning. Frozen parameters have
    no gradient, so that no optimizer, momentum or weight decay moves them. Normalization layers with running statistics
    stay in evaluation mode. An output layer that shares its weight with an embedding cannot be trained without changing
    the features, and is refused.

    ``what="statistics"`` freezes only the running statistics, together with any other method:
    ``EWC(100.0) + Freeze("statistics")``. A penalty constrains weights, and replay mixes old examples in; the running
    mean and variance of BatchNorm still follow the new data, and accuracy on old tasks can drop although the weights
    hardly change. After the first task such layers normalize by their running statistics, as in evaluation mode, in any
    loop; their scales and shifts remain trainable.

    Args:
        what: "features", or "statistics" for running statistics alone.
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="baselines",
        pro="stores nothing, and a step costs half of fine-tuning's",
        con="later tasks use the first task's features",
        step=0.5,
        copies=(0.0,),
        needs_labels=False,
        weak={
            "task": "later tasks use the first task's features: below fine-tuning on the digits",
            "domain": "its one output layer is still trained and forgets: below fine-tuning on the digits",
            "class": "its one output layer is still trained and forgets",
        },
    )

    what: Literal["features", "statistics"] = "features"
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_begun: bool = False  # whether a task has begun
        self.has_ended: bool = False  # whether a task has ended
        self.first_task_id: int | None = None
        self.is_frozen: bool = False
        self.is_task_open: bool = False
        self._loaded = False
        self._unfreeze_calls: list[Callable[[], object]] = []
        self._saved_buffers: list[tuple[Tensor, Tensor]] = []

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Freeze from the second task on; another chunk of the first task does not count as the second."""
        if self.what == "features":
            self._check_tied_weights(unwrap(model))

        task_id = getattr(task, "id", None)
        in_first_task = not self.has_begun or (task_id is not None and task_id == self.first_task_id)
        is_resumed = self._loaded and self.is_task_open
        if not in_first_task and not is_resumed:
            self.is_frozen = True
        if not self.has_begun:
            self.has_begun = True
            self.first_task_id = task_id
        self.is_task_open = True
        self._loaded = False

        # A loop that calls only end_task freezes statistics there.
        is_frozen_by_end = self.what == "statistics" and self.has_ended and not in_first_task
        self.detach(model)
        if self.is_frozen or is_frozen_by_end:
            self._freeze(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Freeze statistics at once, so that a loop need not call ``begin_task``."""
        if self.what == "features" and not self.has_begun:
            raise ValueError(
                "Freeze.end_task was called before begin_task(model, task): features are frozen when the next task "
                "begins, so this loop would freeze nothing. Call begin_task before each task's optimizer is created."
            )
        self.has_begun = True
        self.has_ended = True
        self.is_task_open = False
        if self.what == "statistics":
            self._freeze(model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a Freeze with the same settings; the next ``begin_task`` applies it to the model."""
        super().load_state_dict(state)
        self._loaded = True

    def after_step(self, model: nn.Module) -> None:
        """Restore buffers: a compiled model may ignore hooks that were registered after its compilation."""
        for buffer, value in self._saved_buffers:
            buffer.copy_(value)

    def detach(self, model: nn.Module) -> None:
        """Make everything trainable again."""
        for unfreeze in self._unfreeze_calls:
            unfreeze()
        self._unfreeze_calls = []
        self._saved_buffers = []

        # Also from a copied model: its hooks were copied with it.
        remove_entry_hooks(model, HELD_BY_FREEZE)

    def _check_tied_weights(self, model: nn.Module) -> None:
        """Raise before training if the output layer shares a parameter with a layer that will be frozen."""
        # A model without an output layer is refused when it is frozen.
        if self.output is None and not any(isinstance(m, nn.Linear) for m in model.modules()):
            return

        name, output = output_layer(model, self.output)
        output_modules = {id(m) for m in output.modules()}
        output_parameters = {id(p) for p in output.parameters()}
        for prefix, module in model.named_modules():
            if id(module) in output_modules:
                continue
            for leaf, p in module._parameters.items():
                if id(p) in output_parameters:
                    tied_name = f"{prefix}.{leaf}".lstrip(".")
                    raise ValueError(
                        f"The output layer {name!r} shares its weight with {tied_name}: training it would change the "
                        f"features. Give it a separate weight, model.{name}.weight = "
                        f"nn.Parameter(model.{name}.weight.detach().clone()), or name another layer: Freeze(output=…)."
                    )

    def _freeze(self, model: nn.Module) -> None:
        self.detach(model)
        if self.what == "statistics":
            self._freeze_statistics(model)
        else:
            self._freeze_features(unwrap(model))

    def _freeze_statistics(self, model: nn.Module) -> None:
        for layer in tracking_layers(model).values():
            layer.register_forward_pre_hook(HELD_BY_FREEZE)
            self._saved_buffers += [(buffer, buffer.clone()) for buffer in layer.buffers(recurse=False)]
        seen_by_compiler(model)

    def _freeze_features(self, model: nn.Module) -> None:
        """Freeze all parameters and buffers outside the output layer."""
        _, output = output_layer(model, self.output)
        output_parameters = {id(p) for p in output.parameters()}
        for p in model.parameters():
            if id(p) not in output_parameters and p.requires_grad:
                p.requires_grad_(False)
                p.grad = None  # an optimizer would still apply an old gradient
                self._unfreeze_calls.append(partial(p.requires_grad_, True))

        for layer in tracking_layers(model).values():
            layer.register_forward_pre_hook(HELD_BY_FREEZE)
        output_buffers = {id(b) for b in output.buffers()}
        self._saved_buffers = [(b, b.clone()) for b in model.buffers() if id(b) not in output_buffers]
