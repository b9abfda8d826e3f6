"""What our loop and our methods cost: a training step of Everlearn as a multiple of a plain one.

    python benchmarks/overhead.py [loop methods replay]

``loop``: our trainer against a hand-written PyTorch loop doing the identical work. Both see the same batches from the
same first weights, and must end with the same weights, bit for bit. Targets: at most 1.05 at batch 128, 1.10 at batch
10.

``methods``: a step of every method with two tasks behind it against a step of fine-tuning, both as our trainer does
them, on 784-400-400-10 at batch 128 with plain SGD. Targets: EWC (also with 20 anchors) and MAS at most 1.15, SI
1.25, PackNet and HAT 1.3. Those whose steps become dearer with the tasks have none, and are measured with four behind
them, too. The ratios are the ``step`` and ``step_growth`` of the methods' ``traits``.

``replay``: ER and A-GEM through our trainer against hand-written loops doing the same work: one loss over 128 new and
128 remembered examples with a vectorised reservoir; two backward passes without any projection; and a stream of 10
examples a chunk, seen once, with 10 remembered. Targets: at most 1.15, 1.15 and 1.3.

All run in turns in one process on one thread, and a ratio is that of the smallest times, so that noise of the machine
falls on all alike.
"""

import argparse
import copy
import time

import torch
import torch.nn.functional as F

from everlearn import AGEM, ER, EWC, L2, MAS, METHODS, SI, LwF, Method, Task, nets, streams, train
from everlearn.runtime.randomness import generator


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


PHASED = ("den", "expandnet")
# Labels are random here, which firm penalties do not survive.
GENTLE = {"l2": L2(1e-6), "ewc": EWC(1e-3), "si": SI(1e-4), "mas": MAS(1e-4), "lwf": LwF(1e-3)}


def measured():
    """What is compared: a name, a method, and how many tasks it has behind it."""
    for name, kind in METHODS.items():
        yield name, GENTLE.get(name) or kind(), 2
    yield "ewc, separate, 20 tasks", EWC(1e-3), 20
    yield "ewc, online", EWC(1e-3, mode="online"), 2
    yield "ewc, Kronecker", EWC(1e-3, mode="online", structure="kronecker"), 2
    for name in ("gem", "pnn", "expandable", "expandnet"):
        yield f"{name}, 4 tasks", METHODS[name](), 4


def compare_methods(rounds):
    """Steps of every method in turns, each time from where the tasks before have left it."""
    torch.manual_seed(0)
    x, y = torch.randn(3200, 784), torch.randint(10, (3200,))
    first, ready = nets.mlp(784, 10), {}
    for name, method, behind in measured():
        model = copy.deepcopy(first)
        for k in range(behind):
            train(model, method, Task((x[:256], y[:256]), id=k), optimizer=sgd, progress=False)
        task = Task((x, y), id=behind)
        if name.split(",")[0] in PHASED:
            task.steps = 100
        ready[name] = model, method, task
    times = {name: [] for name in ready}
    for turn in range(8 * rounds):
        for name, (model, method, task) in ready.items():
            spent = stepping(*copy.deepcopy((model, method)), task)
            if turn:
                times[name].append(spent)
    plain = min(times["finetune"])
    print(f"{'method':>24} {'step':>9} {'ratio':>7}")
    for name, spent in times.items():
        print(f"{name:>24} {min(spent) * 1e6:>6.0f} µs {min(spent) / plain:>7.3f}")


