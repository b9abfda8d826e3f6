"""Kill runs at random times and resume them: are the results exact, and what do checkpoints cost?

python benchmarks/kills.py            50 kills over seven methods, each compared with an uninterrupted run
python benchmarks/kills.py overhead   cost of checkpoints every 100 steps, within one run
"""

import os
import random
import signal
import sys
import tempfile
import time
import warnings
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import torch
from tqdm import tqdm

import everlearn
from everlearn import AGEM, ER, EWC, HAT, SI, DERpp, PackNet, nets, streams
from everlearn.results.result import load
from everlearn.trainer import CheckpointEvery
from everlearn.trainer.checkpoints import Checkpoints
from everlearn.trainer.stream_training import StreamTraining

METHODS = {
    "EWC": lambda: EWC(100.0),
    "SI": lambda: SI(1.0),
    "ER": lambda: ER(200),
    "DER++": lambda: DERpp(200),
    "HAT": HAT,
    "PackNet": PackNet,
    "A-GEM": lambda: AGEM(200),
}
NUM_KILLS = 50


def run(make_method, folder, interval, stream=None, iterations=100, batch_size=32, hidden=(100, 100)):
    """Run in this process, and save the weights beside the result."""
    models = []

    def make_model(inputs, outputs):
        models.append(nets.mlp(inputs, outputs, hidden=hidden))
        return models[-1]

    # A run may have been killed after its result was written and before the weights were.
    has_result = folder.exists() and any(folder.glob("*.json"))
    everlearn.run(
        make_model,
        make_method(),
        stream or streams.digits(scenario="task"),
        out=folder,
        force=has_result,
        iterations=iterations,
        batch_size=batch_size,
        checkpoint=interval,
        progress=False,
    )
    torch.save(models[-1].state_dict(), folder / "weights.pt")


def run_in_child(make_method, folder, seconds=None):
    """Run in a child process, and kill it after some seconds; returns whether it was killed before it ended."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            run(make_method, folder, CheckpointEvery(steps=20))
            code = 0
        finally:
            os._exit(code)

    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if status not in (0, signal.SIGKILL):
        raise SystemExit("A run has failed.")
    return status != 0


def are_equal(first_folder, second_folder):
    """Return whether two folders have the same weights and the same result."""
    folders = (first_folder, second_folder)
    first_weights, second_weights = (torch.load(folder / "weights.pt", weights_only=True) for folder in folders)
    first_result, second_result = (load(folder)[0] for folder in folders)
    has_equal_weights = all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)
    return has_equal_weights and np.array_equal(first_result.accuracy, second_result.accuracy)


def kill_runs():
    """Kill each method in turn between 0 and the time of a complete run, until the run has ended."""
    rng = random.Random(0)
    num_kills = 0
    num_exact = 0
    run_seconds = {}
    kills_by_method = dict.fromkeys(METHODS, 0)
    warnings.simplefilter("error")  # a checkpoint that cannot be read raises a warning
    with tempfile.TemporaryDirectory() as folder, tqdm(total=NUM_KILLS, disable=None) as bar:
        # Uninterrupted runs: the reference, and the time that a run takes.
        for name, make_method in METHODS.items():
            start = time.perf_counter()
            run_in_child(make_method, Path(folder) / name)
            run_seconds[name] = time.perf_counter() - start

        for attempt in count():
            if num_kills >= NUM_KILLS:
                break
            name = min(kills_by_method, key=kills_by_method.get)
            run_folder = Path(folder) / f"{name} {attempt}"
            killed = 0
            while killed < 8 and run_in_child(METHODS[name], run_folder, rng.uniform(0, run_seconds[name])):
                killed += 1
            if not (run_folder / "weights.pt").exists():
                run_in_child(METHODS[name], run_folder)

            kills_by_method[name] += killed
            num_kills += killed
            num_exact += killed * are_equal(Path(folder) / name, run_folder)
            bar.update(killed)
            print(f"{num_kills} kills, {num_exact} exact", flush=True)
    details = ", ".join(f"{name} {number}" for name, number in kills_by_method.items())
    print(f"{num_kills} kills ({details}): {num_exact} exact resumes")


def measure_overhead():
    """Print the time of checkpoints relative to the rest: 784-400-400-6, three tasks of 300 steps, batch 128."""
    x = torch.rand(6000, 784)
    y = torch.arange(6000) % 6
    stream = streams.split((x, y), (x[:600], y[:600]), tasks=3, scenario="task")
    settings = {"stream": stream, "iterations": 300, "batch_size": 128, "hidden": (400, 400)}
    checkpoint_seconds = [0.0]

    def timed(function):
        def call(*arguments):
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                checkpoint_seconds[0] += time.perf_counter() - start

        return call

    Checkpoints.write = timed(Checkpoints.write)
    StreamTraining._state = timed(StreamTraining._state)
    with tempfile.TemporaryDirectory() as folder:
        for name, make_method in METHODS.items():
            ratios = []
            for i in range(3):
                checkpoint_seconds[0] = 0.0
                start = time.perf_counter()
                run(make_method, Path(folder) / f"{name} {i}", CheckpointEvery(100, None), **settings)
                other_seconds = time.perf_counter() - start - checkpoint_seconds[0]
                ratios.append(checkpoint_seconds[0] / other_seconds)
            print(f"{name:8} {100 * median(ratios):.1f} %", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["overhead"]:
        measure_overhead()
    else:
        kill_runs()
