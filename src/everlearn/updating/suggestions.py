"""Suggest what to try after an update was refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, get_args, get_origin, get_type_hints

from everlearn.core.chain import methods_of
from everlearn.core.hyperparameters import Search
from everlearn.core.method import Method
from everlearn.methods import METHODS
from everlearn.methods.heads.base import FrozenHead
from everlearn.methods.regularization.base import QuadraticPenalty
from everlearn.methods.regularization.lwf import LwF
from everlearn.methods.replay.base import Replay

NEW_FOLDER = ", which needs a new folder: --state NEW --accept-weights, with examples of old skills, --old"
LARGER_REPLAY_BATCH = 128


def suggest(method: Method, *, is_first: bool, has_new_classes: bool, is_certain: bool) -> list[str]:
    """List ways to lose less of the old skills, the most promising first.

    Args:
        method: the method after the update.
        is_first: whether nothing is stored yet, so that the kind of method and the size of a memory can still change.
        has_new_classes: whether the update has classes that the model had no output for.
        is_certain: whether the old examples are enough to tell that too much was lost.

    >>> from everlearn import EWC
    >>> suggest(EWC(30.0), is_first=True, has_new_classes=False, is_certain=True)[0]
    'More protection: --set ewc.strength=300.'
    """
    # A stored state has one kind of method and one size of memory: others are refused in its folder.
    condition = "" if is_first else NEW_FOLDER

    if isinstance(method, FrozenHead):
        return _suggest_head(method, is_first, is_certain)

    suggestions = []
    has_replay = any(isinstance(m, Replay) for m in methods_of(method))
    if has_new_classes and not has_replay:
        suggestions.append(
            "Replay: with new classes only stored examples preserve the old ones: --method er-ace, derpp or "
            f"er{condition}. If the model is pretrained, ranpac stores no examples{condition}."
        )
    elif type(method) is Method:
        suggestions.append(
            "A method that protects old skills: --method er-ace, derpp or er if examples may be stored, else mas or "
            f"ewc{condition}."
        )

    for m in methods_of(method):
        name = next((name for name, method_class in METHODS.items() if method_class is type(m)), type(m).__name__)
        if isinstance(m, Replay):
            suggestions += _suggest_replay(m, name, is_first, condition)
        elif "strength" in _tunable_fields(m):
            # A quadratic penalty keeps the strength of tasks that have ended, so only a new state can raise it.
            strength_condition = condition if isinstance(m, QuadraticPenalty) else ""
            strength = _current_strength(m)
            if strength is not None:
                suggestions.append(f"More protection: --set {name}.strength={10 * strength:g}{strength_condition}.")

    suggestions.append(
        "Old and new rows together: add the old rows that you have to --data; held-out examples are excluded from them."
    )
    suggestions.append("Smaller changes: fewer --epochs, or a smaller --lr.")
    return suggestions + _suggest_tolerance(is_certain)


def _current_strength(method: Method) -> float | None:
    """Return the strength of a method, as measured if it is "auto"; None before it is measured."""
    strength = getattr(method, "strength")  # noqa: B009 - not a field of every method
    if strength != "auto":
        return float(strength)
    if isinstance(method, LwF):
        return method.temperature**2
    measured: float | None = getattr(method, "scale", None)
    return measured


def _suggest_head(method: FrozenHead, is_first: bool, is_certain: bool) -> list[str]:
    """Suggest what raises the accuracy of a head on frozen features, which no learning rate changes."""
    suggestions = []
    if is_first:
        suggestions.append("More old rows, --old: the head knows only the rows that it is given.")
    dimension = getattr(method, "dimension", 0)
    name = next((name for name, method_class in METHODS.items() if method_class is type(method)), type(method).__name__)
    condition = "" if is_first else NEW_FOLDER
    if dimension:
        suggestions.append(f"More random features: --set {name}.dimension={2 * dimension}{condition}.")
    elif name != "ranpac":
        suggestions.append(f"A head with random features: --method ranpac{condition}.")
    suggestions.append(
        f"Replay, which trains the features too, if examples may be stored: --method er-ace, derpp or er{condition}."
    )
    return suggestions + _suggest_tolerance(is_certain)


def _suggest_tolerance(is_certain: bool) -> list[str]:
    suggestions = []
    if not is_certain:
        suggestions.append(
            "More old examples to measure on (--old, --keep): with these it is not certain that too much was lost."
        )
    suggestions.append("A larger --tolerance, if you can accept the loss above.")
    return suggestions


def _suggest_replay(method: Replay, name: str, is_first: bool, condition: str) -> list[str]:
    """Suggest larger replay batches, and a larger memory if this one is full."""
    is_full = len(method.memory) >= method.memory.capacity
    suggestions = []
    if not is_first or not is_full:
        suggestions.append(f"More replay per step: --set {name}.size={LARGER_REPLAY_BATCH}.")
    if is_full:
        capacity = 4 * method.capacity
        suggestions.append(f"A larger memory: --set {name}.capacity={capacity} stores {capacity} examples{condition}.")
    return suggestions


def _tunable_fields(method: Method) -> list[str]:
    """List the fields that are annotated with a search range."""
    hints = get_type_hints(type(method), include_extras=True)
    annotations = {f.name: hints[f.name] for f in fields(method)}
    return [
        name
        for name, hint in annotations.items()
        if get_origin(hint) is Annotated and any(isinstance(extra, Search) for extra in get_args(hint)[1:])
    ]
