"""Plot the trade-off of a study between scores on old and new tasks."""

from __future__ import annotations

import io
from typing import Any

from everlearn.runtime.optional_imports import import_optional
from everlearn.tuning.trials import Trial
from everlearn.tuning.tune import Tuned

LINE_STYLES = {"average": "o-", "old tasks": "s--", "new tasks": "^:"}


def png(tuned: Tuned) -> bytes:
    """Plot scores against each tuned field, and old against new tasks; returns a PNG file."""
    trials = [trial for trial in tuned.trials if trial.score is not None]
    num_panels = len(tuned.dimensions) + 1
    figure_class = import_optional("matplotlib.figure", "plot", "A plot").Figure
    figure = figure_class((5 * num_panels, 4), dpi=120, layout="constrained")
    axes = figure.subplots(1, num_panels, squeeze=False)[0]

    for axis, dimension in zip(axes, tuned.dimensions, strict=False):
        name = dimension.name
        ordered_trials = sorted(trials, key=lambda trial: trial.values[name])
        values = [trial.values[name] for trial in ordered_trials]
        for score_name, style in LINE_STYLES.items():
            scores = [_scores(trial)[score_name] for trial in ordered_trials]
            axis.plot(values, scores, style, label=score_name, alpha=0.8)
        if not dimension.options and dimension.search.log and dimension.search.low > 0:
            axis.set_xscale("log")
        axis.axvline(tuned.best.values[name], color="grey", linewidth=1)
        axis.set(xlabel=name, ylabel="score on validation data")
    _add_legend(axes[0], ncols=3)

    _plot_old_against_new(axes[-1], tuned, trials)
    figure.suptitle(f"best: {tuned.best}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _scores(trial: Trial) -> dict[str, float | None]:
    return {"average": trial.score, "old tasks": trial.old, "new tasks": trial.new}


def _plot_old_against_new(axis: Any, tuned: Tuned, trials: list[Trial]) -> None:
    axis.scatter([trial.new for trial in trials], [trial.old for trial in trials], color="C0", label="trials")
    axis.scatter([tuned.best.new], [tuned.best.old], color="C3", marker="*", s=150, label="best average")
    axis.set(xlabel="score on new tasks, right after training", ylabel="score on old tasks, after the last task")
    axis.margins(0.1)
    _add_legend(axis, ncols=2)


def _add_legend(axis: Any, ncols: int) -> None:
    # Above the axes, where it hides no point.
    axis.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=ncols, frameon=False)
