"""``python -m everlearn`` is the everlearn command."""

import os
import sys
from pathlib import Path

# python -m puts the working folder first on the path: a file there with the name of a library would be imported.
if sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]) and not sys.flags.safe_path:
    del sys.path[0]

from everlearn.cli import main

main()
