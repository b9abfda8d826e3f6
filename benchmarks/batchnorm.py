"""Frozen against updated BatchNorm statistics, on a small convolutional network and real images.

    python benchmarks/batchnorm.py --data DATA [--seeds 2]

DATA holds the published files of CIFAR-100 and MNIST. Every line is written to ``batchnorm.jsonl`` as soon as it is
there, and what stands there is not run again. The table shows the average accuracy at the end, in %, with statistics
that follow the data of each task and with statistics frozen after the first one (``+ Freeze("statistics")``).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
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
    "LwF": LwF,
    "ER(500)": lambda: ER(500),
}


def subset(pair, classes, per_class):
    """The first so many examples of each of these classes."""
    x, y = (torch.as_tensor(v) for v in pair)
    index = torch.cat([(y == c).nonzero().flatten()[:per_class] for c in classes])
    return x[index], y[index]


def cifar(root, scenario, seed):
    """Five tasks of ten classes."""
    train, test = load("cifar100", root)
    classes = range(50)
    return streams.split(
        subset(train, classes, 100), subset(test, classes, 50), tasks=5, scenario=scenario, seed=seed, name="cifar"
    )


def cifar_from_40(root, scenario, seed):
    """Forty classes, then three tasks of ten: a large first task, as a pretrained model has had."""
    train, test = load("cifar100", root)
    groups = [range(40), range(40, 50), range(50, 60), range(60, 70)]
    tasks = [(subset(train, group, 100), subset(test, group, 50)) for group in groups]
    return streams.from_tasks(tasks, scenario=scenario)


def split_mnist(root, scenario, seed):
    """Five tasks of two digits."""
    train, test = load("mnist", root)
    digits = range(10)
    return streams.split(
        subset(train, digits, 200), subset(test, digits, 100), tasks=5, scenario=scenario, seed=seed, name="mnist"
    )


def rotated_mnist(root, scenario, seed):
    """Ten digits, turned further with every task."""
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


def net(inputs, outputs):
    """Three blocks of convolution, BatchNorm, ReLU and pooling."""
    return nets.cnn(inputs, outputs, channels=(16, 32, 64))


def main():
    """Run what has not been run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", default="batchnorm.jsonl", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(row["stream"], row["method"], row["frozen"], row["seed"]) for row in rows}
    for seed in range(options.seeds):
        for name, (make, scenario) in STREAMS.items():
            for label, method in METHODS.items():
                for frozen in (False, True):
                    if (name, label, frozen, seed) in done:
                        continue
                    chosen = method() + Freeze("statistics") if frozen else method()
                    result = everlearn.run(
                        net, chosen, make(options.data, scenario, seed), epochs=4, batch_size=32, seed=seed
                    )
                    row = {"stream": name, "method": label, "frozen": frozen, "seed": seed}
                    row |= {"accuracy": float(result.average_accuracy), "forgetting": float(result.forgetting)}
                    rows.append(row)
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print_table(rows)


def print_table(rows):
    """Accuracy updated → frozen, a line per stream and a column per method."""
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
