"""Packages that only some sources need: asked for when they are needed, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PACKAGES = {"PIL": "Pillow", "scipy": "scipy", "pyarrow": "pyarrow"}


def needs(module: str, purpose: str) -> Any:
    """The module, or an error that says which extra brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = PACKAGES[module.split(".")[0]]
        raise ImportError(
            f"Reading {purpose} needs {package}, which is not here ({error}): pip install 'everlearn[data]'."
        ) from error
