"""Measure the time of a training step of Everlearn relative to a baseline step.

    python benchmarks/overhead.py [loop methods replay]

``loop``: the trainer compared with a handwritten PyTorch loop. Both get the same batches and the same initial weights,
and must end with the same weights, bit for bit. Targets: at most 1.05 at batch size 128, and 1.10 at batch size 10.

``methods``: a step of every method after two tasks compared with a step of fine-tuning, both as in the trainer, on
784-400-400-10 at batch size 128 with plain SGD. Targets: EWC (also with 20 anchors) and MAS at most 1.15, SI 1.25,
PackNet and HAT 1.3. Methods whose steps become slower with the number of tasks have no target, and are measured after
four tasks too. The ratios are the ``step`` and ``step_growth`` of the ``traits`` of the methods.

``replay``: ER and A-GEM in the trainer compared with handwritten loops that do the same work: one loss over 128 new
and 128 stored examples with a vectorized reservoir; two backward passes without projection; and an online stream of
chunks of 10 examples with 10 stored ones. Targets: at most 1.15, 1.15 and 1.3.

All variants alternate in one process on one thread. Ratios are those of minimum times, so that noise of the machine
affects all alike.
"""

import argparse
import copy
import time

import torch
import torch.nn.functional as F

from everlearn import AGEM, ER, EWC, L2, MAS, METHODS, SI, LwF, Method, Task, nets, streams, train
from everlearn.core.traits import traits_of
from everlearn.runtime.randomness import generator


