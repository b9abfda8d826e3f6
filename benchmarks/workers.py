"""Eight runs by one worker and by two: the time of the whole command, start-up included, as a ratio.

python benchmarks/workers.py [STEPS]   of every task of every run
"""

import subprocess
import sys
import tempfile
import time
from statistics import median

TURNS = 3


def seconds(workers, steps, folder):
    """Two methods, four seeds, five tasks of digits."""
    runs = [
        "--stream",
        "digits",
        "--methods",
        "finetune,ewc",
        "--seeds",
        "4",
        "--hidden",
        "400,400",
        "--iterations",
        steps,
    ]
    begun = time.perf_counter()
    command = [sys.executable, "-m", "everlearn", "run", *runs, "--workers", str(workers), "--out", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main():
    """In turns, because machines are noisy."""
    steps, ratios = (sys.argv[1:] or ["2000"])[0], []
    for _ in range(TURNS):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            alone, both = seconds(1, steps, one), seconds(2, steps, two)
        ratios.append(both / alone)
        print(f"one worker {alone:.1f} s, two {both:.1f} s: {ratios[-1]:.2f}", flush=True)
    print(f"median {median(ratios):.2f}")


if __name__ == "__main__":
    main()
