"""Train with random methods, optimizers, rates, widths and scales of inputs: is a NaN ever reached without a word?

    python benchmarks/random_configurations.py [COUNT] [SEED]

Each configuration trains on three small tasks in the trainer, and again in a loop of one's own. A result is

- finite: weights and predictions are finite;
- refused: an error said why, or said that the loss is not finite;
- diverged as fine-tuning does: in one's own loop the same configuration without a method is not finite either;
- silent: anything else. The exit code is 1 if there is one, and its configuration is printed.
"""

import copy
import math
import random
import sys
import warnings
from collections import Counter

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

from everlearn import Method, Task, train
from everlearn.methods import METHODS

OPTIMIZERS = {
    "SGD": SGD,
    "momentum": lambda p, lr: SGD(p, lr=lr, momentum=0.9),
    "Nesterov": lambda p, lr: SGD(p, lr=lr, momentum=0.9, nesterov=True),
    "weight decay": lambda p, lr: SGD(p, lr=lr, weight_decay=0.1),
    "Adam": Adam,
    "AdamW": AdamW,
    "NAdam": NAdam,
    "RMSprop": RMSprop,
    "Adagrad": Adagrad,
}
SMALL = {"ranpac": {"dimension": 30}, "klda": {"dimension": 30}, "generative": {"hidden": 16}}
PENALTIES = ("ewc", "si", "mas", "l2", "lwf")


def log_uniform(generator, low, high):
    """Draw a number with a uniform logarithm."""
    return math.exp(generator.uniform(math.log(low), math.log(high)))


def draw(generator):
    """Draw a configuration; every second one has a penalty, of a random strength or none given."""
    name = generator.choice(PENALTIES if generator.random() < 0.5 else sorted(METHODS))
    fields = dict(SMALL.get(name, {}))
    if name in PENALTIES and generator.random() < 0.6:
        fields["strength"] = log_uniform(generator, 1e-4, 1e10)
    if name == "ewc":
        fields["mode"] = generator.choice(["separate", "online"])
        fields["structure"] = generator.choice(["diagonal", "diagonal", "kronecker", "full"])
    return {
        "method": name,
        "fields": fields,
        "optimizer": generator.choice(sorted(OPTIMIZERS)),
        "rate": log_uniform(generator, 1e-4, 1.0),
        "width": generator.choice([2, 8, 32, 128]) if fields.get("structure") != "full" else 8,
        "inputs": log_uniform(generator, 1e-2, 1e2),
        "seed": generator.randrange(10**6),
    }


def make_tasks(config):
    """Return three tasks of 64 examples, whose two classes are divided by another line in each."""
    generator = torch.Generator().manual_seed(config["seed"])
    tasks = []
    for k in range(3):
        x = torch.randn(64, 6, generator=generator)
        y = (x @ torch.randn(6, generator=generator) > 0).long()
        tasks.append(Task((config["inputs"] * x, y), id=k))
    return tasks


def make_model(config):
    """Return a network with one hidden layer."""
    torch.manual_seed(config["seed"])
    return nn.Sequential(nn.Linear(6, config["width"]), nn.ReLU(), nn.Linear(config["width"], 2))


def is_finite(model, method, tasks):
    """Whether weights and predictions are finite."""
    if not all(p.isfinite().all() for p in model.parameters()):
        return False
    model.eval()
    with torch.no_grad():
        task_ids = torch.zeros(64, dtype=torch.long)
        return bool(method.predict(model, tasks[0].train.x, task_ids).isfinite().all())


def train_in_trainer(config, method, tasks):
    """Return the model after all tasks, trained by Everlearn."""
    model = make_model(config)
    for task in tasks:
        make_optimizer = lambda p: OPTIMIZERS[config["optimizer"]](p, lr=config["rate"])
        epochs = 3 if method.trains else 0
        train(model, method, task, optimizer=make_optimizer, epochs=epochs, batch_size=16, progress=False)
    return model


def train_in_own_loop(config, method, tasks):
    """Return the model after all tasks, trained by the hooks, with nothing that looks at the loss."""
    model = make_model(config)
    for task in tasks:
        model.train()
        task.steps = 12
        method.begin_task(model, task)
        parameters = [*model.parameters(), *method.parameters()]
        optimizer = OPTIMIZERS[config["optimizer"]](parameters, lr=config["rate"])
        for batch in task.batches(16, 3):
            loss = method.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            method.before_step(model)
            optimizer.step()
            method.after_step(model)
        method.end_task(model, task)
    return model


def outcome(config, train_all):
    """Classify a configuration in one kind of loop."""
    tasks = make_tasks(config)
    method = METHODS[config["method"]](**config["fields"])
    try:
        model = train_all(config, method, tasks)
    except (ValueError, FloatingPointError):
        return "refused"
    if is_finite(model, method, tasks):
        return "finite"
    if train_all is train_in_trainer:
        return "silent"
    try:
        plain = train_all(config, Method(), copy.deepcopy(tasks))
    except FloatingPointError:
        return "diverged as fine-tuning does"
    return "silent" if is_finite(plain, Method(), tasks) else "diverged as fine-tuning does"


def run(count, seed):
    """Return how often each outcome was reached, and the configurations that failed silently."""
    generator = random.Random(seed)
    counts = Counter()
    silent = []
    for _ in range(count):
        config = draw(generator)
        loops = {"trainer": train_in_trainer}
        if METHODS[config["method"]](**config["fields"]).trains:
            loops["own loop"] = train_in_own_loop
        for loop, train_all in loops.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = outcome(config, train_all)
            counts[loop, result] += 1
            if result == "silent":
                silent.append((loop, config))
    return counts, silent


if __name__ == "__main__":
    torch.set_num_threads(1)
    all_counts, failures = run(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, int((sys.argv[2:] or [0])[0]))
    for (loop, result), number in sorted(all_counts.items()):
        print(f"{loop:10} {result:30} {number:6}")
    for failure in failures:
        print("silent:", *failure)
    sys.exit(bool(failures))
