"""Import optional packages, with an error that names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

PACKAGES = {"PIL": "Pillow", "yaml": "PyYAML"}  # packages whose module has a different name


@contextmanager
def imports_of_extra(extra: str, purpose: str) -> Iterator[None]:
    """Inside, the import of a missing package raises an error that says how to install it.

    Args:
        extra: the extra of Everlearn that contains the package.
        purpose: what needs the package, as the start of the sentence.

    >>> with imports_of_extra("tune", "Tuning"):  # doctest: +NORMALIZE_WHITESPACE
    ...     import no_such_package
    Traceback (most recent call last):
    ImportError: Tuning needs no_such_package, which is not installed (No module named 'no_such_package'):
        pip install 'everlearn[tune]'.
    """
    try:
        yield
    except ImportError as error:
        top_module = (error.name or "another package").split(".")[0]
        package = PACKAGES.get(top_module, top_module)
        raise ImportError(
            f"{purpose} needs {package}, which is not installed ({error}): pip install 'everlearn[{extra}]'."
        ) from error


def import_optional(module: str, extra: str, purpose: str) -> Any:
    """Import a module by its name; see ``imports_of_extra``."""
    with imports_of_extra(extra, purpose):
        return import_module(module)
