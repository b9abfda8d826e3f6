"""Cost of methods on large models: bytes and nanoseconds per parameter, extrapolated to 1, 10 and 100 billion.

python benchmarks/scaling.py [METHOD ...]   two tables for docs/scaling.md; every measurement in a process of its own
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


def net(width):
    """Nearly all parameters are in four square layers."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def sgd(parameters):
    """An optimizer without a memory, so that what is seen is the method's."""
    return torch.optim.SGD(parameters, lr=1e-4)


def measure(name, width):
    """One task learned, then some steps of the next, batch 16."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, method = net(width), METHODS[name]()
    found = {"parameters": sum(p.numel() for p in model.parameters())}
    for k in range(2):
        x = torch.randn(64, width)
        allowed = allowed_classes("task", [[0, 1], [2, 3]], now=k)
        task = Task((x, 2 * k + (x[:, 0] > 0).long()), id=k, allowed=allowed)
        gc.collect()
        reset_peak_memory(torch.device("cpu"))
        spent, last = [], time.perf_counter()
        for _ in TaskTraining(model, method, task, Training(iterations=12, batch_size=16, progress=False), sgd).steps():
            spent.append(time.perf_counter() - last)
            last = time.perf_counter()
        found["peak"] = peak_memory(torch.device("cpu"))
        last = time.perf_counter()
        method.end_task(model, task)
        found |= {"step": median(spent[2:]), "end": (time.perf_counter() - last) / 64}
        found["state"] = state_bytes(method.state_dict())
    print(json.dumps(found))


def slope(points, key):
    """Return the marginal cost of a parameter, between the smallest and the largest network."""
    small, large = points[0], points[-1]
    return (large[key] - small[key]) / (large["parameters"] - small["parameters"])


def short(number):
    """As people read it."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def main(names):
    """A line per method."""
    found = {}
    for name in tqdm(["finetune", *(n for n in names if n != "finetune")], disable=None):
        found[name] = []
        for width in WIDTHS:
            command = [sys.executable, __file__, "--one", name, str(width)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found[name].append(json.loads(out))
        print(f"{name} is measured", file=sys.stderr, flush=True)
    plain = found.pop("finetune")
    print(
        "| method | bytes kept | extra peak bytes | extra ns a step | step / baseline step | ns per example at end_task |"
    )
    print("|---|---|---|---|---|---|")
    for name, points in found.items():
        kept, peak = slope(points, "state"), slope(points, "peak") - slope(plain, "peak")
        step, end = 1e9 * (slope(points, "step") - slope(plain, "step")), 1e9 * slope(points, "end")
        times = points[-1]["step"] / plain[-1]["step"]
        print(f"| {name} | {kept:.1f} | {peak:.1f} | {step:.1f} | {times:.2f} | {end:.2f} |")
    print()
    print(f"| method | {' | '.join(f'{b} billion' for b in BILLIONS)} |")
    print(f"|---|{'---|' * len(BILLIONS)}")
    for name, points in found.items():
        kept, step = slope(points, "state"), slope(points, "step") - slope(plain, "step")
        cells = [f"{short(kept * b)} GB, {short(max(0.0, step * b * 1e9))} s" for b in BILLIONS]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1:] or list(METHODS))
