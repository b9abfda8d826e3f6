"""The command line, installed by the extra ``cli``."""

from __future__ import annotations

import sys

from everlearn.runtime.optional_imports import import_optional
from everlearn.runtime.stdio import output_error, survive_closed_streams

__all__ = ["main"]


def main() -> None:
    """Run the command given on the command line and exit with its code."""
    survive_closed_streams()  # a command finishes its work even if its output is not read
    try:
        for package in ("cyclopts", "pydantic", "yaml"):
            import_optional(package, "cli", "The command everlearn")
    except ImportError as missing:
        print(f"everlearn: {missing}", file=sys.stderr)
        raise SystemExit(1) from None
    from everlearn.cli.app import start
    from everlearn.runtime.torchrun import run_distributed

    code = run_distributed(lambda: start(sys.argv[1:]))
    if (error := output_error()) is not None:
        print(f"everlearn: The output could not be written ({error.strerror}).", file=sys.stderr)
        code = code or 1
    raise SystemExit(code)
