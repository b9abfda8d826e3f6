"""``python -m everlearn`` is the everlearn command."""

from everlearn.cli import main

main()