def handwritten_seconds(model, task, steps, batch_size):
    """Train with a handwritten loop, and return its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = task.train.x
    y = task.train.y
    model.train()
    start = time.perf_counter()
    step = 0
    while step < steps:
        epoch = step * batch_size // len(x)
        order = torch.randperm(len(x), generator=generator(0, "batches", task.id, 0, epoch))
        for rows in order.split(batch_size)[: steps - step]:
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    return time.perf_counter() - start


def trainer_seconds(model, task, steps, batch_size):
    """Train with the trainer, and return its seconds."""
    start = time.perf_counter()
    train(model, Method(), task, optimizer=sgd, iterations=steps, batch_size=batch_size, progress=False)
    return time.perf_counter() - start


def sgd(parameters):
    """Make the optimizer of all variants."""
    return torch.optim.SGD(parameters, lr=0.01)


def compare(hidden, batch_size, steps, rounds):
    """Return the seconds per step of both loops, after checking that their weights are equal."""
    torch.manual_seed(0)
    task = Task((torch.randn(12_800, 784), torch.randint(10, (12_800,))), id=0)
    initial_model = nets.mlp(784, 10, hidden)
    loops = {"handwritten": handwritten_seconds, "trainer": trainer_seconds}
    times = {name: [] for name in loops}
    # The first round warms up.
    for round_number in range(rounds + 1):
        models = []
        for name, loop in loops.items():
            model = copy.deepcopy(initial_model)
            seconds = loop(model, task, steps, batch_size)
            models.append(model)
            if round_number:
                times[name].append(seconds)

        parameter_pairs = zip(*(model.parameters() for model in models), strict=True)
        if not all(torch.equal(a, b) for a, b in parameter_pairs):
            raise SystemExit("The two loops end with different weights: they do not do the same work.")
    return min(times["handwritten"]) / steps, min(times["trainer"]) / steps


# Methods that train in phases need the number of steps of a task.
PHASED = ("den", "expandnet")
# Labels are random here: training with strong penalties would diverge.
WEAK_PENALTIES = {"l2": L2(1e-6), "ewc": EWC(1e-3), "si": SI(1e-4), "mas": MAS(1e-4), "lwf": LwF(1e-3)}


def measured_methods():
    """Yield names, methods, and the number of tasks before the measurement."""
    for name, method_class in METHODS.items():
        method = WEAK_PENALTIES.get(name) or method_class()
        if method.trains:  # the others take no steps
            yield name, method, 2
    yield "ewc, separate, 20 tasks", EWC(1e-3), 20
    yield "ewc, online", EWC(1e-3, mode="online"), 2
    yield "ewc, Kronecker", EWC(1e-3, mode="online", structure="kronecker"), 2
    for name, method_class in METHODS.items():
        traits = traits_of(method_class)
        if traits is not None and traits.step_growth:
            yield f"{name}, 4 tasks", method_class(), 4


def compare_methods(rounds):
    """Measure steps of every method in alternation, each time from a copy of the trained model and method."""
    torch.manual_seed(0)
    x = torch.randn(3200, 784)
    y = torch.randint(10, (3200,))
    initial_model = nets.mlp(784, 10)
    prepared = {}
    for name, method, num_earlier_tasks in measured_methods():
        model = copy.deepcopy(initial_model)
        for k in range(num_earlier_tasks):
            train(model, method, Task((x[:256], y[:256]), id=k), optimizer=sgd, progress=False)
        task = Task((x, y), id=num_earlier_tasks)
        if name.split(",")[0] in PHASED:
            task.steps = 100
        prepared[name] = (model, method, task)

    # The first round warms up.
    times = {name: [] for name in prepared}
    for round_number in range(8 * rounds):
        for name, (model, method, task) in prepared.items():
            model_copy, method_copy = copy.deepcopy((model, method))
            seconds = step_seconds(model_copy, method_copy, task)
            if round_number:
                times[name].append(seconds)

    baseline = min(times["finetune"])
    print(f"{'method':>24} {'step':>9} {'ratio':>7}")
    for name, seconds in times.items():
        print(f"{name:>24} {min(seconds) * 1e6:>6.0f} µs {min(seconds) / baseline:>7.3f}")


def step_seconds(model, method, task):
    """Return the mean process time of 25 steps as in the trainer, or of a task if the method trains in phases."""
    method.begin_task(model, task)
    trainable = [p for p in [*model.parameters(), *method.parameters()] if p.requires_grad]
    optimizer = sgd(trainable)
    batches = list(task.batches(128, epochs=(task.steps or 25) // 25))
    start = time.process_time()
    for batch in batches:
        optimizer.zero_grad()
        loss = method.loss(model, batch)
        loss.backward()
        loss.item()
        method.before_step(model)
        optimizer.step()
        method.after_step(model)
    return (time.process_time() - start) / len(batches)


class Reservoir:
    """The memory of a handwritten loop."""

    def __init__(self, capacity):
        self.x = torch.empty(capacity, 784)
        self.y = torch.empty(capacity, dtype=torch.long)
        self.num_offered = 0

    def add(self, x, y):
        """Offer all rows at once; if two have the same index, the later one is stored."""
        n = torch.arange(self.num_offered, self.num_offered + len(x))
        index = torch.where(n < len(self.x), n, (torch.rand(len(x)) * (n + 1)).long())
        is_stored = index < len(self.x)
        self.x[index[is_stored]] = x[is_stored]
        self.y[index[is_stored]] = y[is_stored]
        self.num_offered += len(x)

    def draw(self, count):
        """Sample rows without replacement."""
        rows = torch.randperm(min(self.num_offered, len(self.x)))[:count]
        return self.x[rows], self.y[rows]


def handwritten_replay(model, batches, memory, optimizer):
    """Train with one loss over new and stored examples."""
    for x, y in batches:
        old_x, old_y = memory.draw(len(x))
        loss = F.cross_entropy(model(torch.cat([x, old_x])), torch.cat([y, old_y]))
        optimizer.zero_grad()
        loss.backward()
        loss.item()
        optimizer.step()
        memory.add(x, y)


def handwritten_two_passes(model, batches, memory, optimizer):
    """Train with the work of A-GEM except the projection."""
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


REPLAY_SETTINGS = (
    ("ER, batch 128", (400, 400), 128, handwritten_replay, lambda: ER(500)),
    ("A-GEM, batch 128", (400, 400), 128, handwritten_two_passes, lambda: AGEM(500, 128)),
    ("ER, online, chunks of 10", (100, 100), 10, handwritten_replay, lambda: ER(500)),
)


def compare_replay(rounds):
    """Alternate between the trainer and handwritten replay loops."""
    x = torch.randn(3200, 784)
    y = torch.randint(10, (3200,))
    print(f"{'replay':>24} {'by hand':>10} {'everlearn':>10} {'ratio':>7}")
    for name, hidden, batch_size, handwritten_loop, make_method in REPLAY_SETTINGS:
        times = {"handwritten": [], "trainer": []}
        initial_model = nets.mlp(784, 10, hidden)
        models = {variant: copy.deepcopy(initial_model) for variant in times}
        optimizers = {variant: sgd(model.parameters()) for variant, model in models.items()}

        # Both memories start with the same number of examples.
        method = make_method()
        memory = Reservoir(500)
        memory.add(x[:1000], y[:1000])
        train(models["trainer"], method, Task((x[:1000], y[:1000]), id=0), optimizer=sgd, batch_size=batch_size)

        tasks = [Task((x, y), id=1)]
        if batch_size == 10:
            stream = streams.from_tasks([((x, y), None)], scenario="domain", outputs=10)
            tasks = list(streams.online(stream, chunk=10))
        for task in tasks:
            task.id = 1

        # The first round warms up.
        settings = {"optimizer": optimizers["trainer"], "batch_size": batch_size, "progress": False}
        for round_number in range(rounds + 1):
            start = time.perf_counter()
            order = torch.randperm(len(x))
            batches = ((x[rows], y[rows]) for rows in order.split(batch_size))
            handwritten_loop(models["handwritten"], batches, memory, optimizers["handwritten"])
            middle = time.perf_counter()
            for task in tasks:
                train(models["trainer"], method, task, **settings)
            if round_number:
                times["handwritten"].append(middle - start)
                times["trainer"].append(time.perf_counter() - middle)

        steps = len(x) / batch_size
        handwritten = min(times["handwritten"]) / steps
        trainer = min(times["trainer"]) / steps
        ratio = trainer / handwritten
        print(f"{name:>24} {handwritten * 1e6:>7.0f} µs {trainer * 1e6:>7.0f} µs {ratio:>7.3f}")


def compare_loops(steps, rounds):
    """Compare the trainer with a handwritten loop for several networks and batch sizes."""
    print(f"{'net':>16} {'batch':>6} {'by hand':>10} {'everlearn':>10} {'ratio':>7}")
    for hidden in ((100, 100), (400, 400)):
        for batch_size in (128, 10):
            handwritten, trainer = compare(hidden, batch_size, steps, rounds)
            net = f"784-{'-'.join(map(str, hidden))}-10"
            ratio = trainer / handwritten
            print(f"{net:>16} {batch_size:>6} {handwritten * 1e6:>7.0f} µs {trainer * 1e6:>7.0f} µs {ratio:>7.3f}")


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=["loop", "methods", "replay"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "loop" in args.parts:
        compare_loops(args.steps, args.rounds)
    if "methods" in args.parts:
        compare_methods(args.rounds)
    if "replay" in args.parts:
        compare_replay(args.rounds)


if __name__ == "__main__":
    main()
