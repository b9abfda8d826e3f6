"""Sources of examples behind one interface: arrays in memory, a Dataset, or an iterable of batches.

A source yields batches ``(x, y)`` or ``(x, y, t)`` with t the task index of each example. Arrays are indexed by batch;
a Dataset is read by a DataLoader; a DataLoader or another iterable keeps its own batches and order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

from everlearn.core.likelihood.base import IGNORED_LABEL
from everlearn.runtime.randomness import derive, generator, reseed, seeded

# A tensor, or a dict or tuple of tensors that all have one row per example.
Inputs = Any

# Inputs, labels and task indices of some examples.
Rows = tuple[Inputs, Tensor | None, Tensor | None]


class Source(Protocol):
    """Data that a task is trained or tested on."""

    def __len__(self) -> int:
        """Return the number of examples; raise TypeError if it is unknown."""

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """Iterate over each example once.

        Args:
            size: batch size.
            order: indices of the examples, or None for the stored order.
            seed: seed of the source's own randomness.
        """


@dataclass(eq=False)
class Arrays:
    """Examples in memory, indexed by batch.

    Args:
        x: inputs, one row per example.
        y: labels, or None for unlabeled examples.
        t: task index of each example, if the source holds several tasks.
        view: transform of the inputs for this task (a permutation, a rotation), applied to each batch, so that tasks
            share the memory of the arrays.
    """

    x: Inputs
    y: Tensor | None = None
    t: Tensor | None = None
    view: Callable[[Inputs], Inputs] | None = None

    def __post_init__(self) -> None:
        lengths = {len(tensor) for tensor in tree_leaves((self.x, self.y, self.t)) if tensor is not None}
        if len(lengths) != 1:
            raise ValueError(f"Inputs and labels differ in length: {sorted(lengths)}; give one label per example.")

    def __len__(self) -> int:
        return row_count(self.x)

    def rows(self, index: Tensor | slice) -> Rows:
        """Select examples by index, under the view; a slice is not copied."""
        x, y, t = self._select(index)
        if self.view is not None:
            x = self.view(x)
        return x, y, t

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """Iterate over batches of rows."""
        if order is None:
            return (self.rows(slice(i, i + size)) for i in range(0, len(self), size))
        return (self.rows(index) for index in order.split(size))

    def subset(self, index: Tensor) -> Arrays:
        """Copy some of the examples, so that a small subset does not keep all arrays in memory."""
        x, y, t = self._select(index)
        return Arrays(x, y, t, self.view)

    def _select(self, index: Tensor | slice) -> Rows:
        """Index inputs, labels and task indices, without the view."""
        # Indexing a single tensor directly is faster than tree_map.
        x = self.x[index] if isinstance(self.x, Tensor) else tree_map(lambda tensor: tensor[index], self.x)
        y = None
        if self.y is not None:
            y = self.y[index]
        t = None
        if self.t is not None:
            t = self.t[index]
        return x, y, t


@dataclass(eq=False)
class Joined:
    """Arrays of several tasks concatenated, each with its own view and task index."""

    parts: Sequence[Arrays]
    tasks: Sequence[int]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """Iterate over batches that mix the parts in the given order."""
        if order is None:
            order = torch.arange(len(self))
        ends = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        return (self._select(index, ends) for index in order.split(size))

    def _select(self, index: Tensor, ends: Tensor) -> Rows:
        """Select examples by their index in the concatenation; ``ends`` are the cumulative lengths of the parts."""
        part_index = torch.bucketize(index, ends, right=True)

        # Select the rows of each part, and remember their positions in the batch.
        positions = []
        part_rows = []
        for k in part_index.unique().tolist():
            part = self.parts[k]
            part_positions = (part_index == k).nonzero().flatten()
            part_start = int(ends[k]) - len(part)
            positions.append(part_positions)
            part_rows.append(part.rows(index[part_positions] - part_start))

        # Concatenate the parts' rows and restore the given order.
        restored = torch.cat(positions).argsort()
        x = tree_map(lambda *tensors: torch.cat(tensors)[restored], *(x for x, _, _ in part_rows))
        y = torch.cat([y for _, y, _ in part_rows if y is not None])[restored]
        return x, y, torch.tensor(self.tasks)[part_index]


@dataclass(eq=False)
class Items:
    """Map-style ``torch.utils.data.Dataset`` of ``(x, y)``, loaded by worker processes.

    Each example is loaded under its own random state, so random transforms inside the dataset give the same result
    for any number of workers.

    Args:
        dataset: the dataset.
        workers: number of worker processes.
        marked: whether items are (x, y, task index).
    """

    dataset: Dataset[Any]
    workers: int = 0
    marked: bool = False

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """Iterate over batches collated by torch's default rule."""
        if order is None:
            order = torch.arange(len(self))
        keys = [(index, derive(seed, position)) for position, index in enumerate(order.tolist())]

        # With its own generator the DataLoader does not draw from torch's global one.
        loader = DataLoader(
            _SeededDataset(self.dataset),
            batch_sampler=[keys[i : i + size] for i in range(0, len(keys), size)],
            num_workers=self.workers,
            generator=generator(seed),
        )
        return (as_rows(batch, self.marked) for batch in loader)


