"""Derive a task's data from a data set: select examples, renumber labels, transform inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Subset

from everlearn.core.data_source import Arrays, Batches, Items, Source, renumber
from everlearn.runtime.randomness import seeded

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Permutation:
    """Fixed permutation of the input features."""

    order: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Permute the features of each example of a batch."""
        return x.flatten(1)[:, self.order].view_as(x)


@dataclass(frozen=True)
class Rotation:
    """Counter-clockwise rotation of images, with bilinear interpolation and zeros outside the image.

    >>> image = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])
    >>> Rotation(90.0)(image).round(decimals=4)
    tensor([[[[1., 0.],
              [0., 0.]]]])
    """

    degrees: float

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate a batch of shape (examples, channels, height, width)."""
        if x.dim() != 4:
            raise ValueError(
                f"Only images (examples, channels, height, width) can be rotated, got shape {tuple(x.shape)}."
            )
        cos = math.cos(math.radians(self.degrees))
        sin = math.sin(math.radians(self.degrees))

        # Grid coordinates run from -1 to 1 along both axes, so the aspect ratio enters the rotation matrix.
        image_height, image_width = x.shape[2:]
        x_from_y = -sin * image_height / image_width
        y_from_x = sin * image_width / image_height
        matrix = torch.tensor([[cos, x_from_y, 0.0], [y_from_x, cos, 0.0]], device=x.device)

        pixels = x if x.is_floating_point() else x.float()
        grid = F.affine_grid(matrix.to(pixels.dtype).expand(len(x), 2, 3), list(x.shape), align_corners=False)
        rotated = F.grid_sample(pixels, grid, align_corners=False)
        if x.is_floating_point():
            return rotated
        return rotated.round().to(x.dtype)


@dataclass(frozen=True)
class ImageResizer:
    """Convert images of any size, grayscale or color, bytes or floats, to floats (channels, size, size).

    >>> ImageResizer(3, 32)(torch.zeros(5, 1, 28, 28, dtype=torch.uint8)).shape
    torch.Size([5, 3, 32, 32])
    """

    channels: int
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        """Convert a batch of shape (examples, channels, height, width)."""
        if x.dim() != 4 or x.shape[1] not in (1, self.channels):
            raise ValueError(f"Images with 1 or {self.channels} channels can be resized, got shape {tuple(x.shape)}.")
        if x.dtype == torch.uint8:
            x = x.to(torch.float32) / 255
        if tuple(x.shape[2:]) != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)
        return x.expand(-1, self.channels, -1, -1)


def derive_source(
    source: Source,
    index: Tensor | None = None,
    new_labels: Mapping[int, int] | None = None,
    view: View | None = None,
) -> Source:
    """Select examples of a source, renumber their labels and transform their inputs.

    Args:
        source: data to derive from; only its labels can be changed if it comes in batches.
        index: selected examples; None for all.
        new_labels: new label of each label; None to keep them.
        view: transform of the inputs, applied batch by batch; None to keep them.
    """
    if isinstance(source, Arrays):
        arrays = source if index is None else source.subset(index)
        labels = arrays.y
        if new_labels is not None and labels is not None:
            labels = renumber(labels, new_labels)
        return replace(arrays, y=labels, view=view or arrays.view)

    if isinstance(source, Items):
        dataset: Dataset[Any] = source.dataset
        if index is not None:
            dataset = Subset(source.dataset, index.tolist())
        if new_labels is not None or view is not None:
            dataset = _DerivedDataset(dataset, new_labels, view)
        return Items(dataset, source.workers)

    if isinstance(source, Batches) and index is None and view is None:
        return replace(source, rename=new_labels)
    raise TypeError("A stream is built from arrays or a Dataset; for DataLoaders and iterables use streams.from_tasks.")


def read_labels(source: Source) -> Tensor:
    """Return all class labels: the array, the dataset's ``targets`` or ``labels``, or else read every example."""
    if isinstance(source, Arrays) and source.y is not None:
        labels = source.y
    elif isinstance(source, Items):
        # Reading examples may draw augmentations: the global random state must not change.
        with seeded(0):
            stored_labels = _stored_labels(source.dataset)
            if stored_labels is not None:
                labels = stored_labels
            else:
                labels = torch.tensor([int(y) for _, y in _iterate(source.dataset)])
    else:
        raise TypeError(
            "This stream is built from labeled arrays or a Dataset of pairs (x, y); for DataLoaders and iterables use "
            "streams.from_tasks."
        )

    if not len(labels):
        raise ValueError("The data have no examples to build a stream from.")
    if labels.is_floating_point() or labels.dim() != 1:
        raise TypeError(
            f"Class labels must be integers, one per example, got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    return labels.long()


def _stored_labels(dataset: Any) -> Tensor | None:
    """Return a dataset's ``targets`` or ``labels`` if they hold one class label per example, else None."""
    for name in ("targets", "labels"):
        try:
            labels = torch.as_tensor(getattr(dataset, name))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue
        if labels.dim() == 1 and len(labels) == len(dataset) and not labels.is_floating_point():
            return labels
    return None


class _DerivedDataset(Dataset[Any]):
    """Dataset with renumbered labels and transformed inputs."""

    def __init__(self, dataset: Dataset[Any], new_labels: Mapping[int, int] | None, view: View | None) -> None:
        self.dataset = dataset
        self.new_labels = new_labels
        self.view = view

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        x, y = self.dataset[index]
        if self.view is not None:
            x = self.view(torch.as_tensor(x)[None])[0]

        label = int(y)
        if self.new_labels is None:
            return x, label

        # A dict lookup is faster per item than renumber, which is called only for its error message.
        if label not in self.new_labels:
            renumber(torch.tensor(label), self.new_labels)
        return x, self.new_labels[label]


def _iterate(dataset: Any) -> Any:
    return (dataset[i] for i in range(len(dataset)))
