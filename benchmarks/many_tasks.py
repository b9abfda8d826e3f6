"""Two hundred tasks: what a step, the end of a task and the method's state cost, over the number of tasks learned.

python benchmarks/many_tasks.py [FILE] [TASKS]   writes a line per method and task, for docs/figures/draw.py
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

FEW = 40  # tasks for methods that grow with them by design
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
GROW = {"GEM", "PNN", "ExpandNet", "DEN", "expandable"}


def learn(make, tasks):
    """For each task: milliseconds of a step and of the end, bytes of state."""
    torch.manual_seed(0)
    data = streams.digits_data()
    stream = streams.permuted(*data, tasks=tasks, scenario="domain")
    model, method = nets.mlp(stream.inputs, 10, hidden=(100, 100)), make()
    training = Training(iterations=20, batch_size=32, progress=False)
    for i, task in enumerate(stream, 1):
        lesson, spent, last = TaskTraining(model, method, task, training, adam), [], time.perf_counter()
        for _ in lesson.steps():
            now = time.perf_counter()
            spent.append(1000 * (now - last))
            last = now
        method.end_task(model, task)
        yield i, median(spent), 1000 * (time.perf_counter() - last), state_bytes(method.state_dict())


def main():
    """A line per method and task."""
    torch.set_num_threads(1)
    where, tasks = [*sys.argv[1:], *["many_tasks.csv", "200"][len(sys.argv) - 1 :]]
    with open(where, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["method", "task", "step ms", "end ms", "state bytes"])
        for name, make in METHODS.items():
            rows = list(
                tqdm(
                    learn(make, min(int(tasks), FEW) if name in GROW else int(tasks)),
                    desc=name,
                    leave=False,
                    disable=None,
                )
            )
            lines.writerows([name, i, f"{step:.3f}", f"{end:.1f}", size] for i, step, end, size in rows)
            file.flush()
            part = max(1, len(rows) // 5)
            early, late = rows[part : 2 * part] or rows, rows[-part:]
            ratio = median(r[1] for r in late) / median(r[1] for r in early)
            print(
                f"{name:12} {len(rows):4} tasks   step × {ratio:.2f}   state × {late[-1][3] / max(1, early[0][3]):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
