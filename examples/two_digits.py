"""Several labels at once: two digits on top of each other, a Bernoulli likelihood, and images that come turned."""

import torch
import torch.nn.functional as F

import everlearn
from everlearn import ER, EWC, Bernoulli, Method, nets, streams
from everlearn.core.chain import label


def pairs(data, turns, seed):
    """Every image over another one, both turned; ten labels say which digits are there."""
    x, y = data
    other = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    both = torch.maximum(x, x[other]).rot90(turns, (2, 3))
    return both, F.one_hot(y, 10) | F.one_hot(y[other], 10)


train, test = streams.digits_data()
tasks = [(pairs(train, turns, seed=turns), pairs(test, turns, seed=10 + turns)) for turns in range(3)]
stream = streams.from_tasks(tasks, scenario="domain", likelihood=Bernoulli(), name="two digits")
for method in (Method(), EWC(100.0), ER(300)):
    result = everlearn.run(lambda: nets.mlp((1, 8, 8), 10, hidden=(100,)), method, stream, epochs=6, batch_size=32)
    right = " ".join(f"{100 * share:.1f}" for share in result.accuracy[-1])
    print(f"{label(method)}: right labels at last, upright, on their side, on their head: {right} %")
