"""Which labels for the Fisher information? On a trained model the estimators are far apart, at very different cost."""

import torch

from everlearn import Method, nets, streams, train
from everlearn.curvature import fisher

torch.manual_seed(0)
task = streams.digits("class").joint()[0]
model = nets.mlp(64, 10, hidden=(100,))
train(model, Method(), task, epochs=20, batch_size=32)

exact = fisher(model, task, labels="exact")
norm = sum(v.square().sum() for v in exact.values.values())
print(f"exact: trace {exact.trace():.3g}, 9 backward passes")
for labels in ("signs", "sample", "true", "predicted"):
    found = fisher(model, task, labels=labels)
    apart = sum((found.values[n] - v).square().sum() for n, v in exact.values.items())
    error = (apart / norm).sqrt().item()
    print(f"{labels}: trace {found.trace():.3g}, relative error {error:.2g}, 1 backward pass")
