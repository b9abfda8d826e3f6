"""Three lines in a plain PyTorch loop: don't lose the old skills."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from everlearn import EWC, streams

(x, y), (x_test, y_test) = streams.digits_data()
old, new = y < 5, y >= 5  # first the digits 0 to 4, later 5 to 9
loaders = [DataLoader(TensorDataset(x[part], y[part]), batch_size=32, shuffle=True) for part in (old, new)]


def learn(strength):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = EWC(strength, cap=10.0)  # no pull firmer than 1 / learning rate, which could overshoot
    for loader in loaders:
        for _ in range(10):
            for inputs, labels in loader:
                loss = F.cross_entropy(model(inputs), labels) + method.penalty(model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        method.end_task(model, loader)
    return model


for strength in (0.0, 30.0, 300.0):
    moved = learn(strength)(x_test).log_softmax(1)
    held = F.nll_loss(moved[y_test < 5], y_test[y_test < 5]).item()
    print(f"strength {strength}: loss on the old digits after learning the new ones {held:.2f}")
