"""Plots of importances; matplotlib is imported when a plot is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from everlearn.runtime.optional_imports import import_optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def histogram(importance: Any, bins: int = 60) -> Figure:
    """Plot the distribution of importances on a logarithmic axis, a row per parameter tensor.

    Zeros cannot be on a logarithmic axis. Their fraction is written in the row, with the fraction of the total
    importance that the most important 1 % of the entries have.

    Args:
        importance: a quadratic form (``Diagonal``, ``Kronecker``, ``Full``).
        bins: of the histogram.
    """
    values_by_name = {name: v.detach().flatten().double().cpu() for name, v in importance.diagonal().items()}
    positive_values = [values[values > 0] for values in values_by_name.values() if (values > 0).any()]
    if not positive_values:
        raise ValueError("All importances are zero: there is nothing to show.")
    smallest = min(float(values.min()) for values in positive_values)
    largest = max(float(values.max()) for values in positive_values)
    edges = torch.logspace(torch.tensor(smallest).log10().item(), torch.tensor(largest).log10().item() + 1e-6, bins + 1)

    num_rows = len(values_by_name)
    figure: Figure = import_optional("matplotlib.figure", "plot", "A picture").Figure(
        figsize=(7, 0.6 + 0.55 * num_rows), layout="constrained"
    )
    axes = figure.subplots(num_rows, 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, values) in zip(axes, values_by_name.items(), strict=True):
        axis.hist(values[values > 0].numpy(), bins=edges.tolist(), color="#3b6ea5")
        axis.set_xscale("log")
        axis.set_yticks([])
        axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)

        largest_values = values.sort(descending=True).values[: max(1, len(values) // 100)]
        top_fraction = float(largest_values.sum() / values.sum().clamp(min=1e-300))
        zero_fraction = float((values == 0).double().mean())
        note = f"top 1 %: {100 * top_fraction:.0f} % of the sum\nzero: {100 * zero_fraction:.0f} %"
        axis.text(0.01, 0.9, note, transform=axis.transAxes, va="top", fontsize=7)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("importance")
    return figure
