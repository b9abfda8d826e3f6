"""What our loop costs: a training step of Everlearn against a hand-written PyTorch loop doing the identical work.

    python benchmarks/overhead.py

Both see the same batches from the same first weights, and must end with the same weights, bit for bit. They run in
turns in one process on one thread, and the ratio is that of the smallest times, so that noise of the machine falls on
both alike. Targets: at most 1.05 at batch 128, 1.10 at batch 10.
"""

import argparse
import copy
import time

import torch
import torch.nn.functional as F

from everlearn import Method, Task, nets, train
from everlearn.seeds import generator


def by_hand(model, task, steps, batch_size):
    """The loop everybody writes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = task.train.x, task.train.y
    model.train()
    start = time.perf_counter()
    step = 0
    while step < steps:
        order = torch.randperm(len(x), generator=generator(0, "batches", task.id, 0, step * batch_size // len(x)))
        for i in order.split(batch_size)[: steps - step]:
            loss = F.cross_entropy(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    return time.perf_counter() - start


def by_everlearn(model, task, steps, batch_size):
    """The same through our trainer."""
    start = time.perf_counter()
    train(model, Method(), task, optimizer=sgd, iterations=steps, batch_size=batch_size, progress=False)
    return time.perf_counter() - start


def sgd(parameters):
    """The optimizer of both."""
    return torch.optim.SGD(parameters, lr=0.01)


def compare(hidden, batch_size, steps, rounds):
    """Interleaved times of both, after checking that they do the same."""
    torch.manual_seed(0)
    task = Task((torch.randn(12_800, 784), torch.randint(10, (12_800,))), id=0)
    first = nets.mlp(784, 10, hidden)
    times = {"hand": [], "everlearn": []}
    for turn in range(rounds + 1):
        ends = []
        for name, loop in (("hand", by_hand), ("everlearn", by_everlearn)):
            model = copy.deepcopy(first)
            spent = loop(model, task, steps, batch_size)
            ends.append(model)
            if turn:  # the first turn warms up
                times[name].append(spent)
        same = all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in ends), strict=True))
        if not same:
            raise SystemExit("The two loops end with different weights: they do not do the same work.")
    return min(times["hand"]) / steps, min(times["everlearn"]) / steps


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'net':>16} {'batch':>6} {'by hand':>10} {'everlearn':>10} {'ratio':>7}")
    for hidden in ((100, 100), (400, 400)):
        for batch_size in (128, 10):
            hand, ours = compare(hidden, batch_size, args.steps, args.rounds)
            net = f"784-{'-'.join(map(str, hidden))}-10"
            print(f"{net:>16} {batch_size:>6} {hand * 1e6:>7.0f} µs {ours * 1e6:>7.0f} µs {ours / hand:>7.3f}")


if __name__ == "__main__":
    main()
