"""Compare the label options of the Fisher information on a trained model: accuracy and cost."""

import torch

from everlearn import Method, nets, streams, train
from everlearn.curvature import fisher

torch.manual_seed(0)
task = streams.digits("class").joint()[0]
model = nets.mlp(64, 10, hidden=(100,))
train(model, Method(), task, epochs=20, batch_size=32)

exact = fisher(model, task, labels="exact")
squared_norm = sum(v.square().sum() for v in exact.values.values())
print(f"exact: trace {exact.trace():.3g}, 9 backward passes")

for labels in ("signs", "sample", "true", "predicted"):
    estimate = fisher(model, task, labels=labels)
    squared_error = sum((estimate.values[name] - v).square().sum() for name, v in exact.values.items())
    relative_error = (squared_error / squared_norm).sqrt().item()
    print(f"{labels}: trace {estimate.trace():.3g}, relative error {relative_error:.2g}, 1 backward pass")
