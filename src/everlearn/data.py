"""Where examples come from: arrays in memory, a Dataset, or ready-made batches, behind one small interface.

A source yields batches ``(x, y)`` or ``(x, y, t)`` with t the task of each example. Arrays are indexed by batch;
a Dataset goes through a DataLoader; a DataLoader or another iterable is taken as it is, batches and order included.
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

from everlearn.seeds import derive, generator, reseed, seeded

Inputs = Any  # a tensor, or a dict or tuple of tensors that all have one row per example
Rows = tuple[Inputs, Tensor | None, Tensor | None]


class Source(Protocol):
    """What a task learns from or is tested on."""

    def __len__(self) -> int:
        """The number of examples; raises TypeError where nobody knows."""

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """The examples once, in the given order (None: as they lie); ``seed`` drives the source's own randomness."""


@dataclass(eq=False)
class Arrays:
    """Examples in memory, indexed by batch.

    Args:
        x: inputs, one row per example.
        y: labels, or None for unlabelled examples.
        t: the task of each example, where one source holds several tasks.
        view: how this task sees the inputs (a permutation, a rotation), applied batch by batch so that tasks share
            the memory of the arrays they look at.
    """

    x: Inputs
    y: Tensor | None = None
    t: Tensor | None = None
    view: Callable[[Inputs], Inputs] | None = None

    def __post_init__(self) -> None:
        lengths = {len(v) for v in tree_leaves((self.x, self.y, self.t)) if v is not None}
        if len(lengths) != 1:
            raise ValueError(f"Inputs and labels differ in length: {sorted(lengths)}; give one label per example.")

    def __len__(self) -> int:
        return row_count(self.x)

    def rows(self, index: Tensor | slice) -> Rows:
        """The examples at these places; a slice is not copied."""
        x = self.x[index] if isinstance(self.x, Tensor) else tree_map(lambda v: v[index], self.x)
        return (
            x if self.view is None else self.view(x),
            None if self.y is None else self.y[index],
            None if self.t is None else self.t[index],
        )

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """Rows of the arrays."""
        if order is None:
            return (self.rows(slice(i, i + size)) for i in range(0, len(self), size))
        return (self.rows(i) for i in order.split(size))

    def subset(self, index: Tensor) -> Arrays:
        """Some of the examples; arrays are copied, so that a small part does not keep the whole alive."""
        x = tree_map(lambda v: v[index], self.x)
        return Arrays(
            x, None if self.y is None else self.y[index], None if self.t is None else self.t[index], self.view
        )


@dataclass(eq=False)
class Joined:
    """Several arrays as one, each seen through its own view and labelled with its task."""

    parts: Sequence[Arrays]
    tasks: Sequence[int]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """Batches in which the parts are mixed as the order says."""
        index = torch.arange(len(self)) if order is None else order
        ends = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        return (self._rows(i, ends) for i in index.split(size))

    def _rows(self, index: Tensor, ends: Tensor) -> Rows:
        owner = torch.bucketize(index, ends, right=True)
        present = owner.unique().tolist()
        where = [(owner == k).nonzero().flatten() for k in present]
        starts = [int(ends[k]) - len(self.parts[k]) for k in present]
        rows = [self.parts[k].rows(index[w] - s) for k, w, s in zip(present, where, starts, strict=True)]
        back = torch.cat(where).argsort()  # the parts' rows one after another, put back into the order asked for
        x = tree_map(lambda *v: torch.cat(v)[back], *(x for x, _, _ in rows))
        y = torch.cat([y for _, y, _ in rows if y is not None])[back]
        return x, y, torch.tensor(self.tasks)[owner]


@dataclass(eq=False)
class Items:
    """A map-style ``torch.utils.data.Dataset`` of ``(x, y)``, loaded by worker processes.

    Every example is drawn under a random state of its own, so random transforms inside the dataset give the same
    result whatever the number of workers.
    """

    dataset: Dataset[Any]
    workers: int = 0
    marked: bool = False  # items are (x, y, task)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """Batches collated by torch's default rule."""
        index = torch.arange(len(self)) if order is None else order
        keys = [(i, derive(seed, place)) for place, i in enumerate(index.tolist())]
        loader = DataLoader(
            _Drawn(self.dataset),
            batch_sampler=[keys[i : i + size] for i in range(0, len(keys), size)],
            num_workers=self.workers,
            generator=generator(seed),  # or it would draw from the global one
        )
        return (as_rows(batch, self.marked) for batch in loader)