def stepping(model, method, task):
    """Seconds of a step as the trainer does it, the mean over 25, or over a whole task where a method learns in phases.

    Counted is the time this process has computed, so that others on the machine do not lengthen it.
    """
    method.begin_task(model, task)
    learning = [p for p in [*model.parameters(), *method.parameters()] if p.requires_grad]
    optimizer, batches = sgd(learning), list(task.batches(128, epochs=(task.steps or 25) // 25))
    start = time.process_time()
    for batch in batches:
        optimizer.zero_grad()
        loss = method.loss(model, batch, pulled=True)
        loss.backward()
        loss.item()
        method.pull(model)
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
    return (time.process_time() - start) / len(batches)


class Reservoir:
    """The memory of a hand-written loop."""

    def __init__(self, rows):
        self.x, self.y, self.seen = torch.empty(rows, 784), torch.empty(rows, dtype=torch.long), 0

    def add(self, x, y):
        """Vectorised; of two rows for one place the later wins."""
        n = torch.arange(self.seen, self.seen + len(x))
        place = torch.where(n < len(self.x), n, (torch.rand(len(x)) * (n + 1)).long())
        kept = place < len(self.x)
        self.x[place[kept]], self.y[place[kept]] = x[kept], y[kept]
        self.seen += len(x)

    def draw(self, count):
        """Without replacement."""
        rows = torch.randperm(min(self.seen, len(self.x)))[:count]
        return self.x[rows], self.y[rows]


def replay_by_hand(model, batches, memory, optimizer):
    """One loss over new and remembered examples."""
    for x, y in batches:
        old_x, old_y = memory.draw(len(x))
        loss = F.cross_entropy(model(torch.cat([x, old_x])), torch.cat([y, old_y]))
        optimizer.zero_grad()
        loss.backward()
        loss.item()
        optimizer.step()
        memory.add(x, y)


def two_passes_by_hand(model, batches, memory, optimizer):
    """The work of A-GEM without its projection."""
    parameters = list(model.parameters())
    for x, y in batches:
        old_x, old_y = memory.draw(len(x))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        loss.item()
        torch.autograd.grad(F.cross_entropy(model(old_x), old_y), parameters)
        optimizer.step()
        memory.add(x, y)


def compare_replay(rounds):
    """Trainer and hand-written loops in turns."""
    x, y = torch.randn(3200, 784), torch.randint(10, (3200,))
    print(f"{'replay':>24} {'by hand':>10} {'everlearn':>10} {'ratio':>7}")
    for name, hidden, size, by_hand, make in (
        ("ER, batch 128", (400, 400), 128, replay_by_hand, lambda: ER(500)),
        ("A-GEM, batch 128", (400, 400), 128, two_passes_by_hand, lambda: AGEM(500, 128)),
        ("ER, online, chunks of 10", (100, 100), 10, replay_by_hand, lambda: ER(500)),
    ):
        times = {"hand": [], "everlearn": []}
        first, method, memory = nets.mlp(784, 10, hidden), make(), Reservoir(500)
        models = {side: copy.deepcopy(first) for side in times}
        memory.add(x[:1000], y[:1000])
        train(models["everlearn"], method, Task((x[:1000], y[:1000]), id=0), optimizer=sgd, batch_size=size)
        stream = streams.from_tasks([((x, y), None)], scenario="domain", outputs=10)
        tasks = list(streams.online(stream, chunk=10)) if size == 10 else [Task((x, y), id=1)]
        for task in tasks:
            task.id = 1
        optimizers = {side: sgd(model.parameters()) for side, model in models.items()}
        for turn in range(rounds + 1):
            start = time.perf_counter()
            order = torch.randperm(len(x))
            by_hand(models["hand"], ((x[i], y[i]) for i in order.split(size)), memory, optimizers["hand"])
            middle = time.perf_counter()
            for task in tasks:
                train(
                    models["everlearn"],
                    method,
                    task,
                    optimizer=optimizers["everlearn"],
                    batch_size=size,
                    progress=False,
                )
            if turn:
                times["hand"].append(middle - start)
                times["everlearn"].append(time.perf_counter() - middle)
        steps = len(x) / size
        hand, ours = (min(times[side]) / steps for side in times)
        print(f"{name:>24} {hand * 1e6:>7.0f} µs {ours * 1e6:>7.0f} µs {ours / hand:>7.3f}")


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=["loop", "methods", "replay"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "loop" in args.parts:
        print_loop(args)
    if "methods" in args.parts:
        compare_methods(args.rounds)
    if "replay" in args.parts:
        compare_replay(args.rounds)


def print_loop(args):
    """The trainer against a loop by hand."""
    print(f"{'net':>16} {'batch':>6} {'by hand':>10} {'everlearn':>10} {'ratio':>7}")
    for hidden in ((100, 100), (400, 400)):
        for batch_size in (128, 10):
            hand, ours = compare(hidden, batch_size, args.steps, args.rounds)
            net = f"784-{'-'.join(map(str, hidden))}-10"
            print(f"{net:>16} {batch_size:>6} {hand * 1e6:>7.0f} µs {ours * 1e6:>7.0f} µs {ours / hand:>7.3f}")


if __name__ == "__main__":
    main()
