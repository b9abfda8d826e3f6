"""A task: training, validation and test data, and the mask of allowed classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, Literal

import torch
from torch import Tensor

from everlearn.core.batch import Batch, Transform
from everlearn.core.data_source import Arrays, Batches, Rows, Source, as_source, renumber, row_count
from everlearn.core.likelihood import Categorical, Likelihood
from everlearn.core.scenario import SCENARIOS, Scenario
from everlearn.runtime import distributed
from everlearn.runtime.randomness import derive, generator, seeded

Split = Literal["train", "valid", "test"]


def allowed_classes(scenario: Scenario, classes: Sequence[Sequence[int]], current_task: int) -> Tensor | None:
    """Build the scenario mask (tasks × classes): whether an example of task t may be assigned class c.

    Task-incremental: the classes of task t. Class-incremental: the classes of all tasks begun so far.
    Domain-incremental: all classes, for which the mask is None.

    Args:
        scenario: "task", "domain" or "class".
        classes: the classes of each task.
        current_task: index of the current task.

    >>> allowed_classes("class", [[0, 1], [2, 3]], current_task=0)
    tensor([[ True,  True, False, False],
            [ True,  True, False, False]])
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"Unknown scenario {scenario!r}: it is one of {', '.join(SCENARIOS)}.")
    if scenario == "domain":
        return None

    num_classes = max(c for task_classes in classes for c in task_classes) + 1
    mask = torch.zeros(len(classes), num_classes, dtype=torch.bool)
    if scenario == "class":
        begun_classes = {c for task_classes in classes[: current_task + 1] for c in task_classes}
        mask[:, list(begun_classes)] = True
    else:
        for t, task_classes in enumerate(classes):
            mask[t, list(task_classes)] = True
    return mask


