"""The command line, installed by the extra ``cli``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command given on the command line and exit with its code."""
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
    from everlearn.cli.together import together

    raise SystemExit(together(lambda: start(sys.argv[1:])))
