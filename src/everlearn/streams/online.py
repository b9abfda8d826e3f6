"""Online streams: the tasks of any stream in small chunks, each seen once."""

from __future__ import annotations

from dataclasses import replace

import torch

from everlearn.core.data_source import Batches
from everlearn.core.stream import Stream
from everlearn.runtime.randomness import generator
from everlearn.streams.subset import derive_source


def online(stream: Stream, *, chunk: int = 10, seed: int = 0) -> Stream:
    """Cut the tasks of a stream into small chunks, so that a method never has the data of a complete task.

    Hooks for the begin and end of a task are called for each chunk. Chunks keep the id of their task: the model is
    evaluated, and the optimizer is created again, when the id changes. Train with ``epochs=1`` for a single pass.

    Args:
        stream: stream of arrays or Datasets.
        chunk: examples per chunk.
        seed: seed of the order of the examples within each task.

    >>> from everlearn.streams import split
    >>> x, y = torch.rand(12, 3), torch.arange(12) % 4
    >>> print(online(split((x, y), (x, y), tasks=2), chunk=4))
    online-split: 4 tasks, class-incremental, 4 outputs
      task 0, chunk 0: 4 train, classes 0 1
      task 0, chunk 1: 2 train, classes 0 1
      task 1, chunk 0: 4 train, classes 2 3
      task 1, chunk 1: 2 train, classes 2 3
    """
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk must be a whole number of at least 1 example, got {chunk}.")

    chunks = []
    for position, task in enumerate(stream):
        if isinstance(task.train, Batches):
            raise TypeError("An online stream is cut from arrays or a Dataset; a DataLoader comes in batches already.")
        order = torch.randperm(len(task.train), generator=generator(seed, "stream", "online", position))
        for k, index in enumerate(order.split(chunk)):
            train = derive_source(task.train, index)
            chunks.append(replace(task, train=train, valid=None, test=None, name=f"{task}, chunk {k}", part=k))

    return replace(
        stream,
        tasks=chunks,
        test_tasks=stream.test_tasks,
        name=f"online-{stream.name}",
        settings={**stream.settings, "chunk": chunk},
        single_pass=True,
    )
