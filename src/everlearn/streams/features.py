"""Streams of features: what a frozen model computes of each example, once, cached on disk."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from everlearn.core.batch import Batch
from everlearn.core.data_source import Arrays, Items
from everlearn.core.forward import arguments, forward
from everlearn.core.parameters import evaluating, unwrap
from everlearn.core.stream import Stream
from everlearn.core.task import Split, Task
from everlearn.results.provenance import version
from everlearn.runtime import files
from everlearn.runtime.fingerprint import fingerprint, fingerprint_model
from everlearn.surgery.features import compute_features, computes_outputs
from everlearn.surgery.heads import output_layer
from everlearn.trainer.settings import device_of, hide_bar

SPLITS: tuple[Split, ...] = ("train", "valid", "test")

# Features of this size or less are read into memory, larger ones are memory-mapped.
MAX_MEMORY_BYTES = 2**28

# Features, labels and task indices of a batch.
FeatureRows = tuple[Tensor, Tensor | None, Tensor | None]

file_digest = partial(hashlib.blake2b, digest_size=16)


def features(
    model: nn.Module,
    stream: Stream,
    *,
    output: str | None = None,
    encoder: bool = False,
    folder: str | Path | None = None,
    batch_size: int = 64,
    progress: bool | None = None,
) -> Stream:
    """Replace the inputs of a stream by the features that a frozen model computes of them.

    The features are the inputs of the model's output layer, or the outputs of a model that has none
    (``encoder=True``), in evaluation mode and under the tasks' evaluation transform. They are computed once: a
    further call reads them from files, one for each task and split, which are named by hashes of the model and of the
    data. An interrupted call continues with the first unfinished file. Features of more than 256 MB are memory-mapped.

    A hash of a Dataset does not include files that it reads: if these have changed, give another folder. Compute the
    features before ``streams.online`` cuts the tasks into chunks.

    Args:
        model: any module; it is not changed.
        stream: the stream, without augmentation (``transform``), since each example has its features once.
        output: name of the output layer; by default the last ``nn.Linear``, if it computes the model's outputs.
        encoder: whether the features are the outputs of the model, which has no output layer then.
        folder: folder of the files; by default "features" in the folder EVERLEARN_CACHE, or in ~/.cache/everlearn.
        batch_size: examples per forward pass.
        progress: show a progress bar; by default on a terminal only.

    >>> import tempfile
    >>> from everlearn import nets, streams
    >>> digits = streams.digits(scenario="class")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stream = features(nets.mlp(digits.inputs, 10, hidden=(32,)), digits, folder=folder)
    >>> stream.name, stream.inputs, stream.outputs
    ('digits-features', (32,), 10)
    """
    if encoder and output is not None:
        raise ValueError(
            f"The features are either the outputs of an encoder (encoder=True) or the inputs of the layer {output!r} "
            "(output=…): give one of them."
        )
    tasks = [*stream.tasks, *stream.test_tasks]
    for task in tasks:
        if task.transform is not None:
            raise ValueError(
                f"{task} augments its training inputs (transform=…), but each example has its features once: build the "
                "stream without transform."
            )

    layer = None if encoder else _find_output_layer(model, output)
    model_digest = fingerprint_model(model)
    backbone = {"model": type(unwrap(model)).__name__, "digest": model_digest, "output": layer}
    cache_folder = files.writable_folder(folder or default_folder()) / f"{backbone['model']}-{model_digest}"

    with torch.no_grad(), evaluating(model), _progress_bar(tasks, stream.name, progress) as bar:
        extraction = _Extraction(model, model_digest, layer, output is None, cache_folder, batch_size, bar)
        converted = {id(task): extraction.convert(task) for task in dict.fromkeys(tasks)}

    train_tasks = [converted[id(task)] for task in stream.tasks]
    test_tasks = train_tasks
    if stream.test_tasks is not stream.tasks:
        test_tasks = [converted[id(task)] for task in stream.test_tasks]
    return replace(
        stream,
        tasks=train_tasks,
        test_tasks=test_tasks,
        name=f"{stream.name}-features",
        inputs=tuple(train_tasks[0].train.x.shape[1:]),
        settings={**stream.settings, "backbone": backbone},
    )


def default_folder() -> Path:
    """Return the folder of cached features: in EVERLEARN_CACHE, or in the user's cache folder."""
    cache = os.environ.get("EVERLEARN_CACHE")
    if cache:
        return Path(cache) / "features"
    return Path.home() / ".cache" / "everlearn" / "features"


