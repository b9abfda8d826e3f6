"""Streams: tasks in the order of training, and their scenario."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from everlearn.core.data_source import join
from everlearn.core.scenario import Scenario
from everlearn.core.task import Task, summarize_task


@dataclass(eq=False, repr=False)
class Stream:
    """Tasks in the order of training, and the tasks that are tested after each.

    Args:
        tasks: tasks to train on.
        scenario: "task", "domain" or "class" (see ``allowed_classes``).
        name: name for messages and files.
        test_tasks: tasks to test on; by default the training tasks.
        inputs: shape of one input.
        outputs: number of outputs that a model needs.
        settings: configuration of the stream, recorded in the result.
        single_pass: whether the data are intended for a single pass.
        merged: number of tasks that ``joint`` merged into one; its training takes as many steps as theirs in total.

    >>> from everlearn import streams
    >>> stream = streams.digits(scenario="class")
    >>> len(stream), stream.inputs, stream.outputs
    (5, (1, 8, 8), 10)
    """

    tasks: list[Task]
    scenario: Scenario
    name: str = "stream"
    test_tasks: list[Task] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    single_pass: bool = False
    merged: int = 1

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("A stream needs at least one task.")
        self.test_tasks = self.test_tasks or self.tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __getitem__(self, i: int) -> Task:
        return self.tasks[i]

    def joint(self) -> Stream:
        """Merge all tasks into one for joint training; they are still tested separately."""
        last = self.test_tasks[-1]
        for attribute in ("transform", "eval_transform", "likelihood"):
            if any(getattr(task, attribute) != getattr(last, attribute) for task in self.tasks):
                raise ValueError(f"Tasks that differ in their {attribute} cannot be learned as one.")

        task_ids = [0 if task.id is None else task.id for task in self.tasks]
        train = join([task.train for task in self.tasks], task_ids)
        joint_task = replace(last, train=train, test=None, valid=None, id=0, name="all tasks", steps=None)

        # In the domain scenario an output stands for a different label in each task.
        joint_task.labels = {}
        if self.scenario != "domain":
            for task in self.tasks:
                joint_task.labels.update(task.labels)

        return replace(
            self,
            tasks=[joint_task],
            test_tasks=self.test_tasks,
            settings={**self.settings, "joint": True},
            merged=self.merged * len(self.tasks),
        )

    def first(self, tasks: int) -> Stream:
        """Keep only the first tasks, for example to choose hyper-parameters before the others are available.

        >>> from everlearn import streams
        >>> len(streams.digits(scenario="class").first(2))
        2
        """
        if not 1 <= tasks <= len(self.test_tasks):
            raise ValueError(
                f"{self.name} has {len(self.test_tasks)} tasks: take 1 to {len(self.test_tasks)} of them, got {tasks}."
            )

        # A test task corresponds to all training tasks with its id.
        test_tasks = self.test_tasks[:tasks]
        train_tasks = test_tasks
        if self.test_tasks is not self.tasks:
            test_ids = {task.id for task in test_tasks}
            train_tasks = [task for task in self.tasks if task.id in test_ids]
        return replace(self, tasks=train_tasks, test_tasks=test_tasks, settings={**self.settings, "first": tasks})

    def with_all_classes(self) -> Stream:
        """Allow from the first task on all classes that are allowed at the end.

        Class-incremental results are published in both ways. Here a model can also predict classes of future tasks.

        >>> from everlearn import streams
        >>> streams.digits(scenario="class").with_all_classes()[0].allowed[0].sum()
        tensor(10)
        """
        final_mask = self.test_tasks[-1].allowed
        tasks = [replace(task, allowed=final_mask) for task in self.tasks]
        test_tasks = tasks
        if self.test_tasks is not self.tasks:
            test_tasks = [replace(task, allowed=final_mask) for task in self.test_tasks]
        return replace(self, tasks=tasks, test_tasks=test_tasks, settings={**self.settings, "all_classes": True})

    def __str__(self) -> str:
        plural = "s" * (len(self) > 1)
        lines = [f"{self.name}: {len(self)} task{plural}, {self.scenario}-incremental, {self.outputs} outputs"]
        lines += [f"  {summarize_task(task)}" for task in self.tasks[:20]]
        if len(self) > 20:
            lines.append("  …")
        return "\n".join(lines)

    __repr__ = __str__
