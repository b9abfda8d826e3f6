"""Freeze: after the first task train only the output layer, or freeze running statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from everlearn.core.method import Method
from everlearn.core.parameters import unwrap
from everlearn.core.running_statistics import tracking_layers
from everlearn.core.traits import Traits
from everlearn.surgery.freezing import FrozenEntries
from everlearn.surgery.heads import output_layer, tied_parameters


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
        self.first_task_id: int | None = None
        self.is_frozen: bool = False
        self.is_task_open: bool = False
        self._frozen = FrozenEntries("Freeze")

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Freeze from the second task on; another chunk of the first task does not count as the second."""
        if self.what == "features":
            self._check_tied_weights(unwrap(model))

        task_id = getattr(task, "id", None)
        in_first_task = not self.has_begun or (task_id is not None and task_id == self.first_task_id)
        # Without an id, a task that has not ended is resumed.
        is_resumed = self.is_task_open and task_id is None
        if not in_first_task and not is_resumed:
            self.is_frozen = True
        if not self.has_begun:
            self.has_begun = True
            self.first_task_id = task_id
        self.is_task_open = True

        self._frozen.release(model)
        if self.is_frozen:
            self._freeze(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Freeze statistics at once, so that a loop need not call ``begin_task``."""
        if self.what == "features" and not self.has_begun:
            raise ValueError(
                "Freeze.end_task was called before begin_task(model, task): features are frozen when the next task "
                "begins, so this loop would freeze nothing. Call begin_task before each task's optimizer is created."
            )
        self.has_begun = True
        self.is_task_open = False
        if self.what == "statistics":
            self._freeze(model)

    def after_step(self, model: nn.Module) -> None:
        """Restore buffers."""
        self._frozen.restore(model)

    def detach(self, model: nn.Module) -> None:
        """Make everything trainable again."""
        self._frozen.detach(model)

    def conflict_with(self, other: Method) -> str:
        """Refuse another Freeze, and methods that reinitialize the model, which would be frozen untrained."""
        if isinstance(other, Freeze):
            return 'each would undo the other. Use one: Freeze() also freezes what Freeze("statistics") does.'
        if other.reinitializes:
            return (
                f"{type(other).__name__} trains a new network in each task, and Freeze would freeze it untrained. "
                f"Leave Freeze out: {type(other).__name__} freezes the networks of earlier tasks itself."
            )
        return ""

    def _check_tied_weights(self, model: nn.Module) -> None:
        """Raise before training if the output layer shares a parameter with a layer that will be frozen."""
        # A model without an output layer is refused when it is frozen.
        if self.output is None and not any(isinstance(m, nn.Linear) for m in model.modules()):
            return

        name, _ = output_layer(model, self.output)
        tied_names = tied_parameters(model, name)
        if tied_names:
            raise ValueError(
                f"The output layer {name!r} shares its weight with {tied_names[0]}: training it would change the "
                f"features. Give it a separate weight, model.{name}.weight = "
                f"nn.Parameter(model.{name}.weight.detach().clone()), or name another layer: Freeze(output=…)."
            )

    def _freeze(self, model: nn.Module) -> None:
        self._frozen.release(model)
        if self.what == "features":
            self._frozen.freeze_features(model, self.output)
            return
        names = []
        for prefix, layer in tracking_layers(model).items():
            names += [name for name, _ in layer.named_buffers(prefix, recurse=False)]
        self._frozen.lock_buffers(model, names)