def _find_output_layer(model: nn.Module, output: str | None) -> str:
    try:
        name, _ = output_layer(model, output)
    except ValueError as error:
        raise ValueError(f"{error} If the outputs of the model are the features, give encoder=True.") from None
    return name


def _progress_bar(tasks: list[Task], name: str, progress: bool | None) -> tqdm[Any]:
    sources = [getattr(task, split) for task in dict.fromkeys(tasks) for split in SPLITS]
    try:
        total = sum(len(source) for source in sources if source is not None)
    except TypeError:  # an iterable of unknown length
        total = None
    return tqdm(total=total, desc=f"features of {name}", unit="example", leave=False, disable=hide_bar(progress))


@dataclass
class _Extraction:
    """Computation of the features of a stream, and their files.

    Args:
        model: the model.
        model_digest: its hash, or None if it cannot be hashed.
        layer: name of the output layer; None for an encoder.
        is_guessed: whether the output layer was found, not named.
        folder: folder of the model's files.
        batch_size: examples per forward pass.
        bar: progress bar of the examples.
    """

    model: nn.Module
    model_digest: str | None
    layer: str | None
    is_guessed: bool
    folder: Path
    batch_size: int
    bar: tqdm[Any]

    def convert(self, task: Task) -> Task:
        """Replace the data of a task by features."""
        converted = replace(task, eval_transform=None, workers=0)
        for split in SPLITS:
            if getattr(task, split) is not None:
                setattr(converted, split, self._read_or_compute(task, split))
        return converted

    def _read_or_compute(self, task: Task, split: Split) -> Arrays:
        """Read the features of a split, or compute and write them if there are none."""
        source = getattr(task, split)
        if isinstance(source, Items):
            source = replace(source, workers=0)  # the number of processes does not change the data
        settings = [version(), torch.__version__, torch.get_default_dtype(), self.layer]
        key = fingerprint([settings, task.eval_transform, task.likelihood, source])
        if key is None or self.model_digest is None:
            warnings.warn(
                f"The model or the {split} data of {task} cannot be hashed, so its features are not kept on disk: they "
                "are computed in every call. Give arrays, a Dataset or a DataLoader.",
                stacklevel=5,
            )
            return _collect(self._compute(task, split), task)

        path = files.writable_folder(self.folder) / f"{key}.bin"
        # A second process waits and reads what the first has computed.
        with files.locked(path):
            stored = _read(path)
            if stored is None:
                _write(path, self._compute(task, split), task)
                stored = _read(path)
            else:
                self.bar.update(len(stored))
        if stored is None:
            raise OSError(f"The features in {path} cannot be read back: check the disk, or give another folder.")
        return stored

    def _compute(self, task: Task, split: Split) -> Iterator[FeatureRows]:
        """Compute features batch by batch, with their labels and task indices on the CPU."""
        is_empty = True
        for batch in task.examples(self.batch_size, split):
            is_empty = False
            device_batch = batch.to(device_of(self.model))
            if self.is_guessed and self.layer is not None:
                self._check_output_layer(device_batch, self.layer)
                self.is_guessed = False

            rows = self._forward(device_batch).to("cpu", torch.get_default_dtype())
            if rows.dim() != 2 or len(rows) != len(batch):
                raise ValueError(
                    f"Features must be one vector per example, of shape ({len(batch)}, features); the model gave "
                    f"{tuple(rows.shape)}: pool them inside the model, or name the right layer with output=…."
                )
            if not rows.isfinite().all():
                raise FloatingPointError(
                    f"The features of the {split} data of {task} are not all finite: check the inputs and the model."
                )

            yield rows, batch.y, batch.t
            self.bar.update(len(batch))
        if is_empty:
            raise ValueError(f"{task} has no {split} examples: leave them out, or give None.")

    def _forward(self, batch: Batch) -> Tensor:
        # Features that are kept must not depend on an autocast around this call.
        with torch.autocast(device_of(self.model).type, enabled=False):
            if self.layer is None:
                return forward(self.model, batch.x)
            args, kwargs = arguments(self.model, batch.x)
            return compute_features(unwrap(self.model), self.layer, *args, **kwargs)

    def _check_output_layer(self, batch: Batch, layer: str) -> None:
        """Raise if the last linear layer does not compute the outputs of the model."""
        if not computes_outputs(self.model, layer, batch[:2].x):
            raise ValueError(
                f"The last linear layer, {layer!r}, does not compute the outputs of {type(self.model).__name__}: name "
                "the output layer, output=…, or give encoder=True if the outputs of the model are the features."
            )


