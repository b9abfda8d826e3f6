"""The command line, installed by the extra ``cli``."""

from __future__ import annotations

import sys

from everlearn.runtime.stdio import output_error, survive_closed_streams

__all__ = ["main"]


def main() -> None:
    """Run the command given on the command line and exit with its code."""
    survive_closed_streams()  # a command finishes its work even if its output is not read
    try:
        import cyclopts  # noqa: F401
        import pydantic  # noqa: F401
        import yaml  # noqa: F401
    except ImportError as missing:
        print(
            f"The everlearn command needs {missing.name}: install it with pip install 'everlearn[cli]'.",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    from everlearn.cli.app import start
    from everlearn.runtime.torchrun import run_distributed

    code = run_distributed(lambda: start(sys.argv[1:]))
    if (error := output_error()) is not None:
        print(f"everlearn: The output could not be written ({error.strerror}).", file=sys.stderr)
        code = code or 1
    raise SystemExit(code)
