"""Runs killed at random moments and called again: do they end as if nothing had happened, and what does that cost?

python benchmarks/kills.py            50 kills over seven methods, each compared with a run that was left alone
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
KILLS = 50


def learn(make, folder, every, stream=None, iterations=100, batch_size=32, hidden=(100, 100)):
    """A run in this process; its weights beside its result."""
    made = []

    def net(inputs, outputs):
        made.append(nets.mlp(inputs, outputs, hidden=hidden))
        return made[-1]

    settings = {"iterations": iterations, "batch_size": batch_size, "checkpoint": every, "progress": False}
    again = folder.exists() and any(folder.glob("*.json"))  # it was killed between the result and the weights
    everlearn.run(net, make(), stream or streams.digits(scenario="task"), out=folder, force=again, **settings)
    torch.save(made[-1].state_dict(), folder / "weights.pt")


def child(make, folder, seconds=None):
    """The same in a process of its own, killed after so many seconds; whether it was."""
    if not (pid := os.fork()):
        code = 1
        try:
            learn(make, folder, CheckpointEvery(steps=20))
            code = 0
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if status not in (0, signal.SIGKILL):
        raise SystemExit("A run has failed.")
    return status != 0


def same(one, other):
    """Whether two folders hold the same weights and the same result."""
    a, b = (torch.load(folder / "weights.pt", weights_only=True) for folder in (one, other))
    results = [load(folder)[0] for folder in (one, other)]
    return all(torch.equal(a[n], b[n]) for n in a) and np.array_equal(*(r.accuracy for r in results))


def kills():
    """Each method by turns, killed between 0 and the time a whole run takes, until it has ended."""
    rng, done, exact, wholes = random.Random(0), 0, 0, {}
    warnings.simplefilter("error")  # a checkpoint that cannot be read would be told
    with tempfile.TemporaryDirectory() as folder, tqdm(total=KILLS, disable=None) as bar:
        for name, make in METHODS.items():
            begun = time.perf_counter()
            child(make, Path(folder) / name)
            wholes[name] = time.perf_counter() - begun
        counts = dict.fromkeys(METHODS, 0)
        for attempt in count():
            if done >= KILLS:
                break
            name = min(counts, key=counts.get)
            place = Path(folder) / f"{name} {attempt}"  # always a new one
            killed = 0
            while killed < 8 and child(METHODS[name], place, rng.uniform(0, wholes[name])):
                killed += 1
            if not (place / "weights.pt").exists():
                child(METHODS[name], place)
            counts[name] += killed
            done += killed
            exact += killed * same(Path(folder) / name, place)
            bar.update(killed)
            print(f"{done} kills, {exact} exact", flush=True)
    print(f"{done} kills ({', '.join(f'{n} {c}' for n, c in counts.items())}): {exact} exact resumes")


def overhead():
    """Return the time of checkpoints relative to the rest: 784-400-400-6, three tasks of 300 steps, batch 128."""
    x, y = torch.rand(6000, 784), torch.arange(6000) % 6
    stream = streams.split((x, y), (x[:600], y[:600]), tasks=3, scenario="task")
    settings = {"stream": stream, "iterations": 300, "batch_size": 128, "hidden": (400, 400)}
    spent = [0.0]

    def timed(function):
        def call(*arguments):
            begun = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[0] += time.perf_counter() - begun

        return call

    Checkpoints.write, StreamTraining._state = timed(Checkpoints.write), timed(StreamTraining._state)
    with tempfile.TemporaryDirectory() as folder:
        for name, make in METHODS.items():
            shares = []
            for i in range(3):
                spent[0], begun = 0.0, time.perf_counter()
                learn(make, Path(folder) / f"{name} {i}", CheckpointEvery(100, None), **settings)
                shares.append(spent[0] / (time.perf_counter() - begun - spent[0]))
            print(f"{name:8} {100 * median(shares):.1f} %", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    overhead() if sys.argv[1:] == ["overhead"] else kills()
