"""What a method needs, what it gives and what it costs: facts that stand beside each method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from everlearn.stream import Scenario

Family = Literal["reference", "regularisation", "replay", "isolation", "growth"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts by which a method is chosen; a class variable of the method's class.

    ``tests/test_traits.py`` measures what can be measured of them. A method without traits works as any other.

    Args:
        family: which of the four it belongs to, or a reference point of comparisons.
        pro: what speaks for it, in one sentence.
        con: what speaks against it.
        needs_task: it must be told the task of an example at test, and guesses it otherwise.
        zero_forgetting: where the task is known, its old answers stay the same bit for bit.
        keeps_examples: rows of the data are part of its state.
        grows: what answers becomes larger with the tasks, output layers aside.
        needs_labels: to remember a task it must be trained on its labels; without, a trained model and inputs will do.
        without_boundaries: fields to set so that nobody needs to tell where a task ends; None where it must be told.
        copies: what it keeps but for examples, in copies of the model: a₀ + a₁N + a₂N² after N tasks.
        step: a training step in plain ones, with two tasks behind it (``python benchmarks/overhead.py methods``).
        step_growth: by how much that rises with every further task.
        weak: scenarios in which no table shows it to close a quarter of the gap between fine-tuning and joint training, and why.

    >>> Traits(family="isolation", pro="", con="", step=1.1, copies=(0.25, 0.01)).memory
    '0.25 + 0.01 N'
    """

    family: Family
    pro: str
    con: str
    step: float
    step_growth: float = 0.0
    copies: tuple[float, ...] = (0.0,)
    needs_task: bool = False
    zero_forgetting: bool = False
    keeps_examples: bool = False
    grows: bool = False
    needs_labels: bool = True
    without_boundaries: Mapping[str, Any] | None = None
    weak: Mapping[Scenario, str] = field(default_factory=dict)

    @property
    def memory(self) -> str:
        """Its copies of the model as a formula in N, the number of tasks."""
        terms = [(a, power) for a, power in zip(self.copies, ("", " N", " N²"), strict=False) if a]
        text = ""
        for a, power in sorted(terms, key=lambda term: term[0] < 0):  # a formula does not begin with a minus
            amount = power.strip() if power and abs(a) == 1 else f"{abs(a):g}{power}"
            text += (" - " if a < 0 else " + " if text else "") + amount
        return text or "0"

    def copies_after(self, tasks: int) -> float:
        """Copies of the model that it keeps after so many tasks."""
        total = 0.0
        for a in reversed(self.copies):
            total = total * tasks + a
        return max(0.0, total)

    def step_of(self, tasks: int) -> float:
        """A step of the last of so many tasks, in plain ones; a straight line through what was measured.

        >>> Traits(family="growth", pro="", con="", step=4.0, step_growth=2.0).step_of(tasks=5)
        8.0
        """
        return max(1.0, self.step + self.step_growth * (tasks - 3)) if self.step_growth else self.step


def traits_of(kind: type) -> Traits | None:
    """Those a class states of itself; those of its ancestors need not be true of it."""
    found = vars(kind).get("traits")
    return found if isinstance(found, Traits) else None
