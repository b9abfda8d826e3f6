"""Pictures of importances; matplotlib is loaded when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from everlearn.extras import needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def histogram(importance: Any, bins: int = 60) -> Figure:
    """How importances are distributed, on a logarithmic axis, a row per parameter tensor: few parameters matter.

    Zeros have no place on a logarithmic axis; their share is written beside the row, with the share of all importance
    that the most important per cent of the tensor holds.

    Args:
        importance: a quadratic form (``Diagonal``, ``Kronecker``, ``Full``).
        bins: of the histogram.
    """
    values = {n: v.detach().flatten().double().cpu() for n, v in importance.diagonal().items()}
    seen = [v[v > 0] for v in values.values() if (v > 0).any()]
    if not seen:
        raise ValueError("All importances are zero: there is nothing to show.")
    low, high = min(float(v.min()) for v in seen), max(float(v.max()) for v in seen)
    edges = torch.logspace(torch.tensor(low).log10().item(), torch.tensor(high).log10().item() + 1e-6, bins + 1)
    figure: Figure = needs("matplotlib.figure", "plot", "A picture").Figure(
        figsize=(7, 0.6 + 0.55 * len(values)), layout="constrained"
    )
    axes = figure.subplots(len(values), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, v) in zip(axes, values.items(), strict=True):
        axis.hist(v[v > 0].numpy(), bins=edges.tolist(), color="#3b6ea5")
        top = v.sort(descending=True).values[: max(1, len(v) // 100)].sum() / v.sum().clamp(min=1e-300)
        axis.set_xscale("log")
        axis.set_yticks([])
        axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        note = f"top 1 %: {100 * float(top):.0f} % of the sum\nzero: {100 * float((v == 0).double().mean()):.0f} %"
        axis.text(0.01, 0.9, note, transform=axis.transAxes, va="top", fontsize=7)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("importance")
    return figure
