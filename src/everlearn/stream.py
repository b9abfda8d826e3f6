"""Streams: a list of tasks, and the one table that says which scenario they form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from everlearn import distributed
from everlearn.batch import Batch, Transform
from everlearn.data import Arrays, Batches, Rows, Source, as_source, join, renumber, row_count
from everlearn.likelihood import Categorical, Likelihood
from everlearn.seeds import derive, generator, seeded

Scenario = Literal["task", "domain", "class"]
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)
Split = Literal["train", "valid", "test"]


def allowed_classes(scenario: Scenario, classes: Sequence[Sequence[int]], now: int) -> Tensor | None:
    """The scenario as a table: may an example of task t (row) be called class c (column) once task ``now`` has begun?

    Task-incremental: the classes of task t. Class-incremental: those of all tasks begun so far. Domain-incremental:
    every class, which None stands for.

    >>> allowed_classes("class", [[0, 1], [2, 3]], now=0)
    tensor([[ True,  True, False, False],
            [ True,  True, False, False]])
    """
    if scenario not in SCENARIOS:
        raise ValueError(f"Unknown scenario {scenario!r}: it is one of {', '.join(SCENARIOS)}.")
    if scenario == "domain":
        return None
    table = torch.zeros(len(classes), max(c for own in classes for c in own) + 1, dtype=torch.bool)
    for t, own in enumerate(classes):
        table[t, list(own if scenario == "task" else {c for begun in classes[: now + 1] for c in begun})] = True
    return table


@dataclass(eq=False, repr=False)
class Task:
    """What is learned between one begin_task and its end_task.

    Args:
        train: the data to learn from: a pair (x, y), a Dataset, a DataLoader or an iterable of batches.
        test: the data to be tested on.
        valid: a share held back for choosing hyper-parameters.
        id: the task's number. Consecutive tasks with one id are parts of one task (see ``streams.online``).
        name: for people.
        allowed: the scenario's table once this task has begun (see ``allowed_classes``).
        identity: whether the task is known at test time.
        likelihood: what the model's outputs mean.
        transform: of training inputs, a batch at a time (augmentation).
        eval_transform: of inputs in tests and importance passes.
        steps: optimizer steps planned for this task; the trainer fills it in, your own loop may.
        part: which part of its task this is, where a task comes in parts.
        workers: processes that load a Dataset.
        labels: the label in the data that each output stands for, where the stream has renumbered them; empty where an
            output is the label itself (see ``original_labels``).

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
    identity: bool = False
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
            if getattr(self, split) is not None:
                setattr(self, split, _labelled(as_source(getattr(self, split), self.workers), self.likelihood))

    def __str__(self) -> str:
        return self.name or ("the task" if self.id is None else f"task {self.id}")

    def __repr__(self) -> str:
        return _summary(self)

    def original_labels(self, predicted: Tensor) -> Tensor:
        """Predicted outputs, such as ``logits.argmax(-1)``, as the labels that the data had before the stream renumbered them.

        >>> Task(labels={2: 0, 3: 1}).original_labels(torch.tensor([3, 2, 2]))
        tensor([1, 0, 0])
        """
        if not self.labels:
            return predicted
        return renumber(predicted, self.labels, "output")

    def batches(
        self, size: int, epochs: int = 1, iterations: int | None = None, seed: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """Batches for training: shuffled, augmented, for so many epochs or, if given, iterations.

        The order depends on the seed, the task and the epoch alone; call it again and you get the same batches. With ``start``,
        those after so many.
        """
        known = 0 if isinstance(self.train, Batches) else self.steps_per_epoch(size) or 0
        whole = start // known if known else 0  # epochs that need not be read; a loader of one's own may count them
        skipped = whole * known
        if iterations is not None:
            yield from islice(self._epochs(size, count(whole), seed), start - skipped, iterations - skipped)
        else:
            yield from islice(self._epochs(size, range(whole, epochs), seed), start - skipped, None)

    def _epochs(self, size: int, epochs: Iterable[int], seed: int) -> Iterator[Batch]:
        for epoch in epochs:
            served = 0
            for batch in self._epoch(size, epoch, seed):
                yield batch
                served += 1
            if not served:
                again = f" in epoch {epoch + 1}; a generator can be read once only: give a list or a DataLoader."
                raise ValueError(f"{self} has no examples to train on" + (again if epoch else "."))

    def examples(
        self, size: int, split: Split = "train", most: int | None = None, shared: bool = False
    ) -> Iterator[Batch]:
        """Every example once, in order, under the evaluation transform: for tests and importance passes.

        With ``most``, so many of them drawn at random; of ready-made batches the first. If ``shared``, each of several processes has
        its share of them.
        """
        source: Source | None = getattr(self, split)
        if source is None:
            raise ValueError(f"{self} has no {split} data.")
        order = None
        if most is not None and not isinstance(source, Batches):
            order = torch.randperm(len(source), generator=generator(0, "examples", split))[:most]
        batches: Iterator[Rows] = iter(())
        if not shared or distributed.world() == 1:
            batches = source.batches(size, order, derive(0, split))
        elif isinstance(source, Batches):
            most = most if most is None else -(-most // distributed.world())
            turns = (0, None) if source.shared_out else (distributed.rank(), None, distributed.world())
            batches = islice(source.batches(size, order, derive(0, split)), *turns)
        else:
            every = torch.arange(len(source)) if order is None else order
            batches = source.batches(size, every[distributed.rank() :: distributed.world()], derive(0, split))
            most = None
        seen = 0
        for rows in batches:
            batch = self._batch(rows, self.eval_transform)
            if most is not None:
                batch = batch[: most - seen]
            if len(batch):
                yield batch
            seen += len(batch)
            if seen == most:
                return

    def planned_steps(self, size: int, epochs: int = 1, iterations: int | None = None) -> int | None:
        """How many batches such a training has; None where the data do not tell their length."""
        if iterations is not None:
            return iterations
        per_epoch = self.steps_per_epoch(size)
        return None if per_epoch is None else epochs * per_epoch

    def steps_per_epoch(self, size: int) -> int | None:
        """Batches in one pass over the training data, None where nobody knows."""
        try:
            processes = distributed.world()
            if isinstance(self.train, Batches):
                return len(self.train.iterable) // (1 if self.train.shared_out else processes)  # type: ignore[arg-type]
            whole, rest = divmod(len(self.train), size * processes)
            return whole + (rest >= processes)
        except TypeError:
            return None

    def _epoch(self, size: int, epoch: int, seed: int) -> Iterator[Batch]:
        place = (-1 if self.id is None else self.id, self.part, epoch)
        order = None
        several = distributed.world() > 1
        if not isinstance(self.train, Batches) and (several or len(self.train) > size):
            order = torch.randperm(
                len(self.train), generator=generator(seed, "batches", *place)
            )  # in one batch no matter
            order = distributed.own_share(order, size) if several else order
        plain = self.transform is None and isinstance(self.train, Arrays)
        augmentation = 0 if plain else derive(seed, "augmentation", *place)
        batches = self.train.batches(size, order, augmentation)
        if several and isinstance(self.train, Batches) and not self.train.shared_out:
            batches = _every_so_many(batches)
        for i, rows in enumerate(batches):
            if self.transform is None:
                yield self._batch(rows, None, epoch)
            else:
                with seeded(derive(augmentation, i)):  # augmentation must not shift the model's own random numbers
                    batch = self._batch(rows, self.transform, epoch)
                yield batch

    def _batch(self, rows: Rows, transform: Transform | None, epoch: int = 0) -> Batch:
        x, y, t = rows
        if t is None and self.id is not None:
            t = torch.full((row_count(x),), self.id)
        y = y if y is None else self.likelihood.labels(y)
        if transform is None:
            return Batch(x, y, t, self.allowed, self.likelihood, epoch)
        return Batch(transform(x), y, t, self.allowed, self.likelihood, epoch, x, transform)


def as_task(data: Any, likelihood: Likelihood | None = None) -> Task:
    """A task as it is; anything else a task can learn from, as a task with this likelihood."""
    return data if isinstance(data, Task) else Task(data, likelihood=likelihood or Categorical())


@dataclass(eq=False, repr=False)
class Stream:
    """Tasks in the order they are learned, and the tests taken after each.

    Args:
        tasks: what is learned.
        scenario: which table they form.
        name: for people and file names.
        exams: what is tested; by default the tasks themselves.
        inputs: the shape of one input.
        outputs: how many outputs a model needs.
        settings: what the stream was made from, for the result's configuration.
        once: whether the data are meant to be seen in a single pass.
        merged: how many tasks were merged into one by ``joint``, whose training takes as many steps as theirs together.

    >>> from everlearn import streams
    >>> stream = streams.digits(scenario="class")
    >>> len(stream), stream.inputs, stream.outputs
    (5, (1, 8, 8), 10)
    """

    tasks: list[Task]
    scenario: Scenario
    name: str = "stream"
    exams: list[Task] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    once: bool = False
    merged: int = 1

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("A stream needs at least one task.")
        self.exams = self.exams or self.tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __getitem__(self, i: int) -> Task:
        return self.tasks[i]

    def joint(self) -> Stream:
        """All tasks learned at once, tested one by one: what forgetting is measured against."""
        last = self.exams[-1]
        for fact in ("transform", "eval_transform", "likelihood"):
            if any(getattr(t, fact) != getattr(last, fact) for t in self.tasks):
                raise ValueError(f"Tasks that differ in their {fact} cannot be learned as one.")
        everything = join([t.train for t in self.tasks], [0 if t.id is None else t.id for t in self.tasks])
        task = replace(last, train=everything, test=None, valid=None, id=0, name="all tasks", steps=None)
        task.labels = {} if self.scenario == "domain" else {o: c for t in self.tasks for o, c in t.labels.items()}
        settings = {**self.settings, "joint": True}
        return replace(self, tasks=[task], exams=self.exams, settings=settings, merged=self.merged * len(self.tasks))

    def first(self, tasks: int) -> Stream:
        """The first tasks alone, to choose hyper-parameters on before the others are known.

        >>> from everlearn import streams
        >>> len(streams.digits(scenario="class").first(2))
        2
        """
        if not 1 <= tasks <= len(self.exams):
            raise ValueError(
                f"{self.name} has {len(self.exams)} tasks: take 1 to {len(self.exams)} of them, got {tasks}."
            )
        exams = self.exams[:tasks]
        ids = {exam.id for exam in exams}
        kept = exams if self.exams is self.tasks else [task for task in self.tasks if task.id in ids]
        return replace(self, tasks=kept, exams=exams, settings={**self.settings, "first": tasks})

    def foreseen(self) -> Stream:
        """The same, with every class allowed from the first task on that is allowed at the end.

        Class-incremental learning is published in both ways; in this one a model can be wrong about classes it has not met.

        >>> from everlearn import streams
        >>> streams.digits(scenario="class").foreseen()[0].allowed[0].sum()
        tensor(10)
        """
        tasks = [replace(t, allowed=self.exams[-1].allowed) for t in self.tasks]
        exams = tasks if self.exams is self.tasks else [replace(t, allowed=self.exams[-1].allowed) for t in self.exams]
        return replace(self, tasks=tasks, exams=exams, settings={**self.settings, "foreseen": True})

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {len(self)} task{'s' * (len(self) > 1)}, {self.scenario}-incremental, {self.outputs} outputs"
        ]
        lines += [f"  {_summary(task)}" for task in self.tasks[:20]]
        return "\n".join(lines + ["  …"] * (len(self) > 20))

    __repr__ = __str__


def _every_so_many(batches: Iterator[Rows]) -> Iterator[Rows]:
    """Of ready-made batches those of this process; the last ones only if there is one for every process."""
    while len(turn := list(islice(batches, distributed.world()))) == distributed.world():
        yield turn[distributed.rank()]


def _summary(task: Task) -> str:
    sizes = ", ".join(
        f"{_size(source)} {split}"
        for split in ("train", "valid", "test")
        if (source := getattr(task, split)) is not None
    )
    classes = ""
    if isinstance(task.train, Arrays) and task.train.y is not None and isinstance(task.likelihood, Categorical):
        present = task.train.y.unique().tolist()
        classes = f", classes {' '.join(map(str, present))}"
        if any(task.labels.get(c, c) != c for c in present):
            classes += f" (labels {' '.join(str(task.labels[c]) for c in present)})"
    return f"{task}: {sizes}{classes}"


def _size(source: Source) -> str:
    try:
        return f"{len(source):,}"
    except TypeError:
        return "?"


def _labelled(source: Source, likelihood: Likelihood) -> Source:
    """Arrays get their labels in the right dtype once, not batch by batch."""
    if isinstance(source, Arrays) and source.y is not None:
        return replace(source, y=likelihood.labels(source.y))
    return source
