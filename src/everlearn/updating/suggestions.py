"""What to try after an update was refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, get_args, get_origin, get_type_hints

from everlearn.fields import Search
from everlearn.method import Method, parts
from everlearn.methods import METHODS
from everlearn.penalty import QuadraticPenalty
from everlearn.replay import Replay


def suggest(method: Method, *, is_first: bool, has_new_classes: bool, is_certain: bool) -> list[str]:
    """Ways to lose less of the old skills, the most promising first.

    Args:
        method: what protected them, as it is after the update.
        is_first: whether nothing is stored yet, so that the kind of method and the size of a memory can still be chosen.
        has_new_classes: whether the update brings classes that the model had no output for.
        is_certain: whether the old examples are enough to tell that too much was lost.

    >>> from everlearn import EWC
    >>> suggest(EWC(30.0), is_first=True, has_new_classes=False, is_certain=True)[0]
    'More protection: --set ewc.strength=300.'
    """
    found = []
    # A stored state is of one kind of method, with a memory of one size: another is refused in its folder.
    anew = (
        ""
        if is_first
        else ", which needs a new folder: --state NEW --accept-weights, with examples of old skills, --old"
    )
    replays = any(isinstance(m, Replay) for m in parts(method))
    if has_new_classes and not replays:
        found.append(
            f"Replay: beside new classes only remembered examples keep the old ones: --method er-ace, derpp or er{anew}."
        )
    elif type(method) is Method:
        found.append(
            "A method that protects old skills: --method er-ace, derpp or er where examples may be kept, else mas or "
            f"ewc{anew}."
        )
    for m in parts(method):
        name = next((name for name, kind in METHODS.items() if kind is type(m)), type(m).__name__)
        if isinstance(m, Replay):
            is_full = len(m.memory) >= m.memory.capacity
            larger = f"A larger memory: --set {name}.capacity={4 * m.capacity} keeps {4 * m.capacity} examples{anew}."
            more = f"More replay per step: --set {name}.size=128."
            if not is_first or not is_full:
                found.append(more)
            if is_full:
                found.append(larger)
        else:
            strengths = [field for field in _searched_fields(m) if field == "strength"]
            # Tasks that have ended keep the strength of their importances.
            where = anew if isinstance(m, QuadraticPenalty) else ""
            found += [
                f"More protection: --set {name}.{field}={10 * getattr(m, field):g}{where}." for field in strengths
            ]
    found.append(
        "Old and new rows together: put the old rows that you have into --data too; exams are left out of them."
    )
    found.append("Smaller changes: fewer --epochs, or a smaller --lr.")
    if not is_certain:
        found.append("More old examples to measure on (--old, --keep): these cannot tell whether too much was lost.")
    found.append("A larger --tolerance, if the loss above is one that you can live with.")
    return found


def _searched_fields(method: Method) -> list[str]:
    """The fields that have a range of values to search beside them."""
    hints = get_type_hints(type(method), include_extras=True)
    annotations = {f.name: hints[f.name] for f in fields(method)}
    return [
        name
        for name, hint in annotations.items()
        if get_origin(hint) is Annotated and any(isinstance(extra, Search) for extra in get_args(hint)[1:])
    ]
