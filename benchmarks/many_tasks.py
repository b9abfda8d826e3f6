"""Measure the cost of a step, of ``end_task`` and of the state of each method over two hundred tasks.

python benchmarks/many_tasks.py [FILE] [TASKS]   (writes a row per method and task, for docs/figures/draw.py)
"""

import csv
import sys
import time
from statistics import median

import torch
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
    nets,
    streams,
)
from everlearn.trainer.cost import state_bytes
from everlearn.trainer.settings import Training, adam
from everlearn.trainer.train import TaskTraining

MAX_TASKS_GROWING = 40  # number of tasks for methods that grow with it by design
METHODS = {
    "finetune": Method,
    "L2": L2,
    "EWC": lambda: EWC(10.0),
    "EWC, online": lambda: EWC(10.0, mode="online", decay=0.95),
    "SI": lambda: SI(1.0),
    "MAS": lambda: MAS(0.1),
    "LwF": LwF,
    "ER": lambda: ER(1000),
    "ER-ACE": lambda: ERACE(1000),
    "DER": lambda: DER(1000),
    "DER++": lambda: DERpp(1000),
    "A-GEM": lambda: AGEM(1000, 32),
    "generative": GenerativeReplay,
    "Freeze": Freeze,
    "HAT": HAT,
    "PackNet": lambda: PackNet(prune=0.97, first=0.97),
    "GEM": lambda: GEM(1000),
    "PNN": PNN,
    "ExpandNet": ExpandNet,
    "DEN": DEN,
    "expandable": lambda: ExpandableRepresentation(1000),
}
GROWING = {"GEM", "PNN", "ExpandNet", "DEN", "expandable"}


def measure_tasks(make_method, num_tasks):
    """Yield for each task: its number, milliseconds of a step and of ``end_task``, and bytes of state."""
    torch.manual_seed(0)
    stream = streams.permuted(*streams.digits_data(), tasks=num_tasks, scenario="domain")
    model = nets.mlp(stream.inputs, 10, hidden=(100, 100))
    method = make_method()
    training = Training(iterations=20, batch_size=32, progress=False)
    for number, task in enumerate(stream, 1):
        task_training = TaskTraining(model, method, task, training, adam)
        step_times = []
        last = time.perf_counter()
        for _ in task_training.steps():
            current = time.perf_counter()
            step_times.append(1000 * (current - last))
            last = current
        method.end_task(model, task)
        end_time = 1000 * (time.perf_counter() - last)
        yield number, median(step_times), end_time, state_bytes(method.state_dict())


def print_growth(name, rows):
    """Print steps and state of the last fifth of the tasks relative to the second fifth."""
    part = max(1, len(rows) // 5)
    early = rows[part : 2 * part] or rows
    late = rows[-part:]
    step_ratio = median(step for _, step, _, _ in late) / median(step for _, step, _, _ in early)
    state_ratio = late[-1][3] / max(1, early[0][3])
    print(f"{name:12} {len(rows):4} tasks   step × {step_ratio:.2f}   state × {state_ratio:.2f}", flush=True)


def main():
    """Write a row per method and task."""
    torch.set_num_threads(1)
    path = sys.argv[1] if len(sys.argv) > 1 else "many_tasks.csv"
    max_tasks = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "task", "step ms", "end ms", "state bytes"])
        for name, make_method in METHODS.items():
            num_tasks = min(max_tasks, MAX_TASKS_GROWING) if name in GROWING else max_tasks
            measurements = measure_tasks(make_method, num_tasks)
            rows = list(tqdm(measurements, desc=name, leave=False, disable=None))
            writer.writerows([name, i, f"{step:.3f}", f"{end:.1f}", size] for i, step, end, size in rows)
            file.flush()
            print_growth(name, rows)


if __name__ == "__main__":
    main()