def _write(path: Path, batches: Iterator[FeatureRows], task: Task) -> None:
    """Write features batch by batch, so that they need not fit into memory; labels and checksum are written last."""
    for unfinished in files.unfinished_files(path):
        unfinished.unlink(missing_ok=True)

    digest = file_digest()
    shape = [0, 0]
    labels = []
    task_ids = []
    dtype = ""
    with files.replacing(path) as file:
        for rows, y, t in batches:
            content = rows.contiguous().view(torch.uint8).numpy().data
            digest.update(content)
            file.write(content)
            shape = [shape[0] + len(rows), rows.shape[1]]
            dtype = str(rows.dtype).removeprefix("torch.")
            labels.append(y)
            task_ids.append(t)

    description = {"shape": shape, "dtype": dtype, "digest": digest.hexdigest()}
    y = _join(labels)
    t = _drop_own_id(_join(task_ids), task)
    files.save({**description, "y": y, "t": t}, _description_path(path))


def _read(path: Path) -> Arrays | None:
    """Read features; None if there are none, or, with a warning, if a file is damaged."""
    if not _description_path(path).exists():
        return None
    try:
        description = files.load(_description_path(path))
        with path.open("rb") as file:
            if hashlib.file_digest(file, file_digest).hexdigest() != description["digest"]:
                raise ValueError("its checksum is wrong")
        num_rows, width = description["shape"]
        dtype = getattr(torch, description["dtype"])
    except (OSError, ValueError, LookupError) as error:
        warnings.warn(f"The cached features in {path} are damaged ({error}): they are computed again.", stacklevel=6)
        return None

    x = torch.from_file(str(path), shared=False, size=num_rows * width, dtype=dtype).view(num_rows, width)
    if x.nbytes <= MAX_MEMORY_BYTES:
        x = x.clone()
    return Arrays(x, description["y"], description["t"])


def _description_path(path: Path) -> Path:
    """Return the file of the labels, the shape and the checksum of the features in ``path``."""
    return path.with_suffix(".pt")


def _collect(batches: Iterator[FeatureRows], task: Task) -> Arrays:
    """Concatenate features in memory."""
    rows, labels, task_ids = zip(*batches, strict=True)
    return Arrays(torch.cat(rows), _join(labels), _drop_own_id(_join(task_ids), task))


def _join(columns: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the labels or task indices of batches; None if there are none."""
    tensors = [column for column in columns if column is not None]
    if not tensors:
        return None
    return torch.cat(tensors)


def _drop_own_id(task_ids: Tensor | None, task: Task) -> Tensor | None:
    """Leave out task indices that are all the task's own; they are stored if the examples are of several tasks."""
    if task_ids is None or task.id is None:
        return task_ids
    has_own_id_only = bool(task_ids.eq(task.id).all())
    return None if has_own_id_only else task_ids
