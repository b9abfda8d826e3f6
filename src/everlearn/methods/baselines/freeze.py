"""Freeze: after the first task only the output layer learns, or running statistics stay as they are."""

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
    """After the first task only the output layer learns; everything under it is frozen. Or only running statistics are.

        features:    θ_features = θ*_features of task 1,   L = L_task in θ_output alone
        statistics:  (μ, σ²) of every BatchNorm = those of task 1,   L = L_task in all of θ

    Keeps the features at the price of learning new ones: the other end of the scale from fine-tuning. Frozen parameters
    have no gradient, so no optimizer, momentum or weight decay moves them, and normalisation layers that track running
    statistics stay in evaluation mode. An output layer whose weight is also a table of embeddings cannot learn without moving the
    features, and is refused.

    ``what="statistics"`` freezes nothing but the running statistics, for any other method: ``EWC(100.0) + Freeze("statistics")``. A
    penalty holds weights, and replay mixes old examples in; the mean and variance that a BatchNorm keeps follow the new data all the
    same, and old tasks can be lost although hardly a weight moves. After the first task such layers normalize by what they keep, as
    they do in evaluation mode, in any loop; their scales and shifts go on learning.

    Args:
        what: "features", or "statistics": running statistics alone.
        output: name of the output layer; by default the last ``nn.Linear``.
    """

    traits = Traits(
        family="reference",
        pro="keeps nothing, and a step costs half a plain one",
        con="later tasks must do with the first task's features",
        step=0.5,
        needs_labels=False,
        weak={
            "task": "later tasks must do with the first task's features: below fine-tuning on the digits",
            "domain": "its one output layer learns on and forgets: below fine-tuning on the digits",
            "class": "its one output layer learns on and forgets",
        },
    )

    what: Literal["features", "statistics"] = "features"
    output: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begun: bool = False
        self.ended: bool = False  # whether any task has
        self.first: int | None = None  # the first task's id
        self.frozen: bool = False
        self._undo: list[Callable[[], object]] = []
        self._held: list[tuple[Tensor, Tensor]] = []

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Freeze from the second task on; another chunk of the first task is not yet one."""
        if self.what == "features":
            self._check_tied(unwrap(model))
        place = getattr(task, "id", None)
        self.frozen = self.frozen or (self.begun and (place is None or place != self.first))
        if not self.begun:
            self.begun, self.first = True, place
        self.detach(model)
        if self.frozen:
            self._freeze(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Freeze statistics at once: a loop need not say where the next task begins."""
        if self.what == "features" and not self.begun:
            raise ValueError(
                "Freeze.end_task before any begin_task(model, task): features are frozen where the next task begins, so that this loop "
                "would freeze nothing. Call begin_task before each task's optimizer is made."
            )
        self.begun = self.ended = True
        if self.what == "statistics":
            self._freeze(model)

    def resume(self, model: nn.Module, task: Any) -> None:
        """Freeze it again; statistics also in a loop that has not begun its tasks."""
        place = getattr(task, "id", None)
        in_first_task = place is not None and place == self.first
        if self.frozen or (self.what == "statistics" and self.ended and not in_first_task):
            self._freeze(model)

    def after_step(self, model: nn.Module) -> None:
        """Put back buffers that moved all the same: a compiled model may not see a hook that came later."""
        for buffer, value in self._held:
            buffer.copy_(value)

    def detach(self, model: nn.Module) -> None:
        """Let everything learn again."""
        for undo in self._undo:
            undo()
        self._undo, self._held = [], []
        remove_entry_hooks(model, HELD_BY_FREEZE)  # also from a copied model, whose hooks came with it

    def _check_tied(self, model: nn.Module) -> None:
        """Refuse an output layer that shares a parameter with what is to be frozen, before any time is spent on training."""
        if self.output is None and not any(isinstance(m, nn.Linear) for m in model.modules()):
            return  # said where it is to be frozen
        name, output = output_layer(model, self.output)
        inside = {id(m) for m in output.modules()}
        own = {id(p) for p in output.parameters()}
        for place, module in model.named_modules():
            leaves = [] if id(module) in inside else [n for n, p in module._parameters.items() if id(p) in own]
            if leaves:
                raise ValueError(
                    f"The output layer {name!r} shares its weight with {f'{place}.{leaves[0]}'.lstrip('.')}: with it the features would go on "
                    f"moving. Give it a weight of its own, model.{name}.weight = nn.Parameter(model.{name}.weight.detach().clone()), or "
                    "name another layer: Freeze(output=…)."
                )

    def _freeze(self, model: nn.Module) -> None:
        self.detach(model)
        if self.what == "statistics":
            layers = list(tracking_layers(model).values())
            for layer in layers:
                layer.register_forward_pre_hook(HELD_BY_FREEZE)
            self._held = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(recurse=False)]
            seen_by_compiler(model)
            return
        model = unwrap(model)
        _, output = output_layer(model, self.output)
        learning = {id(p) for p in output.parameters()}
        for p in model.parameters():
            if id(p) not in learning and p.requires_grad:
                p.requires_grad_(False)
                p.grad = None  # a gradient left over would still be stepped on
                self._undo.append(partial(p.requires_grad_, True))
        for layer in tracking_layers(model).values():
            layer.register_forward_pre_hook(HELD_BY_FREEZE)
        own = {id(b) for b in output.buffers()}
        self._held = [(b, b.clone()) for b in model.buffers() if id(b) not in own]
