"""Names that are imported when they are first used, so that the command line starts without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def import_target(target: str) -> Any:
    """Import what ``package.module:name`` names; without a colon, the module.

    >>> import_target("math:floor")(2.5)
    2
    """
    module_name, _, name = target.partition(":")
    module = import_module(module_name)
    return getattr(module, name) if name else module


def lazy_attributes(module: str, targets: Mapping[str, str]) -> Callable[[str], Any]:
    """Create the ``__getattr__`` of a module (PEP 562), which imports a public name on first access.

    Args:
        module: name of the module.
        targets: what to import for each name, as ``import_target`` reads it.
    """

    def get_attribute(name: str) -> Any:
        if name not in targets:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = import_target(targets[name])
        # The next access does not come here.
        setattr(import_module(module), name, value)
        return value

    return get_attribute


class LazyTable(Mapping[str, T]):
    """A table whose entries are imported when they are looked up.

    Args:
        targets: where each entry is, as ``package.module:name``.

    >>> table = LazyTable({"floor": "math:floor"})
    >>> list(table), table["floor"](2.5)
    (['floor'], 2)
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self.targets = dict(targets)

    def __getitem__(self, name: str) -> T:
        entry: T = import_target(self.targets[name])
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    # The method of Mapping would import the entry.
    def __contains__(self, name: object) -> bool:
        return name in self.targets

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.targets})"
