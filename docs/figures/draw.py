"""Draw the figures of the documentation: python docs/figures/draw.py [FOLDER]."""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import nn

from everlearn import Gaussian, Method, nets, streams, train
from everlearn.curvature import fisher, histogram
from everlearn.optim import NaturalGradient


def weight_path(make_optimizer, x, y, steps=25):
    """Return the weights at every step of an optimizer on least squares."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make_optimizer(model)
    weights = []
    for _ in range(steps):
        weights.append(model.weight.detach().flatten().clone())
        optimizer.zero_grad()
        Gaussian().loss(model(x), y).backward()
        optimizer.step()
    return torch.stack(weights)


def draw_contours(axis, x, y, reach=2.5):
    """Draw the loss of least squares around its minimum."""
    best = torch.linalg.lstsq(x, y).solution.flatten()
    grid = torch.linspace(-reach, reach, 80)
    points = torch.cartesian_prod(grid, grid) + best
    loss = ((x @ points.t() - y) ** 2).mean(0).view(80, 80).t()
    axis.contour(
        (grid + best[0]).numpy(), (grid + best[1]).numpy(), loss.log().numpy(), 12, colors="0.8", linewidths=0.7
    )
    a, b = best.tolist()
    axis.plot(a, b, "k+", markersize=9)
    axis.set_xlim(a - reach, a + reach)
    axis.set_ylim(b - reach, b + reach)


def regression():
    """Draw gradient and natural gradient descent at two learning rates."""
    torch.manual_seed(0)
    x = torch.randn(200, 2) * torch.tensor([2.5, 0.2])
    y = x @ torch.tensor([[1.0], [-1.0]]) + 0.05 * torch.randn(200, 1)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    best = torch.linalg.lstsq(x, y).solution.flatten()
    for axis, lr in zip(figure.subplots(1, 2, sharey=True), (0.15, 0.5), strict=True):
        makers = {
            "gradient": lambda m, lr=lr: torch.optim.SGD(m.parameters(), lr=lr),
            "natural gradient": lambda m, lr=lr: NaturalGradient(m, lr, "full", damping=0.0, likelihood=Gaussian()),
        }
        for (name, make_optimizer), marker in zip(makers.items(), ("o--", "s-"), strict=True):
            distance = (weight_path(make_optimizer, x, y) - best).norm(dim=1)
            axis.semilogy(distance.numpy(), marker, markersize=3, label=name)
        axis.set_title(f"learning rate {lr}")
        axis.set_xlabel("step")
        axis.set_ylim(1e-6, 1e6)
    figure.axes[0].set_ylabel("distance from the solution")
    figure.axes[0].legend()
    return figure


def empirical():
    """Draw gradient, natural gradient and empirical Fisher directions on least squares (Kunstner et al., 2019)."""
    torch.manual_seed(1)
    # Log-normal inputs and a constant, as in the paper.
    x = torch.stack([(0.75 * torch.randn(1000)).exp(), torch.ones(1000)], 1)
    y = x @ torch.tensor([[2.0], [2.0]]) + torch.randn(1000, 1)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    best = torch.linalg.lstsq(x, y).solution.flatten()
    grid = torch.cartesian_prod(torch.linspace(-2.2, 2.2, 9), torch.linspace(-2.2, 2.2, 9)) + best
    titles = {"gradient": None, "Fisher: natural gradient": "exact", "empirical Fisher": "true"}
    for axis, (title, labels) in zip(figure.subplots(1, 3, sharey=True), titles.items(), strict=True):
        draw_contours(axis, x, y)
        arrows = []
        for w in grid:
            model = nn.Linear(2, 1, bias=False)
            model.weight.data = w[None].clone()
            Gaussian().loss(model(x), y).backward()
            g = {"weight": model.weight.grad}
            if labels is not None:
                data = (x, y) if labels == "true" else x
                g = fisher(model, data, labels, "full", likelihood=Gaussian()).solve(g, 1e-8)
            arrows.append(-g["weight"].flatten() / g["weight"].norm())
        axis.quiver(*grid.t().numpy(), *torch.stack(arrows).t().numpy(), color="#3b6ea5", scale=16, width=0.006)
        axis.set_title(title)
    return figure


def importances():
    """Draw the Fisher information of a trained network per layer: few parameters matter."""
    torch.manual_seed(0)
    task = streams.digits("class").joint()[0]
    model = nets.mlp(64, 10, hidden=(100, 100))
    train(model, Method(), task, epochs=10, batch_size=32)
    return histogram(fisher(model, task))


def many_tasks():
    """Draw the step time and the stored bytes over two hundred tasks, from ``benchmarks/many_tasks.py``."""
    rows_by_method = defaultdict(list)
    with (Path(__file__).parent / "many_tasks.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            megabytes = float(row["state bytes"]) / 1e6
            rows_by_method[row["method"]].append((int(row["task"]), float(row["step ms"]), megabytes))
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    step_axis, state_axis = figure.subplots(1, 2)
    for i, (name, rows) in enumerate(rows_by_method.items()):
        style = {"label": name, "color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10], "linewidth": 1.3}
        parts = [rows[k : k + 10] for k in range(0, len(rows), 10)]
        last_tasks = [part[-1][0] for part in parts]
        median_steps = [median(step for _, step, _ in part) for part in parts]
        step_axis.semilogy(last_tasks, median_steps, **style)
        # A logarithmic axis has no zero.
        state_axis.semilogy([task for task, _, _ in rows], [size or None for _, _, size in rows], **style)
    step_axis.set_ylabel("milliseconds of a step")
    state_axis.set_ylabel("MB kept by the method")
    for axis in (step_axis, state_axis):
        axis.set_xlabel("tasks")
    figure.legend(*step_axis.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure


def main(folder):
    """Write all figures."""
    for draw in (regression, empirical, importances, many_tasks):
        draw().savefig(Path(folder) / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
