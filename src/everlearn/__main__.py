"""``python -m everlearn`` is the everlearn command."""

import os
import sys
from pathlib import Path

# python -m puts the working folder before everything: what lies beside the data would be run for a library of its name.
if sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]) and not sys.flags.safe_path:
    del sys.path[0]

from everlearn.cli import main

main()
