"""Process time of the commands that need no torch, beside that of importing torch: python benchmarks/startup.py."""

import resource
import subprocess
import sys

COMMANDS = [["--help"], ["--version"], ["list"], ["run", "--help"], ["tune", "--help"], ["update", "--help"]]
REPEATS = 5


def process_seconds(arguments):
    """Measure the user and system time of a Python process; the minimum over repeats."""
    times = []
    for _ in range(REPEATS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(times)


if __name__ == "__main__":
    for command in COMMANDS:
        print(f"everlearn {' '.join(command):16} {process_seconds(['-m', 'everlearn', *command]):.2f} s")
    print(f"{'import everlearn':26} {process_seconds(['-c', 'import everlearn']):.2f} s")
    print(f"{'import torch':26} {process_seconds(['-c', 'import torch']):.2f} s")