@dataclass(eq=False)
class Batches:
    """A DataLoader or any other iterable of batches; its own batch size and order stand.

    Args:
        iterable: of batches as ``as_rows`` takes them.
        rename: the output that each label stands for, where labels are not outputs already.
    """

    iterable: Iterable[Any]
    rename: Mapping[int, int] | None = None

    def __len__(self) -> int:
        if isinstance(self.iterable, DataLoader):
            return len(self.iterable.dataset)  # type: ignore[arg-type]
        if isinstance(self.iterable, Sequence):
            return sum(row_count(as_rows(batch)[0]) for batch in self.iterable)
        raise TypeError("An iterable of batches does not tell its length.")

    @property
    def shared_out(self) -> bool:
        """Whether it gives every process its own share already: by a DistributedSampler, or what Accelerate puts in its place."""
        samplers = [getattr(self.iterable, name, None) for name in ("sampler", "batch_sampler")]
        samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
        return any(hasattr(s, "num_replicas") or hasattr(s, "num_processes") for s in samplers)

    @property
    def generators(self) -> set[int]:
        """Which random generators of its own it draws from, by their ids."""
        places = [self.iterable, getattr(self.iterable, "sampler", None), getattr(self.iterable, "batch_sampler", None)]
        return {id(g) for place in places if (g := getattr(place, "generator", None)) is not None}

    def batches(self, size: int, order: Tensor | None, seed: int) -> Iterator[Rows]:
        """The iterable's own batches; whatever it draws at random (a DataLoader's order) follows the given seed."""
        batches: Iterator[Any] = iter(())
        for place in count():
            with seeded(derive(seed, place)):
                batches = batches if place else iter(self.iterable)
                batch = next(batches, None)
            if batch is None:
                return
            x, y, t = as_rows(batch)
            yield x, y if y is None or self.rename is None else renumber(y, self.rename), t


class _Drawn(Dataset[Any]):
    """A dataset whose every item is drawn under the random state its key names."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        with seeded(0):  # the state outside is saved once a batch
            return [self._draw(index, seed) for index, seed in keys]

    def _draw(self, index: int, seed: int) -> Any:
        reseed(seed)
        return self.dataset[index]


def as_source(data: Any, workers: int = 0) -> Source:
    """Whatever people have as a source.

    ``data`` may be a source, inputs alone, a pair ``(x, y)`` of tensors or numpy arrays, a Dataset, a DataLoader, or
    an iterable of batches ``(x, y)``.

    >>> len(as_source((np.zeros((5, 2)), np.arange(5))))
    5
    """
    if isinstance(data, (Arrays, Joined, Items, Batches)):
        return data
    if isinstance(data, (Tensor, np.ndarray)):
        return Arrays(_tensor(data))
    if isinstance(data, DataLoader):
        return Batches(data)
    if isinstance(data, IterableDataset):
        raise TypeError("An IterableDataset has no batches of its own: wrap it, DataLoader(dataset, batch_size=…).")
    if isinstance(data, Dataset):
        return Items(data, workers)
    if isinstance(data, list) and len(data) == 2 and _are_alike(*data):
        raise TypeError(
            "A list of two arrays of one kind may be a pair (x, y) or two batches: give a tuple for a pair, iter(…) for batches."
        )
    if isinstance(data, (tuple, list)) and len(data) == 2 and _are_labels(data[1]):
        return Arrays(as_inputs(data[0]), _tensor(data[1]))
    if isinstance(data, list) and data and isinstance(data[0], list) and _are_labels(data[0]):  # rows of numbers
        return Arrays(_tensor(data))
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping)):
        return Batches(data)
    raise TypeError(
        f"Cannot learn from a {type(data).__name__}: give a pair (x, y) of tensors or arrays, a Dataset, a DataLoader "
        "or an iterable of batches (x, y)."
    )


def join(sources: Sequence[Source], tasks: Sequence[int]) -> Source:
    """Several tasks' sources as one, every example labelled with its task."""
    arrays = [s for s in sources if isinstance(s, Arrays)]
    if len(arrays) == len(sources):
        return Joined(arrays, tasks)
    items = [s for s in sources if isinstance(s, Items)]
    if len(items) == len(sources):
        workers = max(s.workers for s in items)
        marked: list[Dataset[Any]] = [_Marked(s.dataset, t) for s, t in zip(items, tasks, strict=True)]
        return Items(ConcatDataset(marked), workers, marked=True)
    kinds = ", ".join(sorted({type(s).__name__ for s in sources}))
    raise TypeError(f"Tasks can be learned as one when all are arrays or all are Datasets; these are {kinds}.")


class _Marked(Dataset[Any]):
    """A dataset of (x, y) as one of (x, y, task)."""

    def __init__(self, dataset: Dataset[Any], task: int) -> None:
        self.dataset, self.task = dataset, task

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        x, y = self.dataset[index]
        return x, y, self.task


def inputs_alone(batch: Inputs) -> Inputs:
    """The inputs of a batch that is a dict with labels among them; other inputs as they are."""
    return {name: v for name, v in batch.items() if name != "labels"} if isinstance(batch, Mapping) else batch


