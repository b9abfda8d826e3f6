"""Import optional packages, with an error that names the extra to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PACKAGES = {"PIL": "Pillow"}  # packages whose module has a different name


def import_optional(module: str, extra: str, purpose: str = "This") -> Any:
    """Import a module, or raise an error that says how to install it.

    >>> import_optional("no_such_package", "tune", "Tuning")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    ImportError: Tuning needs no_such_package, which is not installed (No module named 'no_such_package'):
        pip install 'everlearn[tune]'.
    """
    try:
        return import_module(module)
    except ImportError as error:
        top_module = module.split(".")[0]
        package = PACKAGES.get(top_module, top_module)
        raise ImportError(
            f"{purpose} needs {package}, which is not installed ({error}): pip install 'everlearn[{extra}]'."
        ) from error
