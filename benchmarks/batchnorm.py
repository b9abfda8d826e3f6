"""Compare frozen and updated BatchNorm statistics, with a small convolutional network on real images.

    python benchmarks/batchnorm.py --data DATA [--seeds 2]

DATA contains the published files of CIFAR-100 and MNIST. Each result is appended to ``batchnorm.jsonl``, and finished
runs are not repeated. The table shows the final average accuracy in %, with statistics that are updated in each task
and with statistics frozen after the first one (``+ Freeze("statistics")``).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch

import everlearn
from everlearn import ER, EWC, MAS, Freeze, LwF, Method, nets, streams
from everlearn.sources import load

METHODS: dict[str, Callable[[], Method]] = {
    "fine-tuning": Method,
    "EWC(1e2)": lambda: EWC(1e2, examples=500),
    "EWC(1e4)": lambda: EWC(1e4, examples=500),
    "MAS(1)": lambda: MAS(1.0),
    "LwF(1)": lambda: LwF(1.0),
    "ER(500)": lambda: ER(500),
}


def subset(pair, classes, per_class):
    """Select the first examples of each class."""
    x, y = (torch.as_tensor(v) for v in pair)
    index = torch.cat([(y == c).nonzero().flatten()[:per_class] for c in classes])
    return x[index], y[index]


def cifar(root, scenario, seed):
    """Make five tasks of ten classes."""
    train, test = load("cifar100", root)
    classes = range(50)
    return streams.split(
        subset(train, classes, 100), subset(test, classes, 50), tasks=5, scenario=scenario, seed=seed, name="cifar"
    )


def cifar_from_40(root, scenario, seed):
    """Make a first task of forty classes, as for a pretrained model, and three tasks of ten."""
    train, test = load("cifar100", root)
    groups = [range(40), range(40, 50), range(50, 60), range(60, 70)]
    tasks = [(subset(train, group, 100), subset(test, group, 50)) for group in groups]
    return streams.from_tasks(tasks, scenario=scenario)


def split_mnist(root, scenario, seed):
    """Make five tasks of two digits."""
    train, test = load("mnist", root)
    digits = range(10)
    return streams.split(
        subset(train, digits, 200), subset(test, digits, 100), tasks=5, scenario=scenario, seed=seed, name="mnist"
    )


def rotated_mnist(root, scenario, seed):
    """Make five tasks of ten digits, rotated further in every task."""
    train, test = load("mnist", root)
    digits = range(10)
    return streams.rotated(subset(train, digits, 200), subset(test, digits, 100), tasks=5, scenario=scenario, seed=seed)


STREAMS = {
    "Split CIFAR-100, task": (cifar, "task"),
    "Split CIFAR-100, class": (cifar, "class"),
    "CIFAR-100 from 40, task": (cifar_from_40, "task"),
    "CIFAR-100 from 40, class": (cifar_from_40, "class"),
    "Split MNIST, task": (split_mnist, "task"),
    "Rotated MNIST, domain": (rotated_mnist, "domain"),
}


def make_model(inputs, outputs):
    """Make three blocks of convolution, BatchNorm, ReLU and pooling."""
    return nets.cnn(inputs, outputs, channels=(16, 32, 64))


def main():
    """Run everything that is not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", default="batchnorm.jsonl", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)

    rows = []
    if options.out.exists():
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    finished = {(row["stream"], row["method"], row["frozen"], row["seed"]) for row in rows}
    for seed, name, label, frozen in product(range(options.seeds), STREAMS, METHODS, (False, True)):
        if (name, label, frozen, seed) in finished:
            continue
        make_stream, scenario = STREAMS[name]
        stream = make_stream(options.data, scenario, seed)
        method = METHODS[label]()
        if frozen:
            method = method + Freeze("statistics")

        result = everlearn.run(make_model, method, stream, epochs=4, batch_size=32, seed=seed)
        row = {
            "stream": name,
            "method": label,
            "frozen": frozen,
            "seed": seed,
            "accuracy": float(result.average_accuracy),
            "forgetting": float(result.forgetting),
        }
        rows.append(row)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print_table(rows)


def print_table(rows):
    """Print accuracies as updated → frozen, with a row per stream and a column per method."""
    cells = defaultdict(list)
    for row in rows:
        cells[row["stream"], row["method"], row["frozen"]].append(100 * row["accuracy"])
    print(f"{'average accuracy, updated → frozen':36}" + "".join(f"{label:>16}" for label in METHODS))
    for name in STREAMS:
        texts = []
        for label in METHODS:
            pair = [cells[name, label, frozen] for frozen in (False, True)]
            texts.append(" → ".join(f"{sum(values) / len(values):.1f}" if values else "–" for values in pair))
        print(f"{name:36}" + "".join(f"{text:>16}" for text in texts))


if __name__ == "__main__":
    main()
