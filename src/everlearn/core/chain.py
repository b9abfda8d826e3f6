"""Several methods combined into one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from itertools import permutations
from typing import Any

from torch import Tensor, nn

from everlearn.core.batch import Batch
from everlearn.core.method import Method


class Chain(Method):
    """Several methods combined: penalties are summed, gradient edits run in the order written, state is nested.

    >>> from everlearn import Freeze, LwF
    >>> LwF(strength=0.5) + Freeze()
    LwF(strength=0.5, temperature=2.0, refuse_new=False, warmup=0, output=None) + Freeze(what='features', output=None)
    """

    def __init__(self, *methods: Method) -> None:
        for method in methods:
            if not isinstance(method, Method):
                raise TypeError(f"A chain consists of methods, got a {type(method).__name__}.")
        if not methods:
            raise ValueError("A chain needs at least one method.")

        # A chain inside a chain is flattened.
        self.methods: list[Method] = []
        for method in methods:
            self.methods += methods_of(method)

        for method, other in permutations(self.methods, 2):
            conflict = method.conflict_with(other)
            if conflict:
                raise ValueError(f"{type(method).__name__} and {type(other).__name__} cannot be chained: {conflict}")
        self._owner = {hook: self._find_owner(hook) for hook in ("task_loss", "predict")}

    def _find_owner(self, hook: str) -> Method:
        """Find the only method that overrides a hook which cannot be composed; the first method if none does."""
        owners = [m for m in self.methods if m.changes(hook)]
        if len(owners) > 1:
            names = " and ".join(type(m).__name__ for m in owners)
            raise ValueError(f"{names} both define {hook}(); at most one method of a chain may.")
        if owners:
            return owners[0]
        return self.methods[0]

    def changes(self, hook: str) -> bool:
        """Whether any method overrides the hook."""
        return any(m.changes(hook) for m in self.methods)

    @property
    def deployable(self) -> bool:  # type: ignore[override]
        """Whether all methods are deployable."""
        return all(m.deployable for m in self.methods)

    @property
    def trains(self) -> bool:  # type: ignore[override]
        """Whether any method needs gradient steps."""
        return any(m.trains for m in self.methods)

    @property
    def needs_batch(self) -> bool:
        """Whether any method needs the batch."""
        return any(m.needs_batch for m in self.methods)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.methods))

    def begin_task(self, model: nn.Module, task: Any) -> None:
        """Call each method's hook in order."""
        for m in self.methods:
            m.begin_task(model, task)

    def task_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Call the hook of the only method that overrides it."""
        return self._owner["task_loss"].task_loss(model, batch)

    def penalty(self, model: nn.Module, batch: Batch | None = None, outputs: Tensor | None = None) -> Tensor | float:
        """Sum of the methods' penalties."""
        total: Tensor | float = 0.0
        for m in self.methods:
            total = total + m.penalty(model, batch, outputs)
        return total

    def observe(self, batch: Batch, outputs: Tensor) -> None:
        """Call each method's hook in order."""
        for m in self.methods:
            m.observe(batch, outputs)

    def before_step(self, model: nn.Module) -> None:
        """Call each method's hook in order."""
        for m in self.methods:
            m.before_step(model)

    def after_step(self, model: nn.Module) -> None:
        """Call each method's hook in order."""
        for m in self.methods:
            m.after_step(model)

    def end_task(self, model: nn.Module, task: Any) -> None:
        """Call each method's hook in order."""
        for m in self.methods:
            m.end_task(model, task)

    def predict(self, model: nn.Module, x: Any, task: Tensor | None = None) -> Tensor:
        """Call the hook of the only method that overrides it."""
        return self._owner["predict"].predict(model, x, task)

    def describe(self, model: nn.Module, batch: Batch | None = None) -> dict[str, str]:
        """Facts of all methods; if two have the same topic, both sentences."""
        facts: dict[str, str] = {}
        for m in self.methods:
            for topic, sentence in m.describe(model, batch).items():
                facts[topic] = f"{facts[topic]}; {sentence}" if topic in facts else sentence
        return facts

    def detach(self, model: nn.Module) -> None:
        """Detach each method, in reverse order."""
        for m in reversed(self.methods):
            m.detach(model)

    def parameters(self) -> Iterable[nn.Parameter]:
        """Trainable tensors of all methods."""
        return [p for m in self.methods for p in m.parameters()]

    def extra_parameters(self, model: nn.Module) -> int:
        """Number of parameters that all methods add for prediction."""
        return sum(m.extra_parameters(model) for m in self.methods)

    def diagnostics(self) -> dict[str, float]:
        """Diagnostics of all methods; if two share a name, the later method's value."""
        return {name: value for m in self.methods for name, value in m.diagnostics().items()}

    def state_dict(self) -> dict[str, Any]:
        """State of each method, by its index in the chain."""
        return {str(i): m.state_dict() for i, m in enumerate(self.methods)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a chain of the same methods."""
        if not all(name.isdigit() for name in state):
            raise ValueError("This state is of a single method, not of a chain.")
        if len(state) != len(self.methods):
            raise ValueError(f"This state is of a chain of {len(state)} methods, this chain has {len(self.methods)}.")
        for i, m in enumerate(self.methods):
            m.load_state_dict(state[str(i)])


def methods_of(method: Method) -> list[Method]:
    """List the methods of a chain; a single method is a list of one."""
    if isinstance(method, Chain):
        return method.methods
    return [method]


def label(method: Method) -> str:
    """Short name for tables: the class and the hyper-parameters that differ from their defaults, without its seed.

    >>> from everlearn import L2
    >>> label(Method()), label(L2()), label(L2(strength=3.0) + Method())
    ('finetune', 'L2', 'L2(strength=3.0) + finetune')
    """
    if isinstance(method, Chain):
        return " + ".join(map(label, method.methods))

    name = type(method).__name__
    if type(method) is Method:
        name = "finetune"

    changed = []
    for f in fields(method):
        value = getattr(method, f.name)
        # Runs with several seeds are one method.
        if value != f.default and f.name != "seed":
            changed.append(f"{f.name}={value!r}")
    if not changed:
        return name
    return f"{name}({', '.join(changed)})"
