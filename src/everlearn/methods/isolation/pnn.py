"""Progressive neural networks: a network per task, with lateral connections from the networks of earlier tasks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from everlearn.core.forward import arguments, forward, read_outputs
from everlearn.core.parameters import Params, check_finite, refuse_sharded, unwrap
from everlearn.core.traits import Traits
from everlearn.methods.isolation.base import Isolation
from everlearn.methods.isolation.fresh_columns import draw_column, tensors_without_reset
from everlearn.methods.isolation.lateral_columns import (
    OWNER,
    ColumnStack,
    find_layers,
    is_connected,
    module_key,
    record_layers,
)
from everlearn.runtime import distributed
from everlearn.runtime.randomness import derive, seeded
from everlearn.surgery.functional import clone_tensors, filled_copy, named_tensors
from everlearn.surgery.hooks import (
    is_compiled,
    move_like,
    recompile,
    remove_hooks,
    temporarily_unhooked,
    without_hooks,
)


@dataclass(eq=False)
class PNN(Isolation):
    """Progressive neural networks (Rusu et al., 2016): add a network per task, connected to the earlier ones.

        task k: trains a new network, column k, which also reads the frozen columns of earlier tasks
        L = L_task, in column k and its laterals
        layer:  h_i⁽ᵏ⁾ = f( W_i h_{i-1}⁽ᵏ⁾ + U σ(V [α_j h_{i-1}⁽ʲ⁾ for j < k]) ),  σ = ReLU, α_j a number

    Your model is always the newest column: ``model(x)`` is the current task's network, in any loop. When a task begins,
    the previous column is stored and the model is reinitialized in place. Earlier columns run in evaluation mode.
    Laterals lead into every ``nn.Linear`` and ``nn.Conv`` that was called in the first task with an input that depends
    on trainable parameters. So the first layer has none, and neither have layers inside ``nn.MultiheadAttention``,
    which does not call them. ``method.parameters()`` are the parameters of the current laterals.

    Args:
        laterals: "adapter", as above; "linear": Σ_j U_j h_{i-1}⁽ʲ⁾; or "none": separate networks, the baseline that
            shows the benefit of laterals.
        factory: creates a new model, without arguments. By default each layer's ``reset_parameters`` is called, and
            tensors that no layer resets start where the first task did. Frozen parameters keep their values.
    """

    traits = Traits(
        family="isolation",
        pro="forgets nothing, and late tasks learn as well as early ones",
        con="memory and time grow with every task",
        step=4.6,
        step_growth=1.9,
        copies=(0.0, 1.0, 0.33),
        needs_task=True,
        zero_forgetting=True,
        grows=True,
    )

    reinitializes: ClassVar[bool] = True

    laterals: Literal["adapter", "linear", "none"] = "adapter"
    factory: Callable[[], nn.Module] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers: list[str] = []  # names of the layers with laterals
        self.lateral_params: list[dict[str, Params]] = []  # laterals into each column, by layer
        self.column_sizes: list[int] = []  # number of parameters of each column
        self.initial_tensors: Params = {}  # values before the first task of tensors that no layer can reset
        self.seed = 0
        self._stack: ColumnStack | None = None
        self._current_laterals: nn.ModuleDict | None = None

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Reinitialize the model as a new column, and connect it to the earlier ones."""
        refuse_sharded(model, type(self).__name__)
        inner = unwrap(model)
        is_new = self.is_new(task)
        fresh_tensors: Params = {}
        if is_new:
            # Anything that can fail comes before the first change of the state.
            self._check_layers(inner)
            if self.tasks:
                seed = derive(self.seed, "column", len(self.tasks))
                fresh_tensors = draw_column(inner, self.initial_tensors, self.factory, seed)

        self.open_task(task)
        if is_new:
            self._current_laterals = None
            with torch.no_grad():
                for name, v in fresh_tensors.items():
                    named_tensors(inner)[name].copy_(v)
            if len(self.tasks) == 1:
                self.seed = distributed.initial_seed()
                self.initial_tensors = clone_tensors(tensors_without_reset(inner))
        self._connect(model)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the laterals into the newest column."""
        if self._current_laterals is None:
            return []
        return list(self._current_laterals.parameters())

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Store the column and its laterals."""
        inner = unwrap(model)
        laterals = self.parameters()
        check_finite({**dict(inner.named_parameters()), **{str(i): p for i, p in enumerate(laterals)}})
        self.close_task(model, clone_tensors(named_tensors(inner)))
        k = len(self.task_params) - 1
        self.column_sizes[k:] = [sum(p.numel() for p in inner.parameters())]
        self._store_laterals()

        # An optimizer that is used further would move parameters that have a gradient.
        for p in laterals:
            p.grad = None
        self._load_columns(model, k).shorten(k)

    def predict_as(self, model: nn.Module, x: Any, k: int) -> Tensor:
        """Compute the outputs of column k with its laterals."""
        stack = self._load_columns(model, k + 1)
        if self.laterals == "none":
            return forward(stack.columns[k], x)
        args, kwargs = arguments(stack.columns[k], x)
        return read_outputs(stack.run(k + 1, *args, **kwargs)[0])

    def predict_current(self, model: nn.Module, x: Any) -> Tensor:
        """Compute the outputs of the newest column with its laterals."""
        inner = unwrap(model)
        laterals = self._load_current_laterals(model) if self.tasks else None
        if laterals is None or is_connected(inner, laterals):
            return super().predict_current(model, x)
        # Another method may have its hooks on the model.
        with temporarily_unhooked(inner, OWNER):
            self._connect(model)
            return super().predict_current(model, x)

    def growth(self) -> dict[str, int]:
        """Count the parameters of each column and of the laterals into it."""
        counts = {}
        for task_id, size, laterals in zip(self.tasks, self.column_sizes, self.lateral_params, strict=False):
            counts[f"column {task_id}"] = size
            counts[f"laterals {task_id}"] = _count_parameters(laterals)
        return counts

    def extra_parameters(self, model: nn.Module) -> int:
        """Count the columns of earlier tasks and the laterals into all columns."""
        stored = self.lateral_params
        if self._current_laterals is not None:
            stored = stored[: len(self.tasks) - 1]
        return super().extra_parameters(model) + sum(map(_count_parameters, stored))

    def export(self, model: nn.Module, task: int) -> nn.Module:
        """Copy the column of the task with this id, with the columns before it and their laterals, into a module."""
        k = self.find_task_index(task)
        stack = self._load_columns(model, k + 1)
        if self.laterals == "none":
            return copy.deepcopy(stack.columns[k])
        module = copy.deepcopy(stack)
        module.shorten(k + 1)
        return module

    def detach(self, model: nn.Module) -> None:
        """Remove the laterals; the model stays the newest column."""
        remove_hooks(unwrap(model), OWNER)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the current values of the laterals."""
        self._store_laterals()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another PNN; the next ``begin_task`` connects the model."""
        self._current_laterals = None
        self._stack = None
        super().load_state_dict(state)

    def _store_laterals(self) -> None:
        """Copy the current laterals into ``lateral_params``; the first column has none."""
        k = len(self.tasks) - 1
        if k == 0 or (k > 0 and self.laterals == "none"):
            self.lateral_params[k:] = [{}]
        elif self._current_laterals is not None:
            current = self._current_laterals
            names = [name for name in self.layers if module_key(name) in current]
            self.lateral_params[k:] = [{n: clone_tensors(current[module_key(n)].state_dict()) for n in names}]

    def _load_current_laterals(self, model: nn.Module) -> nn.ModuleDict | None:
        """Return the laterals into the newest column, created or loaded if necessary, on the model's device."""
        k = len(self.tasks) - 1
        if k and self._current_laterals is None and self.laterals != "none":
            stack = self._load_columns(model, k)
            # After loading a mid-task checkpoint, the laterals of the open task are stored too.
            stored = None
            if k < len(self.lateral_params):
                stored = self.lateral_params[k]
            with seeded(derive(self.seed, "laterals", k)):
                is_adapter = self.laterals == "adapter"
                self._current_laterals = stack.create_laterals(unwrap(model), k, is_adapter, stored)
        if self._current_laterals is not None:
            move_like(self._current_laterals, unwrap(model))
        return self._current_laterals

    def _connect(self, model: nn.Module) -> None:
        """Register the hooks: in the first task they record which layers are called, then they add the laterals."""
        k = len(self.tasks) - 1
        inner = unwrap(model)
        laterals = self._load_current_laterals(model)
        remove_hooks(inner, OWNER)
        recompile(model)
        if k == 0:
            record_layers(inner, self.layers)
        elif laterals is not None:
            self._load_columns(model, k).connect(inner, k, laterals, is_compiled(model))

    def _load_columns(self, model: nn.Module, count: int) -> ColumnStack:
        """Return the stack of stored columns, at least ``count`` of them, on the model's device."""
        inner = unwrap(model)
        if self._stack is None:
            self._stack = ColumnStack(self.layers)
        for k in range(len(self._stack.columns), count):
            with without_hooks(inner):
                net = filled_copy(inner, self.task_params[k])
            with seeded(0):
                laterals = self._stack.create_laterals(net, k, adapter=True, stored=self.lateral_params[k])
            self._stack.add(net, laterals)
        move_like(self._stack, inner)
        return self._stack

    def _check_layers(self, inner: nn.Module) -> None:
        """Raise if there is no layer for laterals."""
        if self.laterals == "none":
            return
        num_parts = sum(any(True for _ in module.parameters(recurse=False)) for module in inner.modules())
        if not find_layers(inner) or num_parts < 2 or (self.tasks and not self.layers):
            condition = ""
            if self.tasks:
                condition = " that is called in the first task, through model(x) and with gradients"
            raise ValueError(
                f"PNN finds no layer of {type(inner).__name__} for laterals to lead into: it needs an nn.Linear or "
                f"nn.Conv behind the first layer{condition}."
            )


def _count_parameters(laterals: dict[str, Params]) -> int:
    return sum(v.numel() for tensors in laterals.values() for v in tensors.values())