@dataclass(eq=False)
class Batches:
    """DataLoader or other iterable of batches, with its own batch size and order.

    Args:
        iterable: batches as ``as_rows`` accepts them.
        rename: output of each label, if labels are not output indices already.
    """

    iterable: Iterable[Any]
    rename: Mapping[int, int] | None = None

    def __len__(self) -> int:
        if isinstance(self.iterable, DataLoader):
            return len(self.iterable.dataset)  # type: ignore[arg-type]
        if isinstance(self.iterable, Sequence):
            return sum(row_count(as_rows(batch)[0]) for batch in self.iterable)
        raise TypeError("An iterable of batches has no known length.")

    @property
    def is_distributed(self) -> bool:
        """Whether a DistributedSampler, or Accelerate's replacement of it, divides the examples among processes."""
        samplers = [getattr(self.iterable, name, None) for name in ("sampler", "batch_sampler")]
        samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
        return any(hasattr(sampler, "num_replicas") or hasattr(sampler, "num_processes") for sampler in samplers)

    @property
    def generators(self) -> set[int]:
        """Object ids of the random generators that belong to the iterable and its samplers."""
        sampler = getattr(self.iterable, "sampler", None)
        batch_sampler = getattr(self.iterable, "batch_sampler", None)
        generators = [getattr(owner, "generator", None) for owner in (self.iterable, sampler, batch_sampler)]
        return {id(g) for g in generators if g is not None}

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """Iterate over the iterable's own batches; its random draws, such as a DataLoader's order, follow the seed."""
        batches: Iterator[Any] = iter(())
        for i in count():
            # Each batch is loaded under its own random state; the state of the caller is restored in between.
            with seeded(derive(seed, i)):
                if i == 0:
                    batches = iter(self.iterable)
                batch = next(batches, None)
            if batch is None:
                return

            x, y, t = as_rows(batch)
            if y is not None and self.rename is not None:
                y = renumber(y, self.rename)
            yield x, y, t


