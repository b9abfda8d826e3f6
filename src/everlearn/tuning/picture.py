"""The trade-off of a study: what a value keeps of old tasks and what it learns of new ones."""

from __future__ import annotations

import io
from typing import Any

from everlearn.extras import needs
from everlearn.tuning.study import Tuned
from everlearn.tuning.trials import Trial

LINES = {"average": "o-", "old tasks": "s--", "new tasks": "^:"}


def png(found: Tuned) -> bytes:
    """A panel for every field, and one of old against new tasks."""
    whole = [t for t in found.trials if t.score is not None]
    count = len(found.at) + 1
    figure = needs("matplotlib.figure", "plot", "A picture").Figure((5 * count, 4), dpi=120, layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis, d in zip(axes, found.at, strict=False):
        ordered = sorted(whole, key=lambda t: t.values[d.name])  # numbers with numbers, words with words
        for name, style in LINES.items():
            axis.plot(
                [t.values[d.name] for t in ordered], [_scores(t)[name] for t in ordered], style, label=name, alpha=0.8
            )
        if not d.words and d.search.log and d.search.low > 0:
            axis.set_xscale("log")
        axis.axvline(found.best.values[d.name], color="grey", linewidth=1)
        axis.set(xlabel=d.name, ylabel="score on validation data")
    axes[0].legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    _old_and_new(axes[-1], found, whole)
    figure.suptitle(f"best: {found.best}")
    figure.savefig(file := io.BytesIO(), format="png")
    return file.getvalue()


def _scores(trial: Trial) -> dict[str, float | None]:
    return {"average": trial.score, "old tasks": trial.old, "new tasks": trial.new}


def _old_and_new(axis: Any, found: Tuned, whole: list[Trial]) -> None:
    axis.scatter([t.new for t in whole], [t.old for t in whole], color="C0", label="trials")
    axis.scatter([found.best.new], [found.best.old], color="C3", marker="*", s=150, label="best average")
    axis.set(xlabel="score on new tasks, just learned", ylabel="score on old tasks, at the end")
    axis.margins(0.1)
    axis.legend(
        fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False
    )  # above: the best may be anywhere