@dataclass(eq=False, repr=False)
class Task:
    """Data that is learned between ``begin_task`` and ``end_task``.

    Args:
        train: training data: a pair (x, y), a Dataset, a DataLoader or an iterable of batches.
        test: test data.
        valid: held-out data for choosing hyper-parameters.
        id: index of the task. Consecutive tasks with the same id are parts of one task (see ``streams.online``).
        name: name for messages and tables.
        allowed: the scenario mask while this task is current (see ``allowed_classes``).
        known_at_test: whether the task is known at test time.
        likelihood: the distribution that the model's outputs parameterize.
        transform: transform of training inputs, applied to a batch (augmentation).
        eval_transform: transform of inputs in evaluation and importance passes.
        steps: number of optimizer steps planned for this task; set by the trainer, optional in your own loop.
        part: index of this part, if a task comes in parts.
        workers: number of processes that load a Dataset.
        labels: label in the data of each output, if the stream has renumbered the labels; empty if outputs and labels
            are the same (see ``original_labels``).

    >>> task = Task((torch.rand(6, 2), torch.arange(6) % 2))
    >>> [len(batch) for batch in task.batches(4, epochs=2)]
    [4, 2, 4, 2]
    """

    train: Any = None
    test: Any = None
    valid: Any = None
    id: int | None = None
    name: str = ""
    allowed: Tensor | None = None
    known_at_test: bool = False
    likelihood: Likelihood = field(default_factory=Categorical)
    transform: Transform | None = None
    eval_transform: Transform | None = None
    steps: int | None = None
    part: int = 0
    workers: int = 0
    labels: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.allowed is not None and self.id is None:
            raise ValueError("A task with a table of allowed classes needs an id, which is its row in the table.")

        for split in ("train", "valid", "test"):
            data = getattr(self, split)
            if data is not None:
                source = as_source(data, self.workers)
                setattr(self, split, _convert_labels(source, self.likelihood))

    def __str__(self) -> str:
        if self.name:
            return self.name
        if self.id is None:
            return "the task"
        return f"task {self.id}"

    def __repr__(self) -> str:
        return summarize_task(self)

    def original_labels(self, predicted: Tensor) -> Tensor:
        """Convert predicted outputs, such as ``logits.argmax(-1)``, to the labels of the data before renumbering.

        >>> Task(labels={2: 0, 3: 1}).original_labels(torch.tensor([3, 2, 2]))
        tensor([1, 0, 0])
        """
        if not self.labels:
            return predicted
        return renumber(predicted, self.labels, "output")

    def batches(
        self, size: int, epochs: int = 1, iterations: int | None = None, seed: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Iterate over shuffled, augmented training batches.

        The order depends only on the seed, the task and the epoch: a second call yields the same batches.

        Args:
            size: batch size.
            epochs: number of passes over the data, if ``iterations`` is not given.
            iterations: number of batches.
            seed: seed of the order and of the augmentation.
            start: number of batches to skip.
        """
        # Complete epochs before ``start`` are not read. The user's own iterable is, since it may count its epochs.
        known_length = 0
        if not isinstance(self.train, Batches):
            known_length = self.steps_per_epoch(size) or 0
        skipped_epochs = 0
        if known_length:
            skipped_epochs = start // known_length
        skipped_batches = skipped_epochs * known_length

        if iterations is not None:
            epoch_batches = self._iterate_epochs(size, count(skipped_epochs), seed)
            yield from islice(epoch_batches, start - skipped_batches, iterations - skipped_batches)
        else:
            epoch_batches = self._iterate_epochs(size, range(skipped_epochs, epochs), seed)
            yield from islice(epoch_batches, start - skipped_batches, None)

    def _iterate_epochs(self, size: int, epochs: Iterable[int], seed: int) -> Iterator[Batch]:
        """Iterate over the batches of several epochs; raise ValueError if an epoch has none."""
        for epoch in epochs:
            is_empty = True
            for batch in self._iterate_epoch(size, epoch, seed):
                is_empty = False
                yield batch

            if is_empty and epoch:
                raise ValueError(
                    f"{self} has no examples to train on in epoch {epoch + 1}; a generator can be read once only: "
                    "give a list or a DataLoader."
                )
            if is_empty:
                raise ValueError(f"{self} has no examples to train on.")

    def examples(
        self, size: int, split: Split = "train", max_examples: int | None = None, shared: bool = False
    ) -> Iterator[Batch]:
        """Iterate over each example once, in order, under the evaluation transform.

        Args:
            size: batch size.
            split: which data.
            max_examples: number of examples to draw at random; of a DataLoader or iterable of batches, the first ones.
            shared: whether the examples are divided among the distributed processes.
        """
        source: Source | None = getattr(self, split)
        if source is None:
            raise ValueError(f"{self} has no {split} data.")

        order = None
        if max_examples is not None and not isinstance(source, Batches):
            order = torch.randperm(len(source), generator=generator(0, "examples", split))[:max_examples]

        batches: Iterator[Rows] = iter(())
        if not shared or distributed.world_size() == 1:
            batches = source.batches(size, order, derive(0, split))
        elif isinstance(source, Batches):
            # Each process takes every world_size-th batch, unless the loader has divided them already.
            if max_examples is not None:
                max_examples = -(-max_examples // distributed.world_size())
            batches = source.batches(size, order, derive(0, split))
            if not source.is_distributed:
                batches = islice(batches, distributed.rank(), None, distributed.world_size())
        else:
            # Each process takes every world_size-th example.
            if order is None:
                order = torch.arange(len(source))
            process_order = order[distributed.rank() :: distributed.world_size()]
            batches = source.batches(size, process_order, derive(0, split))
            max_examples = None

        num_examples = 0
        for rows in batches:
            batch = self._make_batch(rows, self.eval_transform)
            if max_examples is not None:
                batch = batch[: max_examples - num_examples]
            if len(batch):
                yield batch

            num_examples += len(batch)
            if num_examples == max_examples:
                return

    def planned_steps(self, size: int, epochs: int = 1, iterations: int | None = None) -> int | None:
        """Number of batches that ``batches`` yields; None if the data have no known length."""
        if iterations is not None:
            return iterations
        per_epoch = self.steps_per_epoch(size)
        if per_epoch is None:
            return None
        return epochs * per_epoch

    def steps_per_epoch(self, size: int) -> int | None:
        """Number of batches in one pass over the training data; None if it is unknown."""
        num_processes = distributed.world_size()
        try:
            if isinstance(self.train, Batches):
                num_batches = len(self.train.iterable)  # type: ignore[arg-type]
                if self.train.is_distributed:
                    return num_batches
                return num_batches // num_processes

            # A last batch counts if it has at least one example for each process.
            full_batches, remainder = divmod(len(self.train), size * num_processes)
            return full_batches + (remainder >= num_processes)
        except TypeError:
            return None

    def _iterate_epoch(self, size: int, epoch: int, seed: int) -> Iterator[Batch]:
        """Iterate over the batches of one epoch."""
        task_id = self.id
        if task_id is None:
            task_id = -1
        seed_key = (task_id, self.part, epoch)

        # Data that fit into one batch are not shuffled: their order does not matter.
        order = None
        is_parallel = distributed.world_size() > 1
        if not isinstance(self.train, Batches) and (is_parallel or len(self.train) > size):
            order = torch.randperm(len(self.train), generator=generator(seed, "batches", *seed_key))
            if is_parallel:
                order = distributed.shard_batches(order, size)

        # Arrays without a transform draw no random numbers.
        augmentation_seed = 0
        if self.transform is not None or not isinstance(self.train, Arrays):
            augmentation_seed = derive(seed, "augmentation", *seed_key)

        batches = self.train.batches(size, order, augmentation_seed)
        if is_parallel and isinstance(self.train, Batches) and not self.train.is_distributed:
            batches = _take_process_batches(batches)

        for i, rows in enumerate(batches):
            if self.transform is None:
                yield self._make_batch(rows, None, epoch)
                continue

            # Augmentation has its own random state, so that it does not change the model's random numbers.
            with seeded(derive(augmentation_seed, i)):
                batch = self._make_batch(rows, self.transform, epoch)
            yield batch

    def _make_batch(self, rows: Rows, transform: Transform | None, epoch: int = 0) -> Batch:
        """Create a Batch of a source's rows, with task indices, labels of the right type and transformed inputs."""
        x, y, t = rows
        if t is None and self.id is not None:
            t = torch.full((row_count(x),), self.id)
        if y is not None:
            y = self.likelihood.labels(y)

        if transform is None:
            return Batch(x, y, t, self.allowed, self.likelihood, epoch)
        return Batch(transform(x), y, t, self.allowed, self.likelihood, epoch, x, transform)


def as_task(data: Any, likelihood: Likelihood | None = None) -> Task:
    """Convert data to a task with this likelihood; a Task is returned unchanged."""
    if isinstance(data, Task):
        return data
    return Task(data, likelihood=likelihood or Categorical())


def _take_process_batches(batches: Iterator[Rows]) -> Iterator[Rows]:
    """Iterate over this process's share of the batches; incomplete rounds at the end are dropped."""
    while True:
        process_batches = list(islice(batches, distributed.world_size()))
        if len(process_batches) < distributed.world_size():
            return
        yield process_batches[distributed.rank()]


def describe_size(source: Source) -> str:
    """Format the number of examples, or "?" if it is unknown."""
    try:
        return f"{len(source):,}"
    except TypeError:
        return "?"


def _convert_labels(source: Source, likelihood: Likelihood) -> Source:
    """Convert the labels of arrays to the likelihood's dtype once, instead of in every batch."""
    if isinstance(source, Arrays) and source.y is not None:
        return replace(source, y=likelihood.labels(source.y))
    return source


def summarize_task(task: Task) -> str:
    """Format the name, the sizes of the splits and the classes of a task in one line."""
    sizes = []
    for split in ("train", "valid", "test"):
        source = getattr(task, split)
        if source is not None:
            sizes.append(f"{describe_size(source)} {split}")
    summary = f"{task}: {', '.join(sizes)}"

    if isinstance(task.train, Arrays) and task.train.y is not None and isinstance(task.likelihood, Categorical):
        classes = task.train.y.unique().tolist()
        summary += f", classes {' '.join(map(str, classes))}"
        if any(task.labels.get(c, c) != c for c in classes):
            summary += f" (labels {' '.join(str(task.labels[c]) for c in classes)})"
    return summary
