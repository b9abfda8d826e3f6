"""Measure bytes and nanoseconds per parameter of each method, extrapolated to 1, 10 and 100 billion parameters.

python benchmarks/scaling.py [METHOD ...]   (two tables for docs/scaling.md; each measurement in its own process)
"""

import gc
import json
import subprocess
import sys
import time
from statistics import median

import torch
from torch import nn
from tqdm import tqdm

from everlearn import (
    AGEM,
    DEN,
    DER,
    ER,
    ERACE,
    EWC,
    GEM,
    HAT,
    L2,
    MAS,
    PNN,
    SI,
    DERpp,
    ExpandableRepresentation,
    ExpandNet,
    Freeze,
    GenerativeReplay,
    LwF,
    Method,
    PackNet,
    Task,
    allowed_classes,
)
from everlearn.trainer.cost import peak_memory, reset_peak_memory, state_bytes
from everlearn.trainer.settings import Training
from everlearn.trainer.train import TaskTraining

WIDTHS = (1000, 2000, 4000)  # four layers of d × d: 4, 16 and 64 million parameters
BILLIONS = (1, 10, 100)
METHODS = {
    "finetune": Method,
    "L2": L2,
    "EWC": lambda: EWC(1.0),
    "EWC, half": lambda: EWC(1.0, half=True),
    "MAS": MAS,
    "SI": SI,
    "LwF": LwF,
    "ER": lambda: ER(64),
    "ER-ACE": lambda: ERACE(64),
    "DER": lambda: DER(64),
    "DER++": lambda: DERpp(64),
    "A-GEM": lambda: AGEM(64, 16),
    "GEM": lambda: GEM(64),
    "generative": GenerativeReplay,
    "Freeze": Freeze,
    "HAT": HAT,
    "PackNet": PackNet,
    "PNN": PNN,
    "ExpandNet": ExpandNet,
    "DEN": DEN,
    "expandable": lambda: ExpandableRepresentation(64),
}


COLUMNS = [
    "method",
    "bytes stored",
    "extra peak bytes",
    "extra ns per step",
    "step / baseline step",
    "ns per example in `end_task`",
]


def make_model(width):
    """Make a network with nearly all parameters in four square layers."""
    layers = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def sgd(parameters):
    """Make an optimizer without state, so that all state belongs to the method."""
    return torch.optim.SGD(parameters, lr=1e-4)


def measure(name, width):
    """Train on two tasks with batch size 16, and print the measurements of the second one as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(width)
    method = METHODS[name]()
    training = Training(iterations=12, batch_size=16, progress=False)
    measured = {"parameters": sum(p.numel() for p in model.parameters())}
    for k in range(2):
        x = torch.randn(64, width)
        y = 2 * k + (x[:, 0] > 0).long()
        allowed = allowed_classes("task", [[0, 1], [2, 3]], current_task=k)
        task = Task((x, y), id=k, allowed=allowed)

        gc.collect()
        reset_peak_memory(torch.device("cpu"))
        step_times = []
        last = time.perf_counter()
        for _ in TaskTraining(model, method, task, training, sgd).steps():
            step_times.append(time.perf_counter() - last)
            last = time.perf_counter()
        measured["peak"] = peak_memory(torch.device("cpu"))

        start = time.perf_counter()
        method.end_task(model, task)
        measured["end"] = (time.perf_counter() - start) / 64
        measured["step"] = median(step_times[2:])
        measured["state"] = state_bytes(method.state_dict())
    print(json.dumps(measured))


def slope(points, key):
    """Return the cost per parameter, between the smallest and the largest network."""
    smallest = points[0]
    largest = points[-1]
    return (largest[key] - smallest[key]) / (largest["parameters"] - smallest["parameters"])


def format_number(number):
    """Format a number with two significant digits or as an integer."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def main(names):
    """Measure every method at every width, and print both tables."""
    points_by_method = {}
    for name in tqdm(["finetune", *(n for n in names if n != "finetune")], disable=None):
        points_by_method[name] = []
        for width in WIDTHS:
            command = [sys.executable, __file__, "--one", name, str(width)]
            child = subprocess.run(command, capture_output=True, text=True, check=True)
            points_by_method[name].append(json.loads(child.stdout))
        print(f"{name} is measured", file=sys.stderr, flush=True)
    baseline = points_by_method.pop("finetune")

    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{'---|' * len(COLUMNS)}")
    for name, points in points_by_method.items():
        stored = slope(points, "state")
        peak = slope(points, "peak") - slope(baseline, "peak")
        step = 1e9 * (slope(points, "step") - slope(baseline, "step"))
        step_ratio = points[-1]["step"] / baseline[-1]["step"]
        end = 1e9 * slope(points, "end")
        print(f"| {name} | {stored:.1f} | {peak:.1f} | {step:.1f} | {step_ratio:.2f} | {end:.2f} |")

    print()
    print(f"| method | {' | '.join(f'{billions} billion' for billions in BILLIONS)} |")
    print(f"|---|{'---|' * len(BILLIONS)}")
    for name, points in points_by_method.items():
        stored = slope(points, "state")
        step = slope(points, "step") - slope(baseline, "step")
        cells = []
        for billions in BILLIONS:
            seconds = max(0.0, step * billions * 1e9)
            cells.append(f"{format_number(stored * billions)} GB, {format_number(seconds)} s")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1:] or list(METHODS))
