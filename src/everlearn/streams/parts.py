"""Parts of a data set: some of its examples, under other labels, seen in another way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Subset

from everlearn.data import Arrays, Batches, Items, Source, renumber
from everlearn.seeds import seeded

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Permutation:
    """Every example's features in another order."""

    order: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """For a batch."""
        return x.flatten(1)[:, self.order].view_as(x)


@dataclass(frozen=True)
class Rotation:
    """Images turned counter-clockwise, bilinear, zeros where nothing was.

    >>> image = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])
    >>> Rotation(90.0)(image).round(decimals=4)
    tensor([[[[1., 0.],
              [0., 0.]]]])
    """

    degrees: float

    def __call__(self, x: Tensor) -> Tensor:
        """For a batch of shape (examples, channels, height, width)."""
        if x.dim() != 4:
            raise ValueError(
                f"Only images (examples, channels, height, width) can be rotated, got shape {tuple(x.shape)}."
            )
        cos, sin = math.cos(math.radians(self.degrees)), math.sin(math.radians(self.degrees))
        height, width = x.shape[2:]  # the grid's axes run from -1 to 1 whatever the shape, so turning needs the ratio
        turn = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]], device=x.device)
        values = x if x.is_floating_point() else x.float()
        grid = F.affine_grid(turn.to(values.dtype).expand(len(x), 2, 3), list(x.shape), align_corners=False)
        turned = F.grid_sample(values, grid, align_corners=False)
        return turned if x.is_floating_point() else turned.round().to(x.dtype)


@dataclass(frozen=True)
class Fitted:
    """Images of any size, grey or in colour, bytes or numbers, as numbers of one shape (channels, size, size).

    >>> Fitted(3, 32)(torch.zeros(5, 1, 28, 28, dtype=torch.uint8)).shape
    torch.Size([5, 3, 32, 32])
    """

    channels: int
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        """For a batch of shape (examples, channels, height, width)."""
        if x.dim() != 4 or x.shape[1] not in (1, self.channels):
            raise ValueError(f"Images with 1 or {self.channels} channels can be fitted, got shape {tuple(x.shape)}.")
        x = x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x
        if tuple(x.shape[2:]) != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)
        return x.expand(-1, self.channels, -1, -1)


def part(
    source: Source, index: Tensor | None = None, rename: Mapping[int, int] | None = None, view: View | None = None
) -> Source:
    """Some examples of a source (None: all), their labels renamed, their inputs seen through a view."""
    if isinstance(source, Arrays):
        some = source if index is None else source.subset(index)
        y = some.y if rename is None or some.y is None else renumber(some.y, rename)
        return replace(some, y=y, view=view if view is not None else some.view)
    if isinstance(source, Items):
        some_items: Dataset[Any] = source.dataset if index is None else Subset(source.dataset, index.tolist())
        return Items(some_items if rename is None and view is None else _Seen(some_items, rename, view), source.workers)
    if isinstance(source, Batches) and index is None and view is None:
        return replace(source, rename=rename)
    raise TypeError("A stream is made from arrays or a Dataset; for DataLoaders and iterables use streams.from_tasks.")


def labels_of(source: Source) -> Tensor:
    """All class labels: from memory, from a dataset's ``targets`` or ``labels``, or else by reading every example."""
    if isinstance(source, Arrays) and source.y is not None:
        labels = source.y
    elif isinstance(source, Items):
        with seeded(0):
            stated = _stated_labels(source.dataset)
            labels = stated if stated is not None else torch.tensor([int(y) for _, y in _all(source.dataset)])
    else:
        raise TypeError(
            "Such a stream is made from labelled arrays or a Dataset of pairs (x, y); for DataLoaders and iterables use "
            "streams.from_tasks."
        )
    if not len(labels):
        raise ValueError("There are no examples to make a stream of.")
    if labels.is_floating_point() or labels.dim() != 1:
        raise TypeError(
            f"Class labels must be integers, one per example, got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    return labels.long()


def _stated_labels(dataset: Any) -> Tensor | None:
    """A dataset's ``targets`` or ``labels``, where they are class numbers, one for each example."""
    for name in ("targets", "labels"):
        try:
            labels = torch.as_tensor(getattr(dataset, name))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue
        if labels.dim() == 1 and len(labels) == len(dataset) and not labels.is_floating_point():
            return labels
    return None


class _Seen(Dataset[Any]):
    """A dataset with other labels, seen through a view."""

    def __init__(self, dataset: Dataset[Any], rename: Mapping[int, int] | None, view: View | None) -> None:
        self.dataset, self.rename, self.view = dataset, rename, view

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        x, y = self.dataset[index]
        x = x if self.view is None else self.view(torch.as_tensor(x)[None])[0]
        label = int(y)
        if self.rename is None:
            return x, label
        if label not in self.rename:
            renumber(torch.tensor(label), self.rename)  # says what is wrong; a dict is faster, item by item
        return x, self.rename[label]


def _all(dataset: Any) -> Any:
    return (dataset[i] for i in range(len(dataset)))
