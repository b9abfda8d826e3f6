"""The mapping from classes to outputs, which stays the same from update to update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everlearn.sources.labeled_data import Data, first_few


@dataclass(frozen=True)
class Classes:
    """Names of the outputs in their order; empty if labels are the indices of the outputs.

    >>> train, test = (torch.zeros(2, 1), torch.tensor([0, 1])), (torch.zeros(1, 1), torch.tensor([1]))
    >>> data = Data(train, test, names=["ant", "dog"])
    >>> classes = Classes(("cat", "dog")).extended_by(data, "new.csv")
    >>> classes.names, classes.relabel(data, "new.csv")[0][1]
    (('cat', 'dog', 'ant'), tensor([2, 1]))
    """

    names: tuple[str, ...] = ()

    def extended_by(self, data: Data, title: str) -> Classes:
        """Append the classes that are new in some data, in alphabetical order.

        Args:
            data: the data.
            title: their name in messages.
        """
        if not self.names and data.names:
            raise ValueError(
                f"The labels of {title} are words ({first_few(data.names)}), and it is unknown which output stands "
                "for which: give the names of the outputs in their order, classes=[…] (--classes cat,dog,… on the "
                "command line)."
            )
        new_names = set(self._class_names(data)) - set(self.names)
        return Classes((*self.names, *sorted(new_names)))

    def relabel(self, data: Data, title: str) -> Data:
        """Replace the labels of some data by indices of outputs."""
        unknown_names = sorted(set(self._class_names(data)) - set(self.names))
        if unknown_names:
            raise ValueError(
                f"{title} has classes without an output: {first_few(unknown_names)}; "
                f"the outputs are {first_few(self.names)}."
            )

        (x, y), (x_test, y_test) = data
        train = x, self._output_indices(y, data.names)
        test = x_test, self._output_indices(y_test, data.names)
        return Data(train, test)

    def count_required_outputs(self, y: Tensor, outputs: int, title: str) -> int:
        """Count the outputs that some labels require, and raise if an output would be without a class.

        Args:
            y: the labels, as indices of outputs.
            outputs: how many outputs there are.
            title: the name of the data in messages.
        """
        # With names, every class has an output, and labels must be among them.
        if self.names:
            max_label = int(y.max())
            if max_label >= len(self.names):
                raise ValueError(
                    f"{title} has the label {max_label}, but only the outputs 0 to {len(self.names) - 1} have names "
                    f"({first_few(self.names)}): write classes as words."
                )
            return max(outputs, len(self.names))

        # Without names new classes must be numbered on from the last output.
        new_labels = sorted({int(label) for label in y.unique()} - set(range(outputs)))
        if new_labels != list(range(outputs, outputs + len(new_labels))):
            raise ValueError(
                f"{title} has the labels {first_few(new_labels)}, but the model has the outputs 0 to {outputs - 1}: "
                f"number new classes from {outputs} on, or name the outputs in their order, classes=[…] (--classes "
                "on the command line)."
            )
        return outputs + len(new_labels)

    def _class_names(self, data: Data) -> list[str]:
        """List the class names in some data; none if labels are indices of outputs."""
        if data.names or not self._has_numeric_names:
            return data.names
        (_, y), (_, y_test) = data
        return [str(int(label)) for label in torch.cat([y, y_test]).unique()]

    @property
    def _has_numeric_names(self) -> bool:
        """Whether some names are numbers, so that an integer label is a name and not an index."""
        return any(name.lstrip("-").isdigit() for name in self.names)

    def _output_indices(self, y: Tensor, data_names: Sequence[str]) -> Tensor:
        if not data_names and not self._has_numeric_names:
            return y

        index_of = {name: i for i, name in enumerate(self.names)}
        label_names = [data_names[label] if data_names else str(label) for label in y.tolist()]
        return torch.tensor([index_of[name] for name in label_names], dtype=torch.long)


def parse_classes(names: Sequence[str] | None) -> Classes:
    """Check the names that a user gave for the outputs; None is no names."""
    if names is None:
        return Classes()
    if isinstance(names, str) or not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"classes are the names of the outputs in their order, as in ['cat', 'dog']; got {names!r}.")

    duplicates = sorted({name for name in names if list(names).count(name) > 1})
    if duplicates:
        raise ValueError(f"classes: {first_few(duplicates)} is given twice; the names of outputs must differ.")
    return Classes(tuple(names))