def as_rows(batch: Any, marked: bool = False) -> Rows:
    """A batch as people have them: (x, y), inputs alone, or a dict of tensors with the labels among them, as Hugging Face has it.

    >>> as_rows({"input_ids": torch.zeros(2, 5), "labels": torch.tensor([0, 1])})[1]
    tensor([0, 1])
    """
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
        return as_inputs(inputs_alone(batch)), None if labels is None else _tensor(labels), None
    if isinstance(batch, (tuple, list)) and len(batch) == 2 + marked:
        x, y, *t = batch
        labels = _tensor(y)
        if not labels.dim():
            raise TypeError("The data come one example at a time, not in batches: give the DataLoader a batch_size.")
        return as_inputs(x), labels, _tensor(t[0]) if t else None
    if isinstance(batch, (tuple, list)) and len(batch) == 1:  # inputs alone, as a TensorDataset gives them
        return as_inputs(batch[0]), None, None
    if isinstance(batch, (Tensor, np.ndarray)):
        return _tensor(batch), None, None
    kind = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
    raise TypeError(f"A batch must be a pair (x, y) or a dict with labels, got {kind}: wrap your data to yield pairs.")


def renumber(values: Tensor, mapping: Mapping[int, int], kind: str = "label") -> Tensor:
    """Whole numbers under a mapping that must know them all; -100, the label that is ignored, stays.

    >>> renumber(torch.tensor([[7, -100], [5, 7]]), {5: 0, 7: 1})
    tensor([[   1, -100],
            [   0,    1]])
    """
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"Class {kind}s must be integers, got {values.dtype}: use y.long().")
    values = values.long()
    known = torch.tensor(sorted(mapping), device=values.device)
    numbers = torch.tensor([mapping[k] for k in sorted(mapping)], device=values.device)
    index = torch.searchsorted(known, values).clamp(max=len(known) - 1)
    found = known[index] == values
    if unknown := values[~found & (values != -100)].unique().tolist():
        raise ValueError(
            f"The {kind} {unknown[0]} is not one of the task's: it has {', '.join(map(str, sorted(mapping)[:20]))}. Training "
            "and test data of a task have the same classes; where they come in batches, name them all with classes=…."
        )
    return torch.where(found, numbers[index], values)


def as_inputs(x: Any) -> Inputs:
    """Inputs as tensors: arrays and lists of numbers are converted, a dict or tuple of them each for itself.

    >>> as_inputs(([[1.0, 2.0]], np.zeros((1, 3), int)))
    (tensor([[1., 2.]]), tensor([[0, 0, 0]]))
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        return {name: as_inputs(v) for name, v in x.items()}
    if isinstance(x, (tuple, list)) and not _are_numbers(x):
        return type(x)(map(as_inputs, x)) if type(x) in (tuple, list) else tree_map(_tensor, x)
    return _tensor(x)


def unlisted(x: Any) -> Any:
    """An array or a list of numbers as a tensor; anything else, such as a dict with options among its tensors, as it is."""
    return _tensor(x) if isinstance(x, np.ndarray) or _are_numbers(x) else x


def row_count(x: Any) -> int:
    """How many examples inputs hold: the length of the first tensor among them, whatever options stand beside it.

    >>> row_count({"return_dict": True, "input_ids": torch.zeros(3, 2)})
    3
    """
    leaves = tree_leaves(x)
    return len(next((v for v in leaves if isinstance(v, Tensor) and v.dim()), leaves[0]))


def _are_numbers(value: Any) -> bool:
    """Whether it is a row of numbers, or a list of such rows; a tuple of lists is several inputs."""
    if not isinstance(value, (list, tuple)) or not len(value):
        return False
    if isinstance(value[0], Real):
        return True
    return isinstance(value, list) and all(isinstance(row, (list, tuple)) for row in value) and _are_numbers(value[0])


def _are_alike(a: Any, b: Any) -> bool:
    """Whether the second could as well be more inputs."""
    arrays = all(isinstance(v, (Tensor, np.ndarray)) and len(v.shape) > 1 for v in (a, b))
    return arrays and a.dtype == b.dtype and a.shape[1:] == b.shape[1:]


def _are_labels(value: Any) -> bool:
    """An array, or a list of numbers; a list of batches is something else."""
    numbers = isinstance(value, (list, range)) and len(value) > 0 and isinstance(value[0], Real)
    return numbers or isinstance(value, (Tensor, np.ndarray))


def _tensor(value: Any) -> Tensor:
    """Numpy's float64 becomes torch's default, because numpy makes it unasked; a tensor stays what it is."""
    if isinstance(value, Tensor):
        return value
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"Data and labels must be numbers, in rows of one length; got a {type(value).__name__} of others: number the classes, pad rows."
        ) from None
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor
