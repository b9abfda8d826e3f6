"""Which output stands for which class, the same from update to update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everlearn.sources.data import Data, first_few


@dataclass(frozen=True)
class Classes:
    """The names of the outputs in their order; none where labels are the numbers of the outputs themselves.

    >>> words = Data((torch.zeros(2, 1), torch.tensor([0, 1])), (torch.zeros(1, 1), torch.tensor([1])), names=["ant", "dog"])
    >>> wider = Classes(("cat", "dog")).with_those_of(words, "new.csv")
    >>> wider.names, wider.numbered(words, "new.csv")[0][1]
    (('cat', 'dog', 'ant'), tensor([2, 1]))
    """

    names: tuple[str, ...] = ()

    def with_those_of(self, data: Data, where: str) -> Classes:
        """With the classes that are new in these data behind the others, in alphabetical order."""
        if not self.names and data.names:
            raise ValueError(
                f"The labels of {where} are words ({first_few(data.names)}), and which output stands for which is not known: give the "
                "names of the outputs in their order, classes=[…] (--classes cat,dog,… on the command line)."
            )
        return Classes((*self.names, *sorted(set(self._words(data)) - set(self.names))))

    def numbered(self, data: Data, where: str) -> Data:
        """The same data with the outputs' numbers as labels."""
        if unknown := sorted(set(self._words(data)) - set(self.names)):
            raise ValueError(
                f"{where} has classes that no output stands for: {first_few(unknown)}; there are {first_few(self.names)}."
            )
        (x, y), (x_test, y_test) = data
        return Data((x, self._places(y, data.names)), (x_test, self._places(y_test, data.names)))

    def needed(self, y: Tensor, outputs: int, where: str) -> int:
        """How many outputs these labels need; labels that would leave outputs without a class are refused."""
        if self.names:
            if int(y.max()) >= len(self.names):
                raise ValueError(
                    f"{where} has the label {int(y.max())}, but only the outputs 0 to {len(self.names) - 1} have names "
                    f"({first_few(self.names)}): write classes as words."
                )
            return max(outputs, len(self.names))
        beyond = sorted({int(c) for c in y.unique()} - set(range(outputs)))
        if beyond != list(range(outputs, outputs + len(beyond))):
            raise ValueError(
                f"{where} has the labels {first_few(beyond)}, but the model has the outputs 0 to {outputs - 1}: let new classes go on "
                f"with {outputs}, or name the outputs in their order, classes=[…] (--classes on the command line)."
            )
        return outputs + len(beyond)

    def _words(self, data: Data) -> list[str]:
        """The classes of the data by name; none where they are the numbers of outputs, named or not."""
        if data.names or not self._numerals:
            return data.names
        (_, y), (_, y_test) = data
        return [str(int(c)) for c in torch.cat([y, y_test]).unique()]

    @property
    def _numerals(self) -> bool:
        """Whether outputs are called by numbers, which then need not be their own."""
        return any(name.lstrip("-").isdigit() for name in self.names)

    def _places(self, y: Tensor, own: Sequence[str]) -> Tensor:
        if not own and not self._numerals:
            return y
        place = {name: i for i, name in enumerate(self.names)}
        return torch.tensor([place[own[c] if own else str(c)] for c in y.tolist()], dtype=torch.long)


def given(names: Sequence[str] | None) -> Classes:
    """From what somebody named, each once."""
    if names is None:
        return Classes()
    if isinstance(names, str) or not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"classes are the names of the outputs in their order, as in ['cat', 'dog']; got {names!r}.")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise ValueError(f"classes: {first_few(twice)} stands there twice; an output has one name.")
    return Classes(tuple(names))
