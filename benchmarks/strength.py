"""Regret of strength="auto": points below the best of a grid of 13 strengths, over streams and optimizers.

    python benchmarks/strength.py DATA [--out FOLDER] [--shard 0/2] [--seeds 5]

Accuracy on validation data after the last task, in %, mean over seeds; of the regression stream the explained variance.
The first four streams were used to design the rule, the others not. Every cell is written to a file as it ends: start
the command again to resume, and once per shard to use several cores. The summary is printed when all cells are there.
"""

import argparse
import copy
import json
import warnings
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median

import torch
from torch.optim import SGD, Adam, AdamW

from everlearn import EWC, MAS, SI, Gaussian, evaluate, nets, streams
from everlearn.runtime import files
from everlearn.streams.bag_of_words import bag
from everlearn.trainer.settings import Training
from everlearn.trainer.train import TaskTraining

EXAMPLES = 500
GRIDS = {EWC: range(-2, 11), MAS: range(-6, 7), SI: range(-5, 8)}  # powers of ten
OLD_DEFAULTS = {EWC: 100.0, MAS: 0.1, SI: 10.0}
OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.2),
    "momentum": partial(SGD, lr=0.03, momentum=0.9),
    "Adam": partial(Adam, lr=3e-3),
    "AdamW": partial(AdamW, lr=3e-3, weight_decay=0.01),
}


def make_regression(seed):
    """Return four tasks that predict the same function of inputs that are rotated by another matrix in each."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(10, 3, generator=generator)

    def draw(rotation):
        x = torch.randn(2 * EXAMPLES, 10, generator=generator)
        y = torch.tanh(x @ weights).sum(1, keepdim=True)
        return x @ rotation, (y - y.mean()) / y.std()

    pairs = []
    for _ in range(4):
        rotation = torch.linalg.qr(torch.randn(10, 10, generator=generator)).Q
        pairs.append((draw(rotation), draw(rotation)))
    return streams.from_tasks(pairs, scenario="domain", likelihood=Gaussian(), valid=0.25, seed=seed, name="regression")


STREAMS = {
    "permuted digits": lambda root, seed: streams.permuted_digits("domain", 5, seed, 0.25),
    "rotated digits": lambda root, seed: streams.rotated_digits("domain", 5, seed, 0.25),
    "split digits": lambda root, seed: streams.digits("domain", 5, seed, 0.25),
    "permuted digits, task": lambda root, seed: streams.permuted_digits("task", 5, seed, 0.25),
    "gas drift": lambda root, seed: streams.gas_drift("domain", 6, seed, 0.25, root),
    "CLINC150": lambda root, seed: streams.clinc150("domain", 5, seed, 0.25, root, partial(bag, width=512)),
    "split Fashion-MNIST": lambda root, seed: streams.split_fashion_mnist("domain", 5, seed, 0.25, root),
    "regression": lambda root, seed: make_regression(seed),
}


@cache
def make_stream(name, root, seed):
    """Return four tasks of a stream, with few examples each."""
    stream = STREAMS[name](root, seed).first(4)
    for task in stream:
        generator = torch.Generator().manual_seed(seed)
        for part in ("train", "valid"):
            source = getattr(task, part)
            rows = torch.randperm(len(source), generator=generator)[:EXAMPLES]
            setattr(task, part, source.subset(rows))
    return stream


def train_task(model, method, task, optimizer, seed):
    """Train on a task without ending it."""
    training = Training(epochs=7, batch_size=20, seed=seed, progress=False)
    for _ in TaskTraining(model, method, task, training, optimizer).steps():
        pass


def run_cell(stream_name, optimizer, kind, root, seeds):
    """Return the mean score of each strength; all strengths share the first task."""
    strengths = ["finetune", "auto", "old", *(f"1e{power}" for power in GRIDS[kind])]
    scores = {strength: [] for strength in strengths}
    for seed in range(seeds):
        stream = make_stream(stream_name, root, seed)
        tasks = list(stream)
        torch.manual_seed(seed)
        first_model = nets.mlp(stream.inputs, stream.outputs, hidden=(64, 64))
        first_method = kind(0.0)
        train_task(first_model, first_method, tasks[0], optimizer, seed)
        for strength in strengths:
            model = copy.deepcopy(first_model)
            method = copy.deepcopy(first_method)
            method.strength = {"finetune": 0.0, "auto": "auto", "old": OLD_DEFAULTS[kind]}.get(strength)
            if method.strength is None:
                method.strength = float(strength)
            method.end_task(model, tasks[0])
            try:
                for task in tasks[1:]:
                    train_task(model, method, task, optimizer, seed)
                    method.end_task(model, task)
                values = [evaluate(model, method, [task], split="valid")[0] for task in tasks]
            except FloatingPointError:
                values = [-1.0 if stream_name == "regression" else 0.0]
            score = fmean(values)
            if stream_name == "regression":
                score = max(0.0, 1 + score)  # the negative squared error of labels with variance one
            scores[strength].append(100 * score)
    return {strength: fmean(values) for strength, values in scores.items()}


def regret(scores, strength):
    """Return the points below the best of the grid."""
    return max(v for name, v in scores.items() if name.startswith("1e")) - scores[strength]


def print_summary(cells):
    """Print the score of fine-tuning, the best of the grid, and the regrets of both defaults."""
    print(
        f"{'stream':24}{'optimizer':10}{'method':7}{'finetune':>9}{'grid':>7}{'auto':>7}{'regret':>8}{'old regret':>12}"
    )
    for (stream, optimizer, method), scores in cells.items():
        best = scores["auto"] + regret(scores, "auto")
        print(
            f"{stream:24}{optimizer:10}{method:7}{scores['finetune']:9.1f}{best:7.1f}{scores['auto']:7.1f}"
            f"{regret(scores, 'auto'):8.1f}{regret(scores, 'old'):12.1f}"
        )
    print()
    designed = set(list(STREAMS)[:4])
    for title, chosen in [
        *((kind.__name__, [s for key, s in cells.items() if key[2] == kind.__name__]) for kind in GRIDS),
        *((o, [s for key, s in cells.items() if key[1] == o]) for o in OPTIMIZERS),
        ("streams of the design", [s for key, s in cells.items() if key[0] in designed]),
        ("other streams", [s for key, s in cells.items() if key[0] not in designed]),
        ("all", list(cells.values())),
    ]:
        for strength in ("auto", "old"):
            regrets = [regret(scores, strength) for scores in chosen]
            print(f"{title:24}{strength:6} median regret {median(regrets):5.1f}, worst {max(regrets):5.1f}")


def main():
    """Run the cells of this shard, then print what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, default=Path("runs/strength"))
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    shard, num_shards = map(int, arguments.shard.split("/"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    keys = [(s, o, kind) for s in STREAMS for o in OPTIMIZERS for kind in GRIDS]
    cells = {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for index, (stream, optimizer, kind) in enumerate(keys):
        path = arguments.out / f"{stream}-{optimizer}-{kind.__name__}.json".replace(" ", "_").replace(",", "")
        if not path.exists() and index % num_shards == shard:
            scores = run_cell(stream, OPTIMIZERS[optimizer], kind, arguments.data, arguments.seeds)
            files.write(path, json.dumps(scores).encode())
            print(f"{path.stem}: auto {scores['auto']:.1f}, regret {regret(scores, 'auto'):.1f}", flush=True)
        if path.exists():
            cells[stream, optimizer, kind.__name__] = json.loads(path.read_text())
    if len(cells) == len(keys):
        print_summary(cells)


if __name__ == "__main__":
    main()
