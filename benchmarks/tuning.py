"""Tuning EWC's strength on Split MNIST, domain-incremental: what sharing the first task saves, and what is found.

    python benchmarks/tuning.py DATA [ITERATIONS]

Seconds are of the process's own time on one thread, so that other work on the machine counts little.
"""

import sys
import tempfile
import time
from functools import partial
from statistics import fmean, stdev

import torch

import everlearn
from everlearn import EWC, nets, streams
from everlearn.trainer import Training
from everlearn.tuning import tune

torch.set_num_threads(1)
root, iterations = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 500
stream = streams.split_mnist(root=root, scenario="domain", valid=0.1)
settings = {"iterations": iterations, "batch_size": 128}
learn = partial(everlearn.run, nets.mlp, stream=stream, split="valid", progress=False, **settings)
search = partial(tune, nets.mlp, EWC(), stream, trials=16, training=Training(**settings, progress=False))


def timed(work):
    """What it gives, and its seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


learn(method=EWC())  # imports and caches
with tempfile.TemporaryDirectory() as folder:
    shared, together = timed(lambda: search(prune=False, out=f"{folder}/all"))
    pruned, fewer = timed(lambda: search(out=f"{folder}/pruned"))
strengths = [trial.values["strength"] for trial in shared.trials]
alone, apart = timed(lambda: [learn(method=EWC(s)).average_accuracy for s in strengths])
assert alone == [trial.score for trial in shared.trials], "a trial is the run it stands for"
print(
    f"16 separate runs {apart:.0f} s, tuning {together:.0f} s = {together / apart:.2f}, "
    f"with pruning {fewer:.0f} s = {fewer / apart:.2f}"
)

quarters = [10 ** (k / 4) for k in range(41)]
grid = {s: learn(method=EWC(s)).average_accuracy for s in quarters}
top = max(grid, key=grid.__getitem__)
print(f"grid of {len(grid)} on validation data: best {100 * grid[top]:.1f} % at {top:.3g}")

# The best of 41 noisy results is too optimistic: the chosen values are compared on test data, in other class orders.
for name, strength in {
    "grid": top,
    "tuned": shared.best.values["strength"],
    "pruned": pruned.best.values["strength"],
}.items():
    found = []
    for seed in range(5):
        other = streams.split_mnist(root=root, scenario="domain", valid=0.1, seed=seed)
        run = everlearn.run(nets.mlp, EWC(strength), other, seed=seed, progress=False, **settings)
        found.append(100 * run.average_accuracy)
    print(f"{name}: {strength:.3g}, on test data {fmean(found):.1f} ± {stdev(found):.1f} % over 5 seeds")