class _SeededDataset(Dataset[Any]):
    """Dataset whose items are loaded under the seed in their key (index, seed)."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        # The caller's random state is saved once per batch.
        with seeded(0):
            return [self._load(index, seed) for index, seed in keys]

    def _load(self, index: int, seed: int) -> Any:
        reseed(seed)
        return self.dataset[index]


def as_source(data: Any, workers: int = 0) -> Source:
    """Convert data to a source.

    Args:
        data: a source, inputs without labels, a pair ``(x, y)`` of tensors or numpy arrays, a Dataset, a DataLoader,
            or an iterable of batches ``(x, y)``.
        workers: number of processes that load a Dataset.

    >>> len(as_source((np.zeros((5, 2)), np.arange(5))))
    5
    """
    if isinstance(data, (Arrays, Joined, Items, Batches)):
        return data
    if isinstance(data, (Tensor, np.ndarray)):
        return Arrays(_as_tensor(data))
    if isinstance(data, DataLoader):
        return Batches(data)
    if isinstance(data, IterableDataset):
        raise TypeError("An IterableDataset has no batches of its own: wrap it, DataLoader(dataset, batch_size=…).")
    if isinstance(data, Dataset):
        return Items(data, workers)

    if isinstance(data, list) and len(data) == 2 and _are_similar_arrays(*data):
        raise TypeError(
            "A list of two arrays of the same dtype and shape may be a pair (x, y) or two batches: give a tuple for a "
            "pair, iter(…) for batches."
        )
    if isinstance(data, (tuple, list)) and len(data) == 2 and _is_label_array(data[1]):
        return Arrays(as_inputs(data[0]), _as_tensor(data[1]))

    # A list of rows of numbers.
    if isinstance(data, list) and data and isinstance(data[0], list) and _is_label_array(data[0]):
        return Arrays(_as_tensor(data))

    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping)):
        return Batches(data)
    raise TypeError(
        f"Cannot learn from a {type(data).__name__}: give a pair (x, y) of tensors or arrays, a Dataset, a DataLoader "
        "or an iterable of batches (x, y)."
    )


def join(sources: Sequence[Source], tasks: Sequence[int]) -> Source:
    """Concatenate the sources of several tasks, with the task index of each example."""
    arrays = [source for source in sources if isinstance(source, Arrays)]
    if len(arrays) == len(sources):
        return Joined(arrays, tasks)

    items = [source for source in sources if isinstance(source, Items)]
    if len(items) == len(sources):
        workers = max(source.workers for source in items)
        datasets: list[Dataset[Any]] = [_TaskDataset(s.dataset, t) for s, t in zip(items, tasks, strict=True)]
        return Items(ConcatDataset(datasets), workers, marked=True)

    source_types = ", ".join(sorted({type(source).__name__ for source in sources}))
    raise TypeError(f"Tasks can be learned as one when all are arrays or all are Datasets; these are {source_types}.")


class _TaskDataset(Dataset[Any]):
    """Dataset of (x, y) extended to (x, y, task index)."""

    def __init__(self, dataset: Dataset[Any], task: int) -> None:
        self.dataset = dataset
        self.task = task

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        x, y = self.dataset[index]
        return x, y, self.task


def inputs_alone(batch: Inputs) -> Inputs:
    """Remove the labels from a batch that is a dict; return other inputs unchanged."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: value for name, value in batch.items() if name != "labels"}


def as_rows(batch: Any, marked: bool = False) -> Rows:
    """Convert a batch to inputs, labels and task indices.

    Args:
        batch: a pair (x, y), inputs without labels, or a dict of tensors that includes "labels", as Hugging Face uses.
        marked: whether tuples are (x, y, task index).

    >>> as_rows({"input_ids": torch.zeros(2, 5), "labels": torch.tensor([0, 1])})[1]
    tensor([0, 1])
    """
    if isinstance(batch, Mapping):
        inputs = as_inputs(inputs_alone(batch))
        labels = batch.get("labels")
        if labels is not None:
            labels = _as_tensor(labels)
        return inputs, labels, None

    if isinstance(batch, (tuple, list)) and len(batch) == 2 + marked:
        labels = _as_tensor(batch[1])
        if not labels.dim():
            raise TypeError("The data come one example at a time, not in batches: give the DataLoader a batch_size.")
        tasks = None
        if marked:
            tasks = _as_tensor(batch[2])
        return as_inputs(batch[0]), labels, tasks

    # A TensorDataset without labels yields tuples of one.
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return as_inputs(batch[0]), None, None
    if isinstance(batch, (Tensor, np.ndarray)):
        return _as_tensor(batch), None, None

    description = f"a {type(batch).__name__}"
    if isinstance(batch, (tuple, list)):
        description = f"{len(batch)} parts"
    raise TypeError(
        f"A batch must be a pair (x, y) or a dict with labels, got {description}: wrap your data to yield pairs."
    )


def renumber(values: Tensor, mapping: Mapping[int, int], kind: str = "label") -> Tensor:
    """Map integers to new ones; the ignored label -100 stays. Raise ValueError for a value without an entry.

    >>> renumber(torch.tensor([[7, -100], [5, 7]]), {5: 0, 7: 1})
    tensor([[   1, -100],
            [   0,    1]])
    """
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"Class {kind}s must be integers, got {values.dtype}: use y.long().")
    values = values.long()

    # Look up each value in the sorted keys.
    sorted_keys = sorted(mapping)
    keys = torch.tensor(sorted_keys, device=values.device)
    numbers = torch.tensor([mapping[key] for key in sorted_keys], device=values.device)
    index = torch.searchsorted(keys, values).clamp(max=len(keys) - 1)
    is_known = keys[index] == values

    unknown = values[~is_known & (values != IGNORED_LABEL)].unique().tolist()
    if unknown:
        raise ValueError(
            f"The {kind} {unknown[0]} is not one of the task's: it has {', '.join(map(str, sorted_keys[:20]))}. "
            "Training and test data of a task have the same classes; where they come in batches, name them all with "
            "classes=…."
        )
    return torch.where(is_known, numbers[index], values)


def as_inputs(x: Any) -> Inputs:
    """Convert inputs to tensors: arrays and lists of numbers, and each member of a dict or tuple.

    >>> as_inputs(([[1.0, 2.0]], np.zeros((1, 3), int)))
    (tensor([[1., 2.]]), tensor([[0, 0, 0]]))
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        return {name: as_inputs(value) for name, value in x.items()}
    if not isinstance(x, (tuple, list)) or _is_number_list(x):
        return _as_tensor(x)
    if type(x) in (tuple, list):
        return type(x)(map(as_inputs, x))

    # Named tuples and other subclasses keep their type.
    return tree_map(_as_tensor, x)


def unlisted(x: Any) -> Any:
    """Convert an array or a list of numbers to a tensor; return anything else, such as a dict, unchanged."""
    if isinstance(x, np.ndarray) or _is_number_list(x):
        return _as_tensor(x)
    return x


def row_count(x: Any) -> int:
    """Count the examples in inputs: the length of the first tensor; options that are not tensors are skipped.

    >>> row_count({"return_dict": True, "input_ids": torch.zeros(3, 2)})
    3
    """
    leaves = tree_leaves(x)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    return len(next(tensors, leaves[0]))


def _is_number_list(value: Any) -> bool:
    """Whether a value is a row of numbers or a list of such rows; a tuple of lists is several inputs."""
    if not isinstance(value, (list, tuple)) or not len(value):
        return False
    if isinstance(value[0], Real):
        return True
    has_rows = isinstance(value, list) and all(isinstance(row, (list, tuple)) for row in value)
    return has_rows and _is_number_list(value[0])


def _are_similar_arrays(a: Any, b: Any) -> bool:
    """Whether two arrays have the same dtype and row shape, so that the second may also be inputs."""
    are_arrays = all(isinstance(value, (Tensor, np.ndarray)) and len(value.shape) > 1 for value in (a, b))
    return are_arrays and a.dtype == b.dtype and a.shape[1:] == b.shape[1:]


def _is_label_array(value: Any) -> bool:
    """Whether a value is an array or a list of numbers; a list of batches is neither."""
    is_number_list = isinstance(value, (list, range)) and len(value) > 0 and isinstance(value[0], Real)
    return is_number_list or isinstance(value, (Tensor, np.ndarray))


def _as_tensor(value: Any) -> Tensor:
    """Convert numbers to a tensor; numpy's default float64 becomes torch's default dtype. A tensor is unchanged."""
    if isinstance(value, Tensor):
        return value

    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            "Data and labels must be numbers, in rows of one length; got a "
            f"{type(value).__name__} of others: number the classes, pad rows."
        ) from None
    if tensor.dtype == torch.float64:
        return tensor.to(torch.get_default_dtype())
    return tensor
