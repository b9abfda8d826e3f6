"""Measure the time of eight runs with one worker and with two, including start-up, as a ratio.

python benchmarks/workers.py [STEPS]   (steps of each task of each run)
"""

import subprocess
import sys
import tempfile
import time
from statistics import median

NUM_ROUNDS = 3


def measure_command(num_workers, num_steps, folder):
    """Return the seconds of a command with two methods, four seeds and five tasks of digits."""
    options = ["--stream", "digits", "--methods", "finetune,ewc", "--seeds", "4"]
    options += ["--hidden", "400,400", "--iterations", num_steps]
    options += ["--workers", str(num_workers), "--out", folder]
    command = [sys.executable, "-m", "everlearn", "run", *options]

    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main():
    """Alternate between one and two workers, and print the ratios."""
    num_steps = sys.argv[1] if len(sys.argv) > 1 else "2000"
    ratios = []
    for _ in range(NUM_ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            one_worker = measure_command(1, num_steps, folder)
        with tempfile.TemporaryDirectory() as folder:
            two_workers = measure_command(2, num_steps, folder)
        ratios.append(two_workers / one_worker)
        print(f"one worker {one_worker:.1f} s, two {two_workers:.1f} s: {ratios[-1]:.2f}", flush=True)
    print(f"median {median(ratios):.2f}")


if __name__ == "__main__":
    main()
