"""Packages that not everybody needs: asked for when they are, by the extra that brings them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PACKAGES = {"PIL": "Pillow"}  # whose module has another name


def needs(module: str, extra: str, purpose: str = "This") -> Any:
    """The module, or an error that says how to get it.

    >>> needs("no_such_package", "tune", "Tuning")
    Traceback (most recent call last):
    ImportError: Tuning needs no_such_package, which is not here (No module named 'no_such_package'): pip install 'everlearn[tune]'.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = PACKAGES.get(name := module.split(".")[0], name)
        raise ImportError(
            f"{purpose} needs {package}, which is not here ({error}): pip install 'everlearn[{extra}]'."
        ) from error
