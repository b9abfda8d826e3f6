"""Properties of a method by which it is chosen: requirements, guarantees and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from everlearn.core.hyperparameters import check_field
from everlearn.core.scenario import Scenario

# A family is a folder of everlearn.methods. Tables list them in this order, without those that have no method yet.
Family = Literal[
    "baselines",
    "regularization",
    "replay",
    "isolation",
    "expansion",
    "heads",
    "projection",
    "plasticity",
    "adaptation",
    "merging",
]
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of a method by which it is chosen; a class variable of the method's class.

    ``tests/core/test_traits.py`` measures those that can be measured. A method without traits works like any other.

    Args:
        family: family of the method, which is its folder in ``everlearn.methods``.
        pro: main advantage, in one sentence.
        con: main disadvantage, in one sentence.
        needs_task: whether it needs the task of an example at test time; otherwise it infers the task.
        zero_forgetting: whether outputs for old tasks stay bitwise equal if the task is known.
        keeps_examples: whether examples are part of its state.
        grows: whether the model used for prediction grows with the tasks, output layers aside.
        needs_labels: whether consolidating a task requires training on its labels; otherwise a trained model and
            inputs are sufficient.
        without_boundaries: fields to set for streams without task boundaries; None if boundaries are required.
        needs_pretrained: why it needs a model that was pretrained on similar data; empty if it does not.
        copies: stored state except examples, in copies of the model: a₀ + a₁N + a₂N² after N tasks; None if it is not
            measured.
        copies_scale: whether the state is larger for a larger model. Otherwise ``copies`` holds for 784-400-400-10
            only, as for statistics, whose size depends on the numbers of features and classes.
        step: time of a training step relative to fine-tuning, in the third task (``python benchmarks/overhead.py
            methods``); 0 if it takes no training steps, None if it is not measured.
        step_growth: increase of ``step`` with each further task.
        weak: scenarios in which no published table shows it closing a quarter of the gap between fine-tuning and
            joint training, with the reason.

    >>> Traits(family="isolation", pro="", con="", step=1.1, copies=(0.25, 0.01)).memory
    '0.25 + 0.01 N'
    """

    family: Family
    pro: str
    con: str
    step: float | None = None
    step_growth: float = 0.0
    copies: tuple[float, ...] | None = None
    copies_scale: bool = True
    needs_task: bool = False
    zero_forgetting: bool = False
    keeps_examples: bool = False
    grows: bool = False
    needs_labels: bool = True
    needs_pretrained: str = ""
    without_boundaries: Mapping[str, Any] | None = None
    weak: Mapping[Scenario, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_field("Traits.family", self.family, Family)

    @property
    def memory(self) -> str:
        """Stored copies of the model as a formula in N, the number of tasks."""
        if self.copies is None:
            return "not measured"
        terms = [(a, power) for a, power in zip(self.copies, ("", " N", " N²"), strict=False) if a]

        # Negative terms come last, so that the formula does not begin with a minus.
        formula = ""
        for a, power in sorted(terms, key=lambda term: term[0] < 0):
            if a < 0:
                formula += " - "
            elif formula:
                formula += " + "

            if power and abs(a) == 1:
                formula += power.strip()
            else:
                formula += f"{abs(a):g}{power}"
        return formula or "0"

    def copies_after(self, tasks: int) -> float | None:
        """Number of copies of the model that are stored after this many tasks; None if it is not measured."""
        if self.copies is None:
            return None
        # Horner's rule.
        total = 0.0
        for a in reversed(self.copies):
            total = total * tasks + a
        return max(0.0, total)

    def step_of(self, tasks: int) -> float | None:
        """Extrapolate the relative time of a training step linearly to the last of this many tasks.

        >>> Traits(family="expansion", pro="", con="", step=4.0, step_growth=2.0).step_of(tasks=5)
        8.0
        """
        if self.step is None or not self.step_growth:
            return self.step
        return max(1.0, self.step + self.step_growth * (tasks - 3))


def traits_of(kind: type) -> Traits | None:
    """Traits that a class defines itself; inherited ones need not hold for it."""
    traits = vars(kind).get("traits")
    if isinstance(traits, Traits):
        return traits
    return None
