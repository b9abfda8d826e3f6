"""Any stream in small chunks that come once."""

from __future__ import annotations

from dataclasses import replace

import torch

from everlearn.data import Batches
from everlearn.seeds import generator
from everlearn.stream import Stream
from everlearn.streams.parts import part


def online(stream: Stream, *, chunk: int = 10, seed: int = 0) -> Stream:
    """The same tasks in small chunks that come once: a method sees a chunk's begin and end, never a whole task.

    Chunks keep their task's number: tests are taken, and a fresh optimizer is made, when the task changes. Train with
    ``epochs=1`` for a single pass.

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
    for place, task in enumerate(stream):
        if isinstance(task.train, Batches):
            raise TypeError("An online stream is cut from arrays or a Dataset; a DataLoader comes in batches already.")
        order = torch.randperm(len(task.train), generator=generator(seed, "stream", "online", place))
        chunks += [
            replace(task, train=part(task.train, i), valid=None, test=None, name=f"{task}, chunk {k}", part=k)
            for k, i in enumerate(order.split(chunk))
        ]
    settings = {**stream.settings, "chunk": chunk}
    name = f"online-{stream.name}"
    return replace(stream, tasks=chunks, exams=stream.exams, name=name, settings=settings, once=True)
