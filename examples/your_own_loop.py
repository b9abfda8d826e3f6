"""Protect old skills with three more lines in a plain PyTorch loop."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from everlearn import EWC, Method, streams
from everlearn.core.chain import label

(x, y), (x_test, y_test) = streams.digits_data()
parts = (y < 5, y >= 5)  # first the digits 0 to 4, then 5 to 9
loaders = [DataLoader(TensorDataset(x[part], y[part]), batch_size=32, shuffle=True) for part in parts]


def train_on_both(method):
    """Train a new model on the old digits and then on the new ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loader in loaders:
        for _ in range(10):
            for inputs, labels in loader:
                loss = F.cross_entropy(model(inputs), labels) + method.penalty(model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        method.end_task(model, loader)
    return model


is_old = y_test < 5
for method in (Method(), EWC()):
    model = train_on_both(method)
    old_loss = F.cross_entropy(model(x_test[is_old]), y_test[is_old]).item()
    print(f"{label(method)}: loss on the old digits after training on the new ones {old_loss:.2f}")
