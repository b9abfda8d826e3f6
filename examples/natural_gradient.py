"""Ill-conditioned linear regression: gradient descent is slow or diverges, natural gradient descent does neither."""

import torch
from torch import nn

from everlearn import Gaussian
from everlearn.optim import NaturalGradient

torch.manual_seed(0)
x = torch.randn(200, 2) * torch.tensor([2.5, 0.2])  # one feature varies twelve times as much as the other
y = x @ torch.tensor([[1.0], [-1.0]]) + 0.05 * torch.randn(200, 1)
solution = torch.linalg.lstsq(x, y).solution.t()


def distance_after_training(make_optimizer, steps=30):
    """Train from zero weights, and return the distance from the least-squares solution."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = make_optimizer(model)
    for _ in range(steps):
        optimizer.zero_grad()
        Gaussian().loss(model(x), y).backward()
        optimizer.step()
    return (model.weight - solution).norm().item()


print("distance from the least-squares solution after 30 steps")
for lr in (0.15, 0.5):
    settings = {"lr": lr, "structure": "full", "damping": 0.0, "likelihood": Gaussian()}
    gradient = distance_after_training(lambda m, lr=lr: torch.optim.SGD(m.parameters(), lr=lr))
    natural = distance_after_training(lambda m, settings=settings: NaturalGradient(m, **settings))
    print(f"learning rate {lr}: gradient {gradient:.3g}, natural gradient {natural:.3g}")
