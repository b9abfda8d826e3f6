"""The sentence for a package that is not installed."""

from __future__ import annotations

import importlib
from typing import Any


def needed(package: str, extra: str) -> Any:
    """The package, or an error that says how to get it.

    >>> needed("no_such_package", "tensorboard")
    Traceback (most recent call last):
    ImportError: This needs the package no_such_package: pip install 'everlearn[tensorboard]'.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(f"This needs the package {package}: pip install 'everlearn[{extra}]'.") from None
